"""The adapter ``torch``: any `torch.nn.Module` of this process, updated in place."""

from weightbus_torch.adapter import TorchAdapter

__all__ = ["TorchAdapter"]
