"""Check backend `nccl` between real GPUs: groups, rates beside a raw NCCL broadcast, a killed member, a shared GPU.

    PYTHONPATH=.:backends:adapters python tests/gpu/check_nccl.py            # as many GPUs as there are, two at least
    PYTHONPATH=.:backends:adapters python tests/gpu/check_nccl.py --gloo     # the same on CPUs

Prints a table, writes ``nccl.json`` into ``$OUT`` if that is set, and ends with exit code 1 if a check has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from weightbus.backend import EndpointSpec, GroupSpec, Region, State
from weightbus.deadline import Deadline
from weightbus.errors import TransportError
from weightbus.testing.peers import ParentLink, Peer
from weightbus_nccl import NcclBackend

dist: Any = torch.distributed
KEY = bytes(range(16))
OPERATION_S = 8.0


class Member:
    """One process of a check: an endpoint on one device, and a raw process group beside it."""

    def __init__(self, role: str, device: str, nbytes: int) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        spec = EndpointSpec(name=f"{role}@{device}", role=role, device=self.device, host="127.0.0.1")
        self.endpoint = NcclBackend(timeout=OPERATION_S).endpoint(spec)
        self.regions = [self.endpoint.allocate(nbytes) for _ in range(2)]
        self.channel: Any = None
        self.stuck: Any = None

    def address(self) -> bytes:
        return self.endpoint.address

    def join(self, group: dict[str, Any], timeout_s: float) -> float:
        """Seconds that `connect_group` took."""
        started = time.monotonic()
        slots: list[Region] = self.regions if group["rank"] else []
        self.channel = self.endpoint.connect_group(GroupSpec(lane_key=KEY, **group), slots, timeout_s)
        return time.monotonic() - started

    def move(self, rounds: int, nbytes: int, seed: int, check: bool) -> float:
        """Send or receive `rounds` buckets, two in flight; seconds. With `check` every byte is compared."""
        self._synchronize()
        started = time.monotonic()
        if self.channel.group.rank:
            self._receive(rounds, nbytes, seed, check)
        else:
            self._send(rounds, nbytes, seed, check)
        self._synchronize()
        return time.monotonic() - started

    def _send(self, rounds: int, nbytes: int, seed: int, check: bool) -> None:
        works: list[Any] = []
        for k in range(rounds):
            if k >= 2:
                self._until(lambda k=k: works[k - 2].state is not State.PENDING)
            if check:
                self.regions[k % 2].tensor[:nbytes].fill_((seed + k) % 251)
            works.append(self.channel.post_send(self.regions[k % 2], nbytes, b"h", k % 2))
        self._until(lambda: all(work.state is not State.PENDING for work in works))
        for work in works:
            if work.error is not None:
                raise work.error

    def _receive(self, rounds: int, nbytes: int, seed: int, check: bool) -> None:
        for k in range(min(2, rounds)):
            self.channel.post_recv(k, nbytes, b"h")
        landed: list[Any] = []
        done = 0
        while done < rounds:
            self._until(lambda: self._take(landed) or self.channel.error)
            if not landed:
                raise self.channel.error
            arrival = landed.pop(0)
            if check and not bool(arrival.region.tensor[:nbytes].eq((seed + done) % 251).all()):
                raise ValueError(f"bucket {done} has wrong bytes")
            self.channel.release(arrival)
            if done + 2 < rounds:
                self.channel.post_recv(arrival.slot, nbytes, b"h")
            done += 1

    def _take(self, landed: list[Any]) -> bool:
        landed += self.channel.arrivals()
        return bool(landed)

    def _until(self, condition: Any) -> None:
        deadline = Deadline.after(60)
        while not condition():
            self.endpoint.progress()
            time.sleep(0.0001)  # the library's own threads need the cores too
            if deadline.expired:
                raise TimeoutError("a bucket did not move within 60 s")

    def enter(self, nbytes: int) -> None:
        """Enter a broadcast and leave it in progress."""
        if self.channel.group.rank:
            self.channel.post_recv(0, nbytes, b"h")
        else:
            self.stuck = self.channel.post_send(self.regions[0], nbytes, b"h", 0)

    def outcome(self) -> dict[str, Any]:
        """How what `enter` left ended, and whether the device still works."""
        started = time.monotonic()
        drained = self.channel.drain(3 * OPERATION_S)
        seconds = time.monotonic() - started
        error = self.channel.error
        self.channel.close()
        works = float(torch.ones(1000, device=self.device).sum()) == 1000.0
        return {
            "drained": drained,
            "seconds": seconds,
            "error": type(error).__name__,
            "text": str(error),
            "works": works,
        }

    def raw(self, path: str, rank: int, size: int, rounds: int, nbytes: int) -> float:
        """The same bytes by a default process group of torch.distributed; seconds, and it stays for later calls."""
        if not dist.is_initialized():
            name = "nccl" if self.device.type == "cuda" else "gloo"
            device = self.device if self.device.type == "cuda" else None
            dist.init_process_group(name, init_method=f"file://{path}", rank=rank, world_size=size, device_id=device)
        tensors = [region.tensor[:nbytes] for region in self.regions]
        dist.broadcast(tensors[0][:1], 0)
        self._synchronize()
        started = time.monotonic()
        works = [dist.broadcast(tensors[k % 2], 0, async_op=True) for k in range(rounds)]
        for work in works:
            work.wait()
        self._synchronize()
        return time.monotonic() - started

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def leave(self) -> None:
        if self.channel is not None:
            self.channel.close()

    def close(self) -> None:
        self.endpoint.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def serve(link: ParentLink, role: str, device: str, nbytes: int) -> None:
    """A member's process."""
    member = Member(role, device, nbytes)
    while True:
        name, args = link.recv(600)
        try:
            link.send(("value", getattr(member, name)(*args)))
        except Exception as exc:
            link.send(("raised", f"{type(exc).__name__}: {exc}"))
        if name == "close":
            return


