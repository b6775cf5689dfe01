"""The control plane: who is there, what is agreed, what has ended. No weight bytes pass here."""
