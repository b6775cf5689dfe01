"""The process beside the server: ``python -m tests.engines.sglang.receive '{"address": ..., "url": ..., ...}'``.

Prints a line of JSON when it has joined and one after every refit; ends when its input does.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from weightbus import EndpointClosed, WeightBus, WeightBusError
from weightbus_sglang import SglangAdapter

DAY_S = 86400.0


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def take(bus: WeightBus) -> None:
    """Every refit that comes, until the bus is closed."""
    while True:
        try:
            report = bus.recv(timeout=DAY_S)
            say(state=bus.state, seconds=report.seconds, buckets=report.buckets)
        except EndpointClosed:
            return
        except WeightBusError as exc:
            say(state=bus.state, error=str(exc))


def main(address: str, url: str, adapter_options: dict[str, Any], **options: Any) -> None:
    adapter = SglangAdapter(url=url, **adapter_options)
    with WeightBus.receiver(address, adapter=adapter, **options) as bus:
        say(joined=True)
        threading.Thread(target=take, args=(bus,), daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
