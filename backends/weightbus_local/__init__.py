"""Backend `local`: two processes of one host share memory, a memfd for the CPU and CUDA IPC for a GPU."""

from weightbus_local.endpoint import LocalBackend

__all__ = ["LocalBackend"]
