"""`weightbus doctor`: what this machine offers to each backend and adapter, what is in the way, and the cure."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import weightbus
from weightbus.calibration import copy_bytes_per_s
from weightbus.errors import BackendUnavailable, ConfigError, WeightBusError
from weightbus.registry import ADAPTERS, BACKENDS, known, load_adapter, load_backend
from weightbus.testing.peers import Peer, PeerFailed

PROBE_S = 120.0
_MARKS = {True: "[green]ready[/green]", False: "[red]no[/red]"}


@attrs.frozen(kw_only=True)
class Plugin:
    """One backend or adapter as it stands here.

    Attributes:
        ok: it can run.
        reason: why not, or empty.
        advice: the cure, or empty.
        facts: text to text.
        warnings: works, but slow or fragile; each with its cure.
    """

    name: str
    ok: bool
    reason: str = ""
    advice: str = ""
    facts: dict[str, str] = attrs.field(factory=dict)
    warnings: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Findings:
    """Everything `examine` saw.

    Attributes:
        host: facts of the machine, Python and torch.
        warnings: of the machine.
        needed: the backend that decides `ok`.
    """

    host: dict[str, str]
    warnings: tuple[str, ...]
    backends: tuple[Plugin, ...]
    adapters: tuple[Plugin, ...]
    needed: str

    @property
    def ok(self) -> bool:
        return any(plugin.ok for plugin in self.backends if plugin.name == self.needed)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"ok": self.ok, **attrs.asdict(self)}


def examine(needed: str | None = None) -> Findings:
    """Probe every backend in a process of its own, since a broken wire library may crash; look at every adapter.

    Args:
        needed: the backend that must run; default: the one `WeightBus.sender` takes by default.

    Raises:
        UnknownPlugin: no backend of that name.
    """
    default = str(inspect.signature(weightbus.WeightBus.sender).parameters["backend"].default)
    if needed is not None and needed not in known(BACKENDS):
        load_backend(needed)
    names = known(BACKENDS) + ([needed] if needed is not None and ":" in needed else [])
    return Findings(
        host=dict(host_facts()),
        warnings=tuple(host_warnings()),
        backends=tuple(probe_all(names)),
        adapters=tuple(_adapter(name) for name in known(ADAPTERS)),
        needed=needed or default,
    )


def probe(name: str) -> dict[str, Any]:
    """In a process of its own: a `Plugin` as a dict."""
    try:
        found = load_backend(name).probe()
    except WeightBusError as exc:
        return attrs.asdict(Plugin(name=name, ok=False, reason=exc.what, advice=exc.advice or ""))
    plugin = Plugin(name=name, **attrs.asdict(found, recurse=False))
    return attrs.asdict(plugin)


def probe_all(names: list[str]) -> Iterator[Plugin]:
    """Probe these backends, each in a process of its own."""
    peers = [Peer("weightbus.cli.doctor:probe", (name,), linked=False, method="forkserver") for name in names]
    try:
        for name, peer in zip(names, peers, strict=True):
            try:
                yield Plugin(**peer.result(PROBE_S))
            except PeerFailed as exc:
                text = str(exc).strip().splitlines()[-1]
                yield Plugin(name=name, ok=False, reason=f"the probe failed: {text}", advice=_reinstall(name))
    finally:
        for peer in peers:
            peer.close()


def _reinstall(name: str) -> str:
    return f"reinstall its libraries: pip install --force-reinstall 'weightbus[{name}]'"


def _adapter(name: str) -> Plugin:
    """Importable or not; an adapter talks to its engine only when it is made, so nothing is made here."""
    facts = _requirements(name)
    try:
        load_adapter(name, {"?": None})  # refused by the option check, after the import and before the constructor
    except BackendUnavailable as exc:
        return Plugin(name=name, ok=False, reason=exc.what, advice=exc.advice or "", facts=facts)
    except ConfigError as exc:
        if (exc.advice or "").startswith("options: "):
            facts["options"] = str(exc.advice).removeprefix("options: ")
    except WeightBusError as exc:
        return Plugin(name=name, ok=False, reason=exc.what, advice=exc.advice or "", facts=facts)
    missing = [package for package, version in facts.items() if version == "missing"]
    if missing:
        reason = f"{', '.join(missing)} is not installed"
        return Plugin(name=name, ok=False, reason=reason, advice=f"pip install 'weightbus[{name}]'", facts=facts)
    return Plugin(name=name, ok=True, facts=facts)


def _requirements(extra: str) -> dict[str, str]:
    """What the extra of this name asks for, and which version is here."""
    try:
        wanted = importlib.metadata.requires("weightbus") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return {}
    found = {}
    for line in wanted:
        if re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", line):
            package = re.split(r"[^\w.-]", line, maxsplit=1)[0]
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                found[package] = "missing"
    return found


def host_facts() -> Iterator[tuple[str, str]]:
    """What this machine is, as pairs of text."""
    yield "weightbus", weightbus.__version__
    yield "python", platform.python_version()
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    copy = copy_bytes_per_s(torch.device("cpu"))
    yield "memory copy", f"{copy / 1e9:.1f} GB/s, one thread" if copy else "not measured: no memory for it"
    yield "torch", torch.__version__
    yield "torch's CUDA", torch.version.cuda or "none (a CPU build)"
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        yield f"GPU {index}", f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}"
    yield "locked memory", _limit(resource.RLIMIT_MEMLOCK, 1 << 20, "MiB")
    yield "open files", _limit(resource.RLIMIT_NOFILE, 1, "")
    yield "/dev/shm", _shared_memory()
    yield "WEIGHTBUS_TOKEN", "set" if os.environ.get("WEIGHTBUS_TOKEN") else "not set: loopback addresses only"
    for variable in ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if variable in os.environ:
            yield variable, os.environ[variable] or "(empty)"


def _limit(which: int, unit: int, name: str) -> str:
    soft = resource.getrlimit(which)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // unit} {name}".strip()


def _shared_memory() -> str:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return "none"
    return f"{stat.f_bavail * stat.f_frsize / 2**30:.1f} of {stat.f_blocks * stat.f_frsize / 2**30:.1f} GiB free"


def host_warnings() -> Iterator[str]:
    """What is wrong or fragile about the machine, each with its cure."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        yield f"Python {platform.python_version()} is not tested: use 3.11 or 3.12."
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:True" in settings.replace(" ", ""):
        yield (
            "PyTorch's expandable segments are on: torch's own CUDA tensors cannot be shared by CUDA IPC, "
            "buckets can. Unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF."
        )
    if Path("/proc/driver/nvidia/version").exists() and not torch.cuda.is_available():
        yield (
            f"A GPU driver is loaded, but torch {torch.__version__} sees no GPU: install a CUDA build of torch, or "
            "look at CUDA_VISIBLE_DEVICES."
        )
    yield from _two_copies()


