"""Baselines that move bytes and nothing else: NIXL, UCXX, and CUDA IPC by torch."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from multiprocessing.connection import Connection
from typing import Any

import torch

from weightbus.cli.optional import library, present

STEP_BYTES = 256 << 20
Tensors = dict[str, torch.Tensor]
Steps = Generator[Tensors | None, None, None]


def _steps(tensors: Tensors) -> list[int]:
    """Sizes of the pieces that make up all bytes."""
    left = sum(tensor.nbytes for tensor in tensors.values())
    return [min(STEP_BYTES, left - at) for at in range(0, left, STEP_BYTES)]


def _buffer(tensors: Tensors, fill: int) -> torch.Tensor:
    device = next(iter(tensors.values())).device
    return torch.full((_steps(tensors)[0],), fill, dtype=torch.uint8, device=device)


# ---- NIXL


def _agent(name: str) -> Any:
    major = (torch.version.cuda or "12").partition(".")[0]
    wheel = f"nixl_cu{major}"
    api = library(f"{wheel}._api", f"pip install {wheel.replace('_', '-')}", "The NIXL baseline")
    agent = api.nixl_agent(f"{name}-{os.getpid()}", api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
    return agent


def nixl_send(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    agent, buffer, sizes = _agent("bench-send"), _buffer(tensors, 1), _steps(tensors)
    registered = agent.register_memory(buffer)
    peer, address, ordinal = conn.recv()
    remote_name = agent.add_remote_agent(peer)
    kind = "VRAM" if buffer.is_cuda else "DRAM"
    mine = buffer.device.index or 0
    handles = []
    for size in sorted(set(sizes)):
        local = agent.get_xfer_descs([(buffer.data_ptr(), size, mine)], kind)
        remote = agent.get_xfer_descs([(address, size, ordinal)], kind)
        handles.append((size, agent.initialize_xfer("WRITE", local, remote, remote_name)))
    by_size = dict(handles)
    try:
        yield {"buffer": buffer}
        while True:
            for size in sizes:
                state = agent.transfer(by_size[size])
                while state == "PROC":
                    state = agent.check_xfer_state(by_size[size])
                if state != "DONE":
                    raise RuntimeError(f"NIXL says {state}")
            conn.send("written")
            yield {"buffer": buffer}
    finally:
        for handle in by_size.values():
            agent.release_xfer_handle(handle)
        agent.deregister_memory(registered)


def nixl_recv(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    agent, buffer = _agent("bench-recv"), _buffer(tensors, 0)
    registered = agent.register_memory(buffer)
    conn.send((agent.get_agent_metadata(), buffer.data_ptr(), buffer.device.index or 0))
    yield {"buffer": buffer}
    try:
        while True:
            while not conn.poll(0):  # transports without remote memory access move inside the receiver's calls
                agent.get_new_notifs()
            conn.recv()
            yield {"buffer": buffer}
    finally:
        agent.deregister_memory(registered)


# ---- UCXX


class _Ucxx:
    def __init__(self, conn: Connection[Any, Any]) -> None:
        purpose, how = "The UCXX baseline", "pip install ucxx-cu12"
        self._api: Any = library("ucxx._lib.libucxx", how, purpose)
        self._array: Any = library("ucxx._lib.arr", how, purpose).Array
        settings = {"RNDV_THRESH": "8192", "MAX_RNDV_RAILS": "1", "TLS": os.environ.get("UCX_TLS", "all")}
        self._context = self._api.UCXContext(settings, feature_flags=(self._api.Feature.TAG,))
        self._worker = self._api.UCXWorker(self._context)
        conn.send(bytes(self._worker.address))
        address = self._api.UCXAddress.create_from_buffer(conn.recv())
        self._peer = self._api.UCXEndpoint.create_from_worker_address(self._worker, address, False)

    def run(self, operation: str, buffer: torch.Tensor) -> None:
        """``tag_send`` or ``tag_recv`` of the whole buffer, to its end."""
        memory = buffer if buffer.is_cuda else buffer.numpy()
        request = getattr(self._peer, operation)(self._array(memory), self._api.UCXXTag(1))
        while not request.completed:
            if not self._worker.progress_once():
                time.sleep(0)
        request.check_error()


def ucxx_send(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    yield from _ucxx(tensors, conn, "tag_send", 1)


def ucxx_recv(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    yield from _ucxx(tensors, conn, "tag_recv", 0)


def _ucxx(tensors: Tensors, conn: Connection[Any, Any], operation: str, fill: int) -> Steps:
    os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")
    buffer, sizes, link = _buffer(tensors, fill), _steps(tensors), _Ucxx(conn)
    yield {"buffer": buffer}
    while True:
        for size in sizes:
            link.run(operation, buffer[:size])
        yield {"buffer": buffer}


# ---- CUDA IPC by torch


def ipc_send(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    conn.send(tensors)
    yield None
    while True:
        conn.send("changed")
        yield None


def ipc_recv(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    theirs = conn.recv()
    yield None
    while True:
        conn.recv()
        for name, value in theirs.items():
            tensors[name].copy_(value)
        yield None


def ipc_flat_send(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    whole = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors.values()])
    conn.send(whole)
    yield {"whole": whole[-4096:]}
    while True:
        conn.send("changed")
        yield {"whole": whole[-4096:]}


def ipc_flat_recv(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    theirs = conn.recv()
    mine = torch.empty_like(theirs)
    yield {"whole": mine[-4096:]}
    while True:
        conn.recv()
        mine.copy_(theirs)
        yield {"whole": mine[-4096:]}


def missing(names: tuple[str, ...]) -> bool:
    """None of these modules is installed."""
    return bool(names) and not any(present(name) for name in names)
