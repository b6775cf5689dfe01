"""`ucxx` and NIXL in one process: two copies of UCX, both moving bytes, neither changing the other's settings."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
for module, extra in (("ucxx", "ucx"), ("nixl_cu12", "nixl")):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is missing: pip install 'weightbus[{extra}]'", allow_module_level=True)

CODE = """
import os, sys, threading
from weightbus.backend import EndpointSpec, State
from weightbus_nixl import NixlBackend
from weightbus_ucx import UcxBackend

N = 1 << 20
ends = []

def open_lane(backend):
    r, s = (backend.endpoint(EndpointSpec(name=n, role=n, host="127.0.0.1")) for n in ("receive", "send"))
    ends.extend((s, r))
    slot = r.allocate(N)
    slot.tensor.fill_(0xA5)
    rx = r.listen(bytes(16), [slot])
    got = []
    thread = threading.Thread(target=lambda: got.append(s.connect(r.address, bytes(16), 30)))
    thread.start()
    while thread.is_alive(): r.progress()
    return r, s, rx, got[0], s.allocate(N), slot

def move(lane, value):
    r, s, rx, tx, region, slot = lane
    region.tensor.fill_(value)
    work = tx.post_send(region, N - 1, b"h%d" % value, 0)
    arrived = []
    while work.state is State.PENDING or not arrived:
        s.progress(); r.progress(); arrived += rx.arrivals()
    assert work.state is State.DONE, work.error
    assert arrived[0].header == b"h%d" % value
    assert slot.tensor[:-1].eq(value).all() and int(slot.tensor[-1]) == 0xA5
    rx.release(arrived[0])

before = dict(os.environ)
backends = {"ucx": UcxBackend(), "nixl": NixlBackend()}
lanes = [open_lane(backends[name]) for name in sys.argv[1:]]
for round in range(3):
    for index, lane in enumerate(lanes):
        move(lane, 10 * round + index)
changed = {k for k in os.environ.keys() | before.keys() if os.environ.get(k) != before.get(k)}
assert not any(k.startswith("UCX_") for k in changed), changed
told = backends["ucx"].probe()
assert told.ok and any("Two copies of UCX" in w for w in told.warnings), told
for end in ends: end.close()
print("both moved")
"""


@pytest.mark.parametrize("order", [("ucx", "nixl"), ("nixl", "ucx")], ids="-then-".join)
def test_both_move_bytes_in_one_process(order: tuple[str, str]) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    done = subprocess.run(
        [sys.executable, "-c", CODE, *order], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, timeout=170, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip().splitlines()[-1:]) == (0, ["both moved"]), done.stderr
