"""The vLLM engine of the test and its driver, in vLLM's environment: ``vllm_peer.py ADDRESS MODEL``, as `torch_peer`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engines.vllm.environment import ENVIRONMENT

os.environ.update(ENVIRONMENT)

from tests.engines.vllm import rig
from weightbus import WeightBus


def main(address: str, checkpoint: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes its log to standard output

    def say(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    llm = rig.engine(Path(checkpoint), weight_transfer_config={"backend": "weightbus"}, worker_extension_cls="")
    options = {"llm": llm, "join": {"address": address, "engine": "vllm"}}
    with WeightBus.driver(address, engine="vllm", ranks=1, adapter="vllm", adapter_options=options) as driver:
        say(joined=True)
        for line in sys.stdin:
            if json.loads(line)["do"] == "refit":
                driver.drive(timeout=120)
                say(version=llm.get_weight_version())
            else:
                say(outputs=rig.generate(llm, together=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
