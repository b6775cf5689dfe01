"""Settings: parsed and checked before anything is touched, all faults at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

from weightbus.control.security import split_address
from weightbus.errors import ConfigError, WeightBusError
from weightbus.plan import MAX_BUCKET_BYTES, MIN_BUCKET_BYTES

SizeLike = int | str
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
MAX_RANKS = 65536
NOTHING_DONE = "Nothing was bound or allocated."
BUCKET_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
SHARED_BUCKET_BYTES = 4 << 20  # the reader finds in the cache what was packed, with two slots and other tenants


Value = TypeVar("Value")
Other = TypeVar("Other")


class Faults:
    """Gathers what is wrong with the settings of one call, so that all of it is said at once."""

    def __init__(self) -> None:
        self._errors: list[WeightBusError] = []

    def get(self, make: Callable[[], Value], otherwise: Other) -> Value | Other:
        """What `make` gives; `otherwise` where it raises, until `refuse`."""
        try:
            return make()
        except WeightBusError as exc:
            self._errors.append(exc)
            return otherwise

    def refuse(self) -> None:
        """Raise the only fault as it is, several in one ConfigError, which says the advice of each."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            advice = dict.fromkeys(e.advice for e in self._errors if e.advice not in (None, NOTHING_DONE))
            raise ConfigError(
                "; ".join(e.what for e in self._errors), advice=" ".join([NOTHING_DONE, *map(str, advice)])
            ) from self._errors[0]


def parse_bytes(size: SizeLike | None) -> int | None:
    """Bytes from an integer or a text such as ``"512MiB"``; None stays None.

    Raises:
        ConfigError: not a size.
    """
    if size is None or (isinstance(size, int) and not isinstance(size, bool)):
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    unit = UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise ConfigError(f"{size!r} is not a size", advice="Write bytes, or text such as '512MiB'.")
    return int(float(found[1]) * unit)


def device_of(device: str | torch.device | None) -> torch.device:
    """A torch device with its index; None is the CPU.

    Raises:
        ConfigError: not a device, or one that is not here.
    """
    try:
        found = torch.device(device or "cpu")
    except (RuntimeError, TypeError) as exc:
        raise ConfigError(f"{device!r} is not a device: {exc}", advice="Write 'cpu' or 'cuda:0'.") from exc
    if found.type not in BUCKET_BYTES:
        raise ConfigError(f"no bucket can live on {device!r}", advice="Write 'cpu' or 'cuda:0'.")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"{device!r}: no CUDA device is visible here",
                advice="Under Ray, ask for a GPU or set RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1.",
            )
        found = torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
    return found


@lru_cache(maxsize=1)
def host_id() -> str:
    """Names this host and its PID namespace: equal for two processes that can see each other's death."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = os.uname().nodename
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{boot}/{namespace}"


def process_stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; empty when the process has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def runs(pid: int) -> bool:
    """A process of this host has not ended; one that was killed and not yet waited for has."""
    return process_stat(pid)[:1] not in ([], ["Z"], ["X"])


def _positive(name: str, value: float | None, wrong: list[str]) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        wrong.append(f"{name} is {value!r}, it must be above 0")


def _integer(name: str, value: int, low: int, high: int, wrong: list[str]) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        wrong.append(f"{name} is {value!r}, it must be an integer from {low} to {high}")


def _size(name: str, value: SizeLike | None, low: int, high: int, wrong: list[str]) -> int | None:
    try:
        size = parse_bytes(value)
    except ConfigError as exc:
        wrong.append(f"{name}: {exc.what}")
        return None
    if size is not None and not low <= size <= high:
        wrong.append(f"{name} is {size} bytes, it must be {low} to {high}")
    return size


def _address(name: str, value: str | None, wrong: list[str]) -> None:
    try:
        split_address(str(value))
    except ConfigError as exc:
        wrong.append(f"{name}: {exc.what}")


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise ConfigError("; ".join(wrong), advice=NOTHING_DONE)


def _memory(bound: SizeLike | None, name: str, need: int, wrong: list[str]) -> None:
    size = _size(name, bound, 1, 1 << 62, wrong)
    if size is not None and need > size:
        wrong.append(f"slots x bucket_bytes is {need} bytes, {name} is {size}")


def default_bucket_bytes(device: str, *, shared: bool) -> int:
    """For a type of device; `shared`: readers look into the sender's memory."""
    return SHARED_BUCKET_BYTES if shared and device == "cpu" else BUCKET_BYTES[device]


def check_sender(
    *,
    bind: str | None,
    address: str | None,
    rank: int,
    senders: int,
    receivers: int | None,
    slots: int,
    lanes: str,
    fanout: str,
    cohort: str,
    verify: str | bool,
    bucket_bytes: SizeLike,
    device: torch.device,
    stall_timeout: float,
    finish_timeout: float,
    max_host_bytes: SizeLike | None,
    max_device_bytes: SizeLike | None,
) -> int:
    """Refuse wrong settings of a sender, all at once; the bucket size in bytes."""
    wrong: list[str] = []
    if not (isinstance(senders, int) and senders >= 1 and isinstance(rank, int) and 0 <= rank < senders):
        wrong.append(f"rank {rank!r} of {senders!r} senders")
    elif rank == 0:
        _address("bind", bind, wrong)
    else:
        _address("address", address, wrong)
    if receivers is not None:
        _integer("receivers", receivers, 1, MAX_RANKS, wrong)
    _integer("slots", slots, 1, 64, wrong)
    if lanes not in ("paired", "broadcast"):
        wrong.append(f"lanes is {lanes!r}; known: paired, broadcast")
    if fanout not in ("star", "chain"):
        wrong.append(f"fanout is {fanout!r}; known: star, chain")
    if cohort not in ("each", "all"):
        wrong.append(f"cohort is {cohort!r}; known: each, all")
    if verify not in (True, False, "on", "off"):
        wrong.append(f"verify is {verify!r}; known: True, False, 'on', 'off'")
    _positive("stall_timeout", stall_timeout, wrong)
    _positive("finish_timeout", finish_timeout, wrong)
    size = _size("bucket_bytes", bucket_bytes, MIN_BUCKET_BYTES, MAX_BUCKET_BYTES, wrong) or 0
    here = {"cpu": ("max_host_bytes", max_host_bytes), "cuda": ("max_device_bytes", max_device_bytes)}[device.type]
    _memory(here[1], here[0], size * slots if isinstance(slots, int) else 0, wrong)
    _refuse(wrong)
    return size


def check_receiver(
    *,
    address: str,
    engine: str,
    ranks: int,
    rank: int | None = None,
    stage: str | None = None,
    max_host_bytes: SizeLike | None = None,
    max_device_bytes: SizeLike | None = None,
) -> None:
    """Refuse wrong settings of a receiver or driver, all at once."""
    wrong: list[str] = []
    _address("address", address, wrong)
    if not isinstance(engine, str) or not engine or len(engine) > 200 or "/" in engine:
        wrong.append(f"engine {engine!r} is no name (1 to 200 characters, no '/')")
    whole = isinstance(ranks, int) and 1 <= ranks <= MAX_RANKS
    if not whole or not (rank is None or (isinstance(rank, int) and 0 <= rank < ranks)):
        wrong.append(f"rank {rank!r} of {ranks!r} ranks")
    if stage not in (None, "host", "device"):
        wrong.append(f"stage is {stage!r}; known: 'host', 'device', None")
    _size("max_host_bytes", max_host_bytes, 1, 1 << 62, wrong)
    _size("max_device_bytes", max_device_bytes, 1, 1 << 62, wrong)
    _refuse(wrong)