def _two_copies() -> Iterator[str]:
    """Wheels that each bring their own UCX: in one process the second to load may answer the first one's calls."""
    copies: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        for file in distribution.files or ():
            if re.fullmatch(r"libucs(-[0-9a-f]+)?\.so[.\d]*", file.name):
                copies.setdefault(distribution.metadata["Name"], []).append(str(file))
    if len(copies) > 1:
        yield (
            f"{len(copies)} copies of libucs are installed, by {', '.join(sorted(copies))}: load only one of them in a "
            "process (one wire backend per process), unless its backend says that the pair is tested."
        )


def show(found: Findings, console: Console) -> None:
    """Tables of `found` for people."""
    host = Table(title="this machine", show_header=False)
    for name, value in found.host.items():
        host.add_row(name, escape(value))
    console.print(host)
    for title, plugins in (("backends", found.backends), ("adapters", found.adapters)):
        table = Table("name", "", "what is here, what is in the way", title=title, show_lines=True)
        for plugin in plugins:
            table.add_row(plugin.name, _MARKS[plugin.ok], _describe(plugin))
        console.print(table)
    for warning in found.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", highlight=False)
    verdict = f"backend {found.needed} can run here"
    console.print(verdict if found.ok else f"[red]backend {found.needed} cannot run here[/red]")


def _describe(plugin: Plugin) -> str:
    lines = [f"[red]{escape(plugin.reason)}[/red]"] if plugin.reason else []
    lines += [f"cure: {escape(plugin.advice)}"] if plugin.advice else []
    lines += [f"{name}: {escape(value)}" for name, value in plugin.facts.items()]
    return "\n".join(lines + [f"[yellow]warning:[/yellow] {escape(text)}" for text in plugin.warnings])
