"""Backend ``nccl``: one broadcast per bucket to all receivers, by NCCL between GPUs and by Gloo between CPUs."""

from weightbus_nccl.backend import NcclBackend

__all__ = ["NcclBackend"]