class Team:
    """Members, one per device; all of them do each step at once."""

    def __init__(self, devices: list[str], nbytes: int) -> None:
        self.nbytes = nbytes
        self.peers = [self.spawn("receive" if rank else "send", device) for rank, device in enumerate(devices)]

    def spawn(self, role: str, device: str) -> Peer:
        return Peer(f"{Path(__file__).resolve()}:serve", (role, device, self.nbytes))

    def start(self, rank: int, name: str, *args: Any) -> None:
        self.peers[rank].send((name, args))

    def answer(self, rank: int) -> Any:
        kind, value = self.peers[rank].recv(120)
        if kind == "raised":
            raise RuntimeError(f"member {rank}: {value}")
        return value

    def all(self, name: str, *args: Any) -> list[Any]:
        for rank in range(len(self.peers)):
            self.start(rank, name, *args)
        return [self.answer(rank) for rank in range(len(self.peers))]

    def group(self, group_id: str, ranks: list[int]) -> float:
        """Seconds until all are joined."""
        self.start(0, "address")
        address = self.answer(0)
        members = tuple(f"m{rank}" for rank in ranks)
        for place, rank in enumerate(ranks):
            group = {"group_id": group_id, "rank": place, "members": members, "address": address}
            self.start(rank, "join", group, 60.0)
        return float(max(self.answer(rank) for rank in ranks))

    def end(self) -> None:
        for rank, peer in enumerate(self.peers):
            if peer.alive:
                self.start(rank, "close")
                self.answer(rank)
                peer.result(60)
            peer.close()


@contextmanager
def team(devices: list[str], nbytes: int) -> Iterator[Team]:
    made = Team(devices, nbytes)
    try:
        yield made
        made.end()
    finally:
        for peer in made.peers:
            peer.close()


def rates(devices: list[str], nbytes: int, rounds: int) -> dict[str, Any]:
    """One sender to all other devices: values, then rates of ours and of raw broadcasts, in turns."""
    total, gb = rounds * nbytes, 1e9
    with team(devices, nbytes) as members, tempfile.TemporaryDirectory() as folder:
        joined = members.group("g", list(range(len(devices))))
        members.all("move", 5, nbytes - 3, 7, True)
        ours, raw = [], []
        for rank in range(len(devices)):
            members.start(rank, "raw", f"{folder}/store", rank, len(devices), 2, nbytes)
        for rank in range(len(devices)):
            members.answer(rank)
        for _ in range(5):
            ours.append(max(members.all("move", rounds, nbytes, 0, False)))
            for rank in range(len(devices)):
                members.start(rank, "raw", f"{folder}/store", rank, len(devices), rounds, nbytes)
            raw.append(max(members.answer(rank) for rank in range(len(devices))))
        members.all("move", 3, 1001, 9, True)
        mine, theirs = statistics.median(ours), statistics.median(raw)
    return {
        "check": f"1 to {len(devices) - 1}", "ok": True, "join_s": joined, "ours_GBps": total / mine / gb,
        "raw_GBps": total / theirs / gb, "ratio": theirs / mine,
    }  # fmt: skip


