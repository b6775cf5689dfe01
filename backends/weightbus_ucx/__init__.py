"""Backend `ucx`: tagged messages over UCX, by ``ucxx``, on host and CUDA memory."""

from weightbus_ucx.backend import UcxBackend

__all__ = ["UcxBackend"]
