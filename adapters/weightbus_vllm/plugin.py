"""Entry point of group ``vllm.general_plugins``: vLLM calls it in every process, before a worker is built."""

from __future__ import annotations

NAME = "weightbus"


def register() -> None:
    """Make ``--weight-transfer-config '{"backend": "weightbus"}'`` known to vLLM. Cheap, and safe to call again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if NAME not in getattr(Factory, "_registry", {}):
        Factory.register_engine(NAME, "weightbus_vllm.engine", "WeightbusTransferEngine")
