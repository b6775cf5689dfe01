"""What Linux gives: identities of this process, memory without a name, and reads of another process's memory."""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import functools
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from weightbus.config import process_stat
from weightbus.errors import PeerLost, RemoteProtocolError, TransportError

_MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 14, 22, 23
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_BATCH_BYTES = 16 << 20
_BATCH_PIECES = 1024  # IOV_MAX
_libc = ctypes.CDLL(None, use_errno=True)


@functools.cache
def boot_id() -> str:
    """The same in every process of one running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def network_namespace() -> int:
    """Abstract sockets are seen within one network namespace only."""
    return os.stat("/proc/self/ns/net").st_ino


def start_time(pid: int) -> int:
    """When process `pid` was started, in clock ticks after boot; 0 if it has ended. Tells a reused pid."""
    fields = process_stat(pid)
    return 0 if not fields or fields[0] in "ZX" else int(fields[19])  # a zombie has let go of its memory


def process_space() -> str:
    """Two processes of one process space mean the same process by a pid."""
    return f"{boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}"


def ptrace_scope() -> int:
    """Yama's restriction on reading another process's memory; 0: none beyond the same user."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0


def _free_bytes() -> int:
    """What can be had without being killed for it."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        return min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return free


def _advise(tensor: torch.Tensor, advice: int) -> int:
    """madvise over the tensor's pages; 0 or the errno."""
    done = _libc.madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel()), ctypes.c_int(advice))
    return ctypes.get_errno() if done else 0


def _map(fd: int, nbytes: int) -> torch.Tensor:
    """The file as a `[nbytes]` uint8 tensor, unmapped when its last view dies. Keeps no descriptor."""
    try:
        tensor = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as exc:
        raise TransportError(
            f"Mapping {nbytes} bytes of shared memory failed: {exc}",
            advice="Raise the limits of open files and address space (ulimit -n, ulimit -v).",
        ) from exc
    _advise(tensor, _MADV_HUGEPAGE)  # refused unless the machine allows it
    return tensor


class HostMemory:
    """A sealed memfd of this process, mapped and populated. It has no name, so nothing can be left behind.

    Attributes:
        fd: open as long as this object lives.
        tensor: ``[nbytes]`` uint8; it outlives this object where someone holds a view.
    """

    def __init__(self, nbytes: int) -> None:
        self._check_room(nbytes)
        size = max(nbytes, 1)
        try:
            self.fd = os.memfd_create("weightbus", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, self.fd).atexit = False
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as exc:
            raise TransportError(
                f"{nbytes} bytes of shared memory cannot be made: {exc}",
                advice="Raise the limit of open files (ulimit -n), or use fewer slots.",
            ) from exc
        self.tensor = _map(self.fd, size)[:nbytes]
        self._populate(size)

    @staticmethod
    def _check_room(nbytes: int) -> None:
        free = _free_bytes()
        if nbytes > free:
            raise TransportError(
                f"{nbytes} bytes of shared memory were asked for; {free} are free.",
                advice="Set a smaller bucket_bytes, or fewer slots.",
            )

    def _populate(self, size: int) -> None:
        whole = self.tensor.as_strided((size,), (1,))
        code = _advise(whole, _MADV_POPULATE_WRITE)
        if code == errno.EINVAL:  # kernels before 5.14
            whole.zero_()
        elif code:
            raise TransportError(
                f"{size} bytes of shared memory cannot be filled: {os.strerror(code)}",
                advice="Set a smaller bucket_bytes, or fewer slots.",
            )


def map_received(fd: int, nbytes: int) -> torch.Tensor:
    """Map a peer's memfd. The caller closes `fd`.

    Raises:
        RemoteProtocolError: it is no memfd, can shrink under us, or is too small.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as exc:
        raise RemoteProtocolError("The peer passed a descriptor that is not shared memory.") from exc
    stat = os.fstat(fd)
    if not seals & fcntl.F_SEAL_SHRINK or not 0 <= nbytes <= stat.st_size:
        raise RemoteProtocolError(f"The peer passed {stat.st_size} bytes (seals {seals:#x}) as a region of {nbytes}.")
    tensor = _map(fd, max(nbytes, 1))
    if stat.st_blocks * 512 >= nbytes:  # never fill a sparse file for a peer
        _advise(tensor, _MADV_POPULATE_READ)
    return tensor[:nbytes]


class RemoteRead:
    """Reads another process's memory into this one's, a batch a call.

    Args:
        pid: the owner of the sources.
        pieces: (source address, destination address, bytes).
    """

    def __init__(self, pid: int, pieces: Sequence[tuple[int, int, int]]) -> None:
        self._pid = pid
        self._sources, self._targets = array.array("Q"), array.array("Q")
        self._batches: list[tuple[int, int, int]] = []
        first, total, count = 0, 0, 0
        for source, target, nbytes in pieces:
            for at in range(0, nbytes, _BATCH_BYTES):
                part = min(_BATCH_BYTES, nbytes - at)
                if count > first and (total + part > _BATCH_BYTES or count - first == _BATCH_PIECES):
                    self._batches.append((first, count - first, total))
                    first, total = count, 0
                self._sources.extend((source + at, part))
                self._targets.extend((target + at, part))
                count, total = count + 1, total + part
        if count > first:
            self._batches.append((first, count - first, total))

    def __len__(self) -> int:
        """How many batches there are."""
        return len(self._batches)

    def run(self, batch: int) -> None:
        """Copy one batch.

        Raises:
            PeerLost: the owner has gone, or the memory.
            TransportError: the kernel does not permit it.
        """
        first, count, total = self._batches[batch]
        done = _libc.process_vm_readv(
            ctypes.c_int(self._pid),
            ctypes.c_void_p(self._targets.buffer_info()[0] + 16 * first), ctypes.c_ulong(count),
            ctypes.c_void_p(self._sources.buffer_info()[0] + 16 * first), ctypes.c_ulong(count), ctypes.c_ulong(0),
        )  # fmt: skip
        if done == total:
            return
        code = ctypes.get_errno() if done < 0 else errno.EFAULT
        text = f"Reading the memory of process {self._pid} failed: {os.strerror(code)}"
        if code in (errno.EPERM, errno.ENOSYS):
            raise TransportError(
                text,
                advice="Use the streamed mode (direct=False), or permit reads between processes of one user: "
                "sysctl kernel.yama.ptrace_scope=0; in a container the capability SYS_PTRACE.",
            )
        raise PeerLost(text)


_libc.process_vm_readv.restype = ctypes.c_ssize_t
