"""`weightbus bench`: refits between two processes, and what else could move the same bytes, in one run."""

from __future__ import annotations

import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console

from weightbus.cli import baselines, doctor, raw
from weightbus.cli.measured import Case
from weightbus.cli.shapes import specs_of
from weightbus.config import default_bucket_bytes, parse_bytes
from weightbus.errors import ConfigError, WeightBusError
from weightbus.manifest import TensorSpec
from weightbus.registry import BACKENDS, known, load_backend
from weightbus.testing.peers import Peer

CASE_S = 900.0
_UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B"))
SEND_COVERS = "send() to its return: every parameter written, verified and reported by the engine"


@attrs.frozen(kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        models: names of `shapes.MODELS`.
        backends: names; None: all that can run here between processes.
        buckets: sizes; None: the default of the device.
        digests: "on", "off".
        rounds: refits, and rounds of each baseline, after the first.
        baselines: names of `baselines.METHODS`; None: all that can run.
        direct: also measure direct mode, where the backend has it.
    """

    models: list[str]
    backends: list[str] | None = None
    buckets: list[str | None] = attrs.field(factory=lambda: [None])
    slots: int = 2
    digests: list[str] = attrs.field(factory=lambda: ["on"])
    device: str = "cpu"
    rounds: int = 5
    baselines: list[str] | None = None
    direct: bool = False


@attrs.frozen(kw_only=True)
class Row:
    """One line: a way to move one model.

    Attributes:
        seconds: of every round; the first one is cold.
        equal: what arrived is what was sent, compared by digest after the last round.
        error: why there are no figures, or empty.
        phases: median seconds by phase of the steady refits (weightbus only).
        alone: seconds of pack, wire, verify and load, each measured alone (weightbus only).
    """

    model: str
    name: str
    settings: str = ""
    nbytes: int
    tensors: int
    covers: str
    seconds: tuple[float, ...] = ()
    equal: bool = False
    error: str = ""
    phases: dict[str, float] = attrs.field(factory=dict)
    alone: dict[str, float] = attrs.field(factory=dict)

    @property
    def cold_s(self) -> float:
        return self.seconds[0]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds[1:])

    @property
    def gbytes_per_s(self) -> float:
        return self.nbytes / self.median_s / 1e9

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        figures = {} if self.error else {"cold_s": self.cold_s, "median_s": self.median_s, "gbps": self.gbytes_per_s}
        return {**attrs.asdict(self), **figures}


@attrs.frozen(kw_only=True)
class Result:
    """A whole run."""

    settings: Settings
    host: dict[str, str]
    rows: tuple[Row, ...]

    def of(self, model: str) -> list[Row]:
        return [row for row in self.rows if row.model == model]

    def find(self, model: str, name: str) -> Row | None:
        """The line of a baseline, if it has figures."""
        return next((row for row in self.of(model) if row.name == name and not row.error), None)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        rows = [row.to_dict() for row in self.rows]
        return {"settings": attrs.asdict(self.settings), "host": self.host, "rows": rows}


def default_models(device: str) -> list[str]:
    """What `make bench` measures."""
    few = ["minilm", "qwen3-0.6b", "tiny-20000"]
    return few if device == "cpu" else [*few, "qwen3-8b", "moe-18000"]


def complete(result: Result) -> bool:
    """Every line has figures, and what arrived was right."""
    return all(row.equal and not row.error for row in result.rows)


def run(settings: Settings, console: Console) -> Result:
    """Measure everything, one thing at a time.

    Raises:
        ConfigError: unknown models, baselines or settings; nothing was measured.
    """
    host = dict(_host())
    models = {model: specs_of(model) for model in settings.models}
    methods = _methods(settings)
    if settings.rounds < 1 or settings.device not in ("cpu", "cuda") or set(settings.digests) - {"on", "off"}:
        raise ConfigError("rounds must be 1 or more, device cpu or cuda, digest on or off")
    backends = settings.backends or _backends()
    rows = []
    for model, specs in models.items():
        for case in (case for backend in backends for case in _cases(settings, model, backend)):
            with console.status(f"{model}: {case.backend} {_describe(case)}"):
                rows.append(_tell(_refits(case, specs), console))
        for name in methods:
            if len(specs) <= baselines.METHODS[name].max_tensors:
                with console.status(f"{model}: {name}"):
                    rows.append(_tell(_baseline(settings, model, name, specs), console))
    return Result(settings=settings, host=host, rows=tuple(rows))


def _tell(row: Row, console: Console) -> Row:
    text = row.error or f"{row.median_s * 1e3:.1f} ms"
    console.print(f"{row.model}: {row.name} {row.settings} {text}", highlight=False, markup=False)
    return row


def _methods(settings: Settings) -> list[str]:
    names = settings.baselines
    if names is None:
        fits = {name: m for name, m in baselines.METHODS.items() if settings.device in m.devices}
        return [name for name, method in fits.items() if not raw.missing(method.needs)]
    unknown = sorted(set(names) - set(baselines.METHODS) - {"none"})
    if unknown:
        raise ConfigError(f"no baseline {', '.join(unknown)}", advice=f"known: none, {', '.join(baselines.METHODS)}")
    return [name for name in names if name != "none"]


def _backends() -> list[str]:
    """All that can run here and reach another process."""
    inner = "loopback"  # core's own, within one process
    return [plugin.name for plugin in doctor.probe_all([n for n in known(BACKENDS) if n != inner]) if plugin.ok]


def _cases(settings: Settings, model: str, backend: str) -> Iterator[Case]:
    shared = load_backend(backend).capabilities.shares_memory
    for size in settings.buckets:
        nbytes = parse_bytes(size) or default_bucket_bytes(settings.device, shared=shared)
        for digest in settings.digests:
            for direct in (False, True) if settings.direct else (False,):
                yield Case(
                    model=model,
                    backend=backend,
                    bucket_bytes=nbytes,
                    slots=settings.slots,
                    digest=digest == "on",
                    device=settings.device,
                    rounds=settings.rounds,
                    direct=direct,
                )


def _describe(case: Case) -> str:
    size = next(
        (f"{case.bucket_bytes >> shift} {unit}" for shift, unit in _UNITS if not case.bucket_bytes % (1 << shift)), ""
    )
    mode = "direct" if case.direct else f"{size} x {case.slots}"
    return f"{mode}, digest {'on' if case.digest else 'off'}"


def _refits(case: Case, specs: list[TensorSpec]) -> Row:
    row = _row(case.model, case.backend, specs, SEND_COVERS, settings=_describe(case))
    try:
        reports, equal = _pair(case)
        steady = reports[1:]
        phases = {
            phase: statistics.median(r["seconds"].get(phase, 0.0) for r in steady) for phase in steady[-1]["seconds"]
        }
        alone = {} if case.direct else _alone(case)
    except WeightBusError as exc:
        return attrs.evolve(row, error=_last_line(exc))
    times = tuple(report["total_s"] for report in reports)
    return attrs.evolve(row, seconds=times, equal=equal, phases=phases, alone=alone)


def _pair(case: Case) -> tuple[list[dict[str, Any]], bool]:
    (reports, sent), (_, held) = _both("measured:trainer", "measured:engine", case)
    return reports, sent == held


def _alone(case: Case) -> dict[str, float]:
    with _peer("measured:stages", case) as peer:
        found = peer.result(CASE_S)
    seconds, _ = _both("measured:wire_send", "measured:wire_recv", case)
    return {**found, "wire": seconds}


def _baseline(settings: Settings, model: str, name: str, specs: list[TensorSpec]) -> Row:
    row = _row(model, name, specs, baselines.METHODS[name].covers)
    try:
        sent, held = _both("baselines:sender", "baselines:receiver", name, model, settings.device, settings.rounds)
    except WeightBusError as exc:
        return attrs.evolve(row, error=_last_line(exc))
    times, digest, own = sent
    return attrs.evolve(row, seconds=tuple(times), equal=digest == (own or held))


def _both(sender: str, receiver: str, *args: Any) -> list[Any]:
    """What two functions return, each in its process, with a pipe between them as their last argument."""
    one, two = get_context("spawn").Pipe()
    with _peer(sender, *args, one) as a, _peer(receiver, *args, two) as b:
        one.close()  # so that either side sees the end of the other
        two.close()
        ended = wait([a.pipe, b.pipe], CASE_S)
        order = (b, a) if b.pipe in ended else (a, b)  # who ends first has the cause, if one fails
        results = {peer.pid: peer.result(CASE_S) for peer in order}
        return [results[a.pid], results[b.pid]]


def _peer(target: str, *args: Any) -> Peer:
    return Peer(f"weightbus.cli.{target}", args, linked=False, method="forkserver")


def _row(model: str, name: str, specs: list[TensorSpec], covers: str, settings: str = "") -> Row:
    nbytes = sum(spec.nbytes for spec in specs)
    return Row(model=model, name=name, settings=settings, nbytes=nbytes, tensors=len(specs), covers=covers)


def _last_line(exc: Exception) -> str:
    return str(exc).strip().splitlines()[-1]


def _host() -> Iterator[tuple[str, str]]:
    yield from doctor.host_facts()
    yield "processor", _processor()
    yield "load", f"{os.getloadavg()[0]:.1f} at the start"
    yield "command", " ".join(["weightbus", *sys.argv[1:]])
    yield "date", time.strftime("%Y-%m-%d")


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"model name\s*:\s*(.*)", text)
    return found[1] if found else platform.machine()
