"""The adapter for a running SGLang server."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import ClassVar

import attrs
import torch

from weightbus.adapter import Adapter
from weightbus.deadline import Deadline
from weightbus.errors import ConfigError, EngineError
from weightbus_sglang.engine import Engine, Settings, SglangDriver, SglangLoader
from weightbus_sglang.facts import Facts, birth_of, read_facts
from weightbus_sglang.served import Served
from weightbus_sglang.server import Server

PAUSE_MODES = ("retract", "abort")
SELECTORS = ("target", "draft", "all")
_IN_PLACE = "pause_mode 'in_place' goes on with old keys and values under new weights, and refuses the flush"


class SglangAdapter(Adapter):
    """Refits one SGLang server, 0.5.22 and newer of the 0.5 line, over HTTP. Driver and loader share this process.

    It must run on the server's host: bytes go by CUDA IPC where the bucket is on a GPU, by value in the request where
    it is in host memory.

    Args:
        url: of the server.
        api_key: its admin key, or API key where it has no other; None for none.
        model_path: folder of the served checkpoint on this host; None takes the path that the server names. Only its
            headers are read.
        tp_size: what the caller believes it to be; another size of the server is an error. None for no belief.
        pause_mode: what becomes of running requests. ``"retract"``: they go on after the refit, their prefixes computed
            again. ``"abort"``: they end with what they have.
        selector: which models to load: target, draft or all. Needed with a draft model, and then to be chosen.
        timeout_s: bound of one control call in seconds.
        load_timeout_s: bound of posting one bucket in seconds.
        flush_timeout_s: how long a flush may wait for the server to be idle, in seconds.
        hold_traffic: pause the server now, so that it answers nothing before the first refit: for an engine that
            joins with weights that are not current.
        release_kv_cache: give up the key-value cache's memory during a refit (``--enable-memory-saver``).
        check_weights: overwrite all weights with noise before the first bucket and prove at the end, by the server's
            weights checker, that each was written. A refit that fails after it leaves noise. Full refits only.
        check_skips: parts of the engine's own names of weights that `check_weights` leaves alone.
        one_visible_device: the server runs with SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS=1, so each rank's bucket is
            copied to the rank's GPU first.
        rank_devices: this process's device of each rank, such as ``["cuda:4", "cuda:5"]``; None maps the server's
            base_gpu_id through CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: bad options, a server that cannot be refitted, or a checkpoint that cannot be read; every reason in
            one error.
        EngineError: the server does not answer.
    """

    name: ClassVar[str] = "sglang"

    def __init__(
        self,
        *,
        url: str = "http://127.0.0.1:30000",
        api_key: str | None = None,
        model_path: str | None = None,
        tp_size: int | None = None,
        pause_mode: str = "retract",
        selector: str | None = None,
        timeout_s: float = 60.0,
        load_timeout_s: float = 300.0,
        flush_timeout_s: float = 10.0,
        hold_traffic: bool = False,
        release_kv_cache: bool = False,
        check_weights: bool = False,
        check_skips: Iterable[str] = (),
        one_visible_device: bool = False,
        rank_devices: Sequence[str | torch.device] | None = None,
        **unknown: object,
    ) -> None:
        settings = Settings(
            pause_mode=pause_mode, selector=selector or "all", timeout_s=timeout_s, load_timeout_s=load_timeout_s,
            flush_timeout_s=flush_timeout_s, release_kv_cache=release_kv_cache, check_weights=check_weights,
            check_skips=tuple(check_skips),
        )  # fmt: skip
        faults = [*_option_faults(settings, selector), *(f"there is no option {name}" for name in sorted(unknown))]
        server = Server(url, api_key=api_key, timeout_s=timeout_s if timeout_s > 0 else 1.0)
        try:
            facts, served, birth = _inspect(server, model_path, faults, selector=selector, tp_size=tp_size)
            self._engine = Engine(server=server, facts=facts, served=served, settings=settings, birth=birth)
            self._rank_devices = _devices(facts, rank_devices)
            if hold_traffic:
                server.pause(pause_mode, Deadline.after(timeout_s))
                self._engine.held = True
        except BaseException:
            server.close()
            raise
        self._one_visible_device = one_visible_device

    def driver(self) -> SglangDriver:
        self._engine.users += 1
        return SglangDriver(self._engine)

    def loader(self, ranks: Sequence[int], device: torch.device | None) -> SglangLoader:
        """The loader for one rank (every rank of the server then gets the one batch) or for all of them, in order.

        Raises:
            ConfigError: any other choice of ranks.
        """
        tp_size = self._engine.facts.tp_size
        if len(ranks) != 1 and list(ranks) != list(range(tp_size)):
            raise ConfigError(
                f"this process serves ranks {list(ranks)} of a server with tp_size {tp_size}",
                advice=f"receive one stream for all ranks, or one for each of the ranks 0 to {tp_size - 1}, in order",
            )
        self._engine.users += 1
        copies = self._rank_devices if self._one_visible_device else None
        return SglangLoader(self._engine, len(ranks), copies)

    @property
    def device(self) -> torch.device:
        """Rank 0's GPU, or the CPU where the server runs on one."""
        return self.rank_devices[0]

    @property
    def rank_devices(self) -> tuple[torch.device, ...]:
        """Where each rank's batches should be."""
        if self._rank_devices[0].type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "the server runs on GPUs, and this process sees none",
                advice="run it with the server's GPUs visible, or ask for device 'cpu' to send bytes by value",
            )
        return self._rank_devices

    @property
    def facts(self) -> Facts:
        """What the server said of itself."""
        return self._engine.facts

    def release_memory(
        self, tags: Sequence[str] = ("kv_cache", "weights", "cuda_graph"), timeout_s: float = 60.0
    ) -> None:
        """Pause the server and let it give up memory, to train on the same GPU; the next refit takes it back.

        Only memory released here is taken back: the server dies when asked to resume what it holds. Not to be called
        during a refit.

        Raises:
            EngineError: refused, such as without being idle.
        """
        self._engine.release_memory(tags, Deadline.after(timeout_s))


