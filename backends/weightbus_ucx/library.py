"""The one place that imports ``ucxx`` and knows its settings."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.metadata
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from weightbus.errors import BackendUnavailable, ConfigError

DISTRIBUTIONS = ("ucxx-cu12", "ucxx-cu13")
#: For every context; a variable ``UCX_<key>`` of the user wins over it, the option `config` over both.
SETTINGS = {
    # Larger messages are pulled by the receiver, or given to it in fragments: closing the receiver ends both.
    "RNDV_THRESH": "8192",
    "MAX_RNDV_RAILS": "1",
    # Without these two UCX falls back to TCP inside one host, because endpoints report the death of their peer.
    "CMA_MEMORY_INVALIDATE": "y",
    "POSIX_ERROR_HANDLING": "y",
    # The default of 8 and 64 KiB costs two thirds of the rate of a TCP stream.
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "256K",
}
CUDA_SETTINGS = {
    "RNDV_FRAG_MEM_TYPE": "cuda",
    # Without an active NVLink UCX turns this off, and falls to 0.5 GB/s between processes of one GPU.
    "CUDA_IPC_ENABLE_GET_ZCOPY": "y",
}

_import_lock = threading.Lock()


@attrs.frozen
class Library:
    """``ucxx`` as this backend uses it: its module of classes, and its buffer type."""

    api: Any
    array: Any
    error: type[Exception]

    def let_go(self, endpoint: Any) -> None:
        """Have a closed endpoint drop the requests that its closing cancelled, once they have ended.

        ``ucxx`` does so only when it is asked for their number, which without a progress thread nobody does; they keep
        the endpoint, and with it the worker and its descriptors, for ever.
        """
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL("libucxx.so", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            library._ZNK4ucxx8Endpoint16getCancelingSizeEv(ctypes.c_void_p(endpoint.ucxx_ptr))


@contextmanager
def environment_kept() -> Iterator[None]:
    """Undo every change of ``os.environ``: NIXL and others of this process would read what ``ucxx`` sets."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() | before.keys():
            if name not in before:
                del os.environ[name]
            elif os.environ.get(name) != before[name]:
                os.environ[name] = before[name]


def load() -> Library:
    """Import ``ucxx``, leaving the environment as it was.

    Raises:
        BackendUnavailable: it is missing or does not load; the cause is kept.
    """
    with _import_lock, environment_kept():
        # Read once, when libucs is mapped: memory that was allocated before that must still be known as CUDA's.
        os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")
        try:
            from ucxx import exceptions
            from ucxx._lib import libucxx
            from ucxx._lib.arr import Array
        except (ImportError, OSError, RuntimeError, AttributeError) as exc:
            raise BackendUnavailable(f"ucxx does not load: {exc}", advice=install_advice()) from exc
    return Library(libucxx, Array, exceptions.UCXError)


def torch_cuda() -> str:
    """The CUDA major of torch, or empty."""
    return (torch.version.cuda or "").partition(".")[0]


def install_advice() -> str:
    major = torch_cuda() or "12"
    return f"pip install 'weightbus[ucx]', or ucxx-cu{major} alone."


def installed() -> dict[str, str]:
    """The installed distributions that bring ``ucxx``, with their versions."""
    found = {}
    for name in (*DISTRIBUTIONS, "ucxx"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def loaded_libucs() -> list[str]:
    """Files of libucs mapped into this process; two of them are two copies of UCX."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(None, 5)[5] for line in lines if "/libucs" in line and "signal" not in line})


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Ports of RDMA devices as UCX names them, such as ``mlx5_0:1``."""
    return sorted(f"{port.parent.parent.name}:{port.name}" for port in root.glob("*/ports/*"))


def settings_for(host: str | None, *, cuda: bool, tls: str | None, config: Mapping[str, str]) -> dict[str, str]:
    """The settings of one context: defaults, unless the user's environment has them, then the user's options."""
    defaults = SETTINGS | (CUDA_SETTINGS if cuda else {}) | (_network_of(host) if host else {})
    chosen = {key: value for key, value in defaults.items() if f"UCX_{key}" not in os.environ}
    return chosen | ({"TLS": tls} if tls else {}) | dict(config)


def _network_of(host: str) -> dict[str, str]:
    """TCP only through the interface of `host`; RDMA ports stay."""
    devices = [interface_of(host), *(rdma_devices() if not host.startswith(("127.", "::1")) else [])]
    family = {"TCP_AF_PRIO": "inet6,inet"} if ":" in host else {}
    return {"NET_DEVICES": ",".join(devices)} | family


def interface_of(host: str) -> str:
    """The network interface that has the address `host`.

    Raises:
        ConfigError: none has.
    """
    for _, name in socket.if_nameindex():
        if host in _addresses_of(name):
            return name
    if host.startswith("127."):
        return "lo"
    raise ConfigError(f"No network interface of this host has the address {host}.", advice="give an address of it.")


def _addresses_of(name: str) -> set[str]:
    addresses = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            reply = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            addresses.add(socket.inet_ntoa(reply[20:24]))
        except OSError:
            pass  # has no IPv4 address
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, *_, owner = line.split()
        if owner == name:
            addresses.add(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return addresses