def two_senders(devices: list[str], nbytes: int, rounds: int) -> dict[str, Any]:
    """Two groups of two at once, as paired lanes are."""
    with team([devices[0], devices[2]], nbytes) as one, team([devices[1], devices[3]], nbytes) as two:
        joined = max(one.group("one", [0, 1]), two.group("two", [0, 1]))
        started = time.monotonic()
        for pair, seed in ((one, 3), (two, 90)):
            for rank in (0, 1):
                pair.start(rank, "move", rounds, nbytes, seed, True)
        for pair in (one, two):
            for rank in (0, 1):
                pair.answer(rank)
        seconds = time.monotonic() - started
    return {"check": "2 to 2", "ok": True, "join_s": joined, "checked_GBps": 2 * rounds * nbytes / seconds / 1e9}


def killed(devices: list[str], nbytes: int) -> dict[str, Any]:
    """The last member is killed while the others are inside a broadcast; the rest regroup with a new process."""
    last = len(devices) - 1
    with team(devices, nbytes) as members:
        members.group("first", list(range(len(devices))))
        members.all("move", 2, nbytes, 1, True)
        for rank in range(last):
            members.start(rank, "enter", nbytes)
            members.answer(rank)
        time.sleep(0.5)
        members.peers[last].kill()
        for rank in range(last):
            members.start(rank, "outcome")
        outcomes = [members.answer(rank) for rank in range(last)]
        members.peers[last].close()
        members.peers[last] = members.spawn("receive", devices[last])
        again = members.group("second", list(range(len(devices))))
        members.all("move", 4, nbytes, 50, True)
    ok = all(one["drained"] and one["works"] for one in outcomes) and outcomes[0]["error"] != "NoneType"
    ok = ok and max(one["seconds"] for one in outcomes) < OPERATION_S + 4
    return {"check": f"killed 1 of {len(devices)}", "ok": ok, "regroup_s": again, "outcomes": outcomes}


def regroups(devices: list[str], nbytes: int) -> dict[str, Any]:
    """Ten regroups: what they take, and that reserved memory stays flat."""
    with team(devices, nbytes) as members:
        seconds, reserved = [], []
        for turn in range(10):
            seconds.append(members.group(f"turn {turn}", list(range(len(devices)))))
            members.all("move", 2, nbytes, turn, True)
            members.all("leave")
            reserved.append(max(members.all("reserved")))
    return {
        "check": "10 regroups", "ok": reserved[-1] == reserved[1], "median_join_s": statistics.median(seconds),
        "reserved": [reserved[1], reserved[-1]],
    }  # fmt: skip


def shared_gpu(nbytes: int) -> dict[str, Any]:
    with team(["cuda:0", "cuda:0"], nbytes) as members:
        try:
            members.group("g", [0, 1])
            text = "it was accepted"
        except RuntimeError as exc:
            text = str(exc)
            try:
                members.answer(1)
            except RuntimeError:
                pass
    return {"check": "two on one GPU", "ok": "both on GPU" in text, "text": text}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--mib", type=int, default=0, help="bucket size")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    count = 4 if args.gloo else torch.cuda.device_count()
    devices = ["cpu"] * count if args.gloo else [f"cuda:{i}" for i in range(count)]
    nbytes = (args.mib or (4 if args.gloo else 256)) << 20
    if count < 2:
        print("two GPUs are needed, or --gloo")
        return 1
    checks: list[Callable[[], dict[str, Any]]] = [lambda: rates(devices[:2], nbytes, args.rounds)]
    if count >= 4:
        checks += [
            lambda: rates(devices[:4], nbytes, args.rounds),
            lambda: two_senders(devices[:4], nbytes, args.rounds),
        ]
    checks += [lambda: killed(devices[: min(3, count)], nbytes), lambda: regroups(devices[:2], 1 << 20)]
    if not args.gloo:
        checks.append(lambda: shared_gpu(1 << 20))
    results = []
    for check in checks:
        try:
            results.append(check())
        except (RuntimeError, TransportError, TimeoutError) as exc:
            results.append({"check": "failed", "ok": False, "error": f"{type(exc).__name__}: {exc}"})
        print(json.dumps(results[-1]), flush=True)
    nccl = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_NCCL", "TORCH_SYMM"))}
    facts = {"torch": torch.__version__, "environment": nccl, "probe": NcclBackend().probe().facts, "MiB": nbytes >> 20}
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "nccl.json").write_text(json.dumps({"facts": facts, "results": results}, indent=1))
    print(json.dumps(facts))
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
