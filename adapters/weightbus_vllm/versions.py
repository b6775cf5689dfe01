"""Which vLLM can be driven. Read from ``vllm.__version__`` or ``GET /version``, never from package metadata."""

from __future__ import annotations

import re

from weightbus.errors import EngineError

FIRST, LAST = (0, 27), (0, 33)


def check_version(text: str) -> None:
    """Refuse a vLLM outside 0.27 to 0.33.

    Raises:
        EngineError: with the reason and what to install.
    """
    match = re.match(r"v?(\d+)\.(\d+)", text)
    found = (int(match[1]), int(match[2])) if match else None
    if found is not None and FIRST <= found <= LAST:
        return
    if found is None:
        reason = "its weight-transfer interface cannot be known"
    elif found < FIRST:
        reason = "before 0.27 vLLM cannot set the version of the weights when an update finishes"
    else:
        reason = "its weight-transfer interface has not been read yet"
    raise EngineError(f"vLLM {text!r} is not supported: {reason}", phase="check", advice="use vLLM 0.27 to 0.33")
