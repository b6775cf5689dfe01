"""weightbus for vLLM 0.27 to 0.33: a weight-transfer engine, a worker extension and a driver.

Importing it imports neither vllm nor httpx; the plugin modules that run inside vLLM do.
"""

from __future__ import annotations

from weightbus_vllm.adapter import VllmAdapter, join

__all__ = ["VllmAdapter", "join"]