def _option_faults(settings: Settings, selector: str | None) -> list[str]:
    faults = []
    if settings.pause_mode not in PAUSE_MODES:
        known = f"pause_mode is {settings.pause_mode!r}, one of {', '.join(PAUSE_MODES)}"
        faults.append(_IN_PLACE if settings.pause_mode == "in_place" else known)
    if selector is not None and selector not in SELECTORS:
        faults.append(f"selector is {selector!r}, one of {', '.join(SELECTORS)}")
    for field in attrs.fields(Settings):
        value = getattr(settings, field.name)
        if field.name.endswith("_s") and not (value > 0 or (value == 0 and field.name == "flush_timeout_s")):
            faults.append(f"{field.name} is {value}, must be positive")
    return faults


def _inspect(
    server: Server, model_path: str | None, faults: list[str], *, selector: str | None, tp_size: int | None
) -> tuple[Facts, Served, str]:
    """Facts and checkpoint, or every reason against them in one ConfigError."""
    deadline = Deadline.after(server.timeout_s)
    try:
        info, model = server.get("/server_info", deadline), server.get("/model_info", deadline)
    except EngineError:
        if faults:
            raise ConfigError("; ".join(faults)) from None
        raise
    served: Served | None = None
    try:
        served = Served.read(model_path or str(model.get("model_path")))
    except ConfigError as exc:
        faults.append(str(exc))
    scheme = served.quantisation if served else ""
    facts = read_facts(info, model, selector=selector, tp_size=tp_size, scheme=scheme, others=faults)
    if served is None:
        raise ConfigError("; ".join(faults))
    return facts, served, birth_of(info)


def _devices(facts: Facts, given: Sequence[str | torch.device] | None) -> tuple[torch.device, ...]:
    if given is not None:
        if len(given) != facts.tp_size:
            raise ConfigError(f"rank_devices names {len(given)} devices for tp_size {facts.tp_size}")
        return tuple(torch.device(device) for device in given)
    if facts.device != "cuda":
        return (torch.device("cpu"),) * facts.tp_size
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(torch.device("cuda", facts.gpu(rank, visible)) for rank in range(facts.tp_size))
