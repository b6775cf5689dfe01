"""The process beside the server: ``python -m tests.engines.sglang.receive '{"address": ..., "url": ..., ...}'``.

Prints a line of JSON when it has joined and one after every refit; ends when its input does.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from weightbus import TransferTimeout, WeightBus, WeightBusError
from weightbus_sglang import SglangAdapter


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main(address: str, url: str, adapter_options: dict[str, Any], **options: Any) -> None:
    adapter = SglangAdapter(url=url, **adapter_options)
    bus = WeightBus.receiver(address, adapter=adapter, **options)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    say(joined=True)
    while not ended.is_set():
        try:
            report = bus.recv(timeout=5)
            say(state=bus.state, seconds=report.seconds, buckets=report.buckets)
        except TransferTimeout as exc:
            if "no offer" not in str(exc):
                say(state=bus.state, error=str(exc))
        except WeightBusError as exc:
            say(state=bus.state, error=str(exc))
    bus.close()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
