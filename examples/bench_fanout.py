"""Fan-out over a network of limited bandwidth: a star against a chain, in network namespaces on one host.

Run as root: ``python examples/bench_fanout.py --rate 200mbit --json fanout.json --plot fanout.png``. Every process lives in
a namespace of its own behind one bridge; `tc tbf` limits what leaves and what enters each of them. The namespaces are
removed at the end. A refit of 32 buckets of 8 MiB is timed, after a small one that connects.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import weightbus

SWITCH = f"wbf{os.getpid()}x"
PORT = 29700


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")


def space(index: int) -> str:
    return f"wbf{os.getpid()}n{index}"


def address_of(index: int) -> str:
    return f"10.214.3.{index + 1}"


def limit(namespace: str, device: str, rate: str) -> None:
    """What leaves `device` goes at `rate`; a short queue, so that control messages do not wait long behind buckets."""
    words = ("dev", device, "root", "tbf", "rate", rate, "burst", "128kb", "latency", "20ms")
    command("tc", "-n", namespace, "qdisc", "add", *words)


@contextmanager
def network(members: int, rate: str) -> Iterator[None]:
    """Namespaces 0 to `members` - 1, each with one interface on the bridge, limited in both directions."""
    names = [SWITCH, *(space(i) for i in range(members))]
    try:
        for name in names:
            command("ip", "netns", "add", name)
        command("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        command("ip", "-n", SWITCH, "link", "set", "bridge", "up")
        for i in range(members):
            port = f"port{i}"
            ends = (port, "netns", SWITCH, "type", "veth", "peer", "name", "eth0", "netns", space(i))
            command("ip", "link", "add", *ends)
            command("ip", "-n", SWITCH, "link", "set", port, "master", "bridge", "up")
            command("ip", "-n", space(i), "addr", "add", f"{address_of(i)}/24", "dev", "eth0")
            command("ip", "-n", space(i), "link", "set", "eth0", "up")
            command("ip", "-n", space(i), "link", "set", "lo", "up")
            limit(space(i), "eth0", rate)
            limit(SWITCH, port, rate)
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)


def receive(address: str, name: str, backend: str) -> None:
    """Take every refit that comes, and look at nothing: the network is what is measured."""
    with weightbus.WeightBus.receiver(address, engine=name, backend=backend) as bus:
        while True:
            try:
                for _ in bus.recv(timeout=3600, copy=False):
                    pass
            except weightbus.WeightBusError as exc:
                print(f"{name}: {exc}", file=sys.stderr)


def send(address: str, args: argparse.Namespace) -> None:
    """Print the seconds of one refit."""
    tensors = {f"w{i}": torch.full((args.bucket_bytes // 4,), float(i)) for i in range(args.buckets)}
    few = {f"w{i}": tensors[f"w{i}"] for i in range(2)}
    options = {"receivers": args.receivers, "backend": args.backend, "bucket_bytes": args.bucket_bytes}
    with weightbus.WeightBus.sender(address, fanout=args.fanout, slots=args.slots, **options) as bus:
        bus.send(few, version=1, timeout=600)
        start = time.perf_counter()
        report = bus.send(tensors, version=2, timeout=1800)
        seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "buckets": report.buckets, "bytes": report.bytes}))


def start(index: int, role: str, args: argparse.Namespace, *more: str, **options: Any) -> subprocess.Popen[str]:
    words = ["ip", "netns", "exec", space(index), sys.executable, __file__, "--role", role, "--backend", args.backend]
    words += ["--buckets", str(args.buckets), "--bucket-bytes", str(args.bucket_bytes), "--slots", str(args.slots)]
    return subprocess.Popen([*words, "--address", f"tcp://{address_of(0)}:{PORT}", *more], text=True, **options)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Chain and star, from the largest number of receivers down."""
    os.environ |= {"UCX_TLS": "tcp", "WEIGHTBUS_TOKEN": secrets.token_urlsafe(24)}
    rows: list[dict[str, Any]] = []
    counts = sorted(args.counts, reverse=True)
    with network(counts[0] + 1, args.rate), ExitStack() as stack:
        running = []
        for i in range(1, counts[0] + 1):
            running.append(start(i, "receive", args, "--name", f"e{i}"))
            stack.callback(running[-1].kill)
        for count in counts:
            while len(running) > count:
                gone = running.pop()
                gone.kill()
                gone.wait()
            for fanout in args.fanouts if count > 1 else ("chain",):
                more = ("--receivers", str(count), "--fanout", fanout)
                sender = start(0, "send", args, *more, stdout=subprocess.PIPE)
                stack.callback(sender.kill)
                out, _ = sender.communicate(timeout=3600)
                if sender.returncode:
                    raise SystemExit(f"the sender of {fanout} to {count} failed")
                rows.append({"fanout": fanout, "receivers": count, **json.loads(out.splitlines()[-1])})
                print(rows[-1], file=sys.stderr)
    return rows


def table(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    one = next(row["seconds"] for row in rows if row["receivers"] == 1)
    head = f"{args.backend} over TCP, {args.rate} each way, {args.buckets} buckets of {args.bucket_bytes >> 20} MiB"
    lines = [head, "", "| fan-out | receivers | seconds | of a chain to 1 |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda x: (x["fanout"], x["receivers"])):
        ratio = row["seconds"] / one
        lines.append(f"| {row['fanout']} | {row['receivers']} | {row['seconds']:.1f} | {ratio:.2f} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    first = [row for row in rows if row["receivers"] == 1]
    for fanout, mark in (("star", "o"), ("chain", "s")):
        mine = sorted([*first, *(r for r in rows if r["fanout"] == fanout and r["receivers"] > 1)], key=_receivers)
        axes.plot([r["receivers"] for r in mine], [r["seconds"] for r in mine], marker=mark, label=fanout)
    axes.set_xlabel("receivers")
    axes.set_ylabel("seconds per refit")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _receivers(row: dict[str, Any]) -> int:
    return int(row["receivers"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("measure", "send", "receive"), default="measure", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="", help=argparse.SUPPRESS)
    parser.add_argument("--fanout", default="chain", help=argparse.SUPPRESS)
    parser.add_argument("--receivers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 8], help="numbers of receivers; 1 is needed")
    parser.add_argument("--fanouts", nargs="+", choices=("chain", "star"), default=["chain", "star"])
    parser.add_argument("--backend", default="ucx", help="one that can forward")
    parser.add_argument("--rate", default="200mbit", help="of each interface, as tc writes it")
    parser.add_argument("--buckets", type=int, default=32)
    parser.add_argument("--bucket-bytes", type=int, default=8 << 20)
    parser.add_argument("--slots", type=int, default=3, help="3: a credit's way back hides behind the next bucket")
    parser.add_argument("--json", help="where to write the rows")
    parser.add_argument("--plot", help="where to draw them")
    args = parser.parse_args()
    if args.role == "receive":
        receive(args.address, args.name, args.backend)
    elif args.role == "send":
        send(args.address, args)
    else:
        rows = measure(args)
        print(table(rows, args))
        if args.json:
            Path(args.json).write_text(json.dumps({"settings": vars(args), "rows": rows}, indent=1))
        if args.plot:
            plot(rows, args.plot)


if __name__ == "__main__":
    main()
