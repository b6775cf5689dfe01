"""Direct mode of backend `local`: host memory of another process, read in place."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import msgspec
import pytest
import torch

from weightbus.backend import EndpointSpec, State, Work
from weightbus.errors import EndpointClosed, LocalProtocolError, PeerLost, RemoteProtocolError, TransportError
from weightbus.testing.peers import ParentLink, Peer
from weightbus_local import LocalBackend
from weightbus_local.endpoint import LocalEndpoint
from weightbus_local.host import start_time
from weightbus_local.pull import Export

HERE = str(Path(__file__).resolve())
MIB = 1 << 20


def make(role: str = "receive") -> LocalEndpoint:
    return LocalBackend().endpoint(EndpointSpec(name=role, role=role))


@pytest.fixture
def endpoint() -> Iterator[LocalEndpoint]:
    made = make()
    yield made
    made.close()


def finish(endpoint: LocalEndpoint, work: Work, timeout_s: float = 20.0) -> State:
    end = time.monotonic() + timeout_s
    while work.state is State.PENDING:
        assert time.monotonic() < end
        endpoint.progress()
    return work.state


def model(seed: int) -> list[torch.Tensor]:
    """3,000 small tensors, one of three batches, and every awkward kind."""
    generator = torch.Generator().manual_seed(seed)
    small = [torch.randint(0, 256, (k % 97,), dtype=torch.uint8, generator=generator) for k in range(3000)]
    return [
        *small,
        torch.rand(11 * MIB, generator=generator),
        torch.tensor(1.5 + seed),
        torch.rand(3, 5, generator=generator).to(torch.float8_e4m3fn),
        torch.rand(7, generator=generator) > 0.5,
        torch.empty(4, 0, 8, dtype=torch.bfloat16),
        torch.rand(3, dtype=torch.complex64, generator=generator),
        torch.rand(5, generator=generator).bfloat16(),
    ]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def poisoned(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.full((t.nbytes,), 0xA5, dtype=torch.uint8).view(t.dtype).reshape(t.shape) for t in tensors]


def exporting_peer(link: ParentLink, seed: int) -> None:
    exporter, tensors = make("send"), model(seed)
    link.send(exporter.export(tensors))
    while (seed := link.recv()) is not None:
        for tensor, new in zip(tensors, model(seed), strict=True):
            tensor.copy_(new)
        link.send(exporter.export(tensors))


def test_tensors_of_another_process_are_read_in_place(endpoint: LocalEndpoint) -> None:
    with Peer(f"{HERE}:exporting_peer", (1,)) as peer:
        first = peer.recv()
        local = poisoned(model(1))
        work = endpoint.post_read(first, local)
        assert work.state is State.PENDING
        assert len(endpoint.fds()) == 2
        assert finish(endpoint, work) is State.DONE
        assert [raw(t) for t in local] == [raw(t) for t in model(1)]
        peer.send(2)
        assert peer.recv() == first
        assert finish(endpoint, endpoint.post_read(first, local)) is State.DONE
        assert [raw(t) for t in local] == [raw(t) for t in model(2)]
        moved = poisoned(local)
        assert finish(endpoint, endpoint.post_read(first, moved)) is State.DONE
        assert [raw(t) for t in moved] == [raw(t) for t in model(2)]
        assert not endpoint.progress()
        assert len(endpoint.fds()) == 1

        half = poisoned(local)
        work = endpoint.post_read(first, half)
        endpoint.progress()
        peer.kill()
        assert finish(endpoint, work) is State.ERROR
        assert isinstance(work.error, PeerLost)
        before = [raw(t) for t in local]
        with pytest.raises(PeerLost, match="ended"):
            endpoint.post_read(first, local)
        assert [raw(t) for t in local] == before


def test_an_owner_that_ends_after_the_last_read_is_still_noticed(endpoint: LocalEndpoint) -> None:
    source, local = torch.ones(8), torch.zeros(8)
    export = msgspec.msgpack.decode(endpoint.export([source]), type=Export)
    work = endpoint.post_read(msgspec.msgpack.encode(export), [local])
    work._owner = (os.getpid(), export.started + 1)  # type: ignore[attr-defined]
    assert finish(endpoint, work) is State.ERROR
    assert isinstance(work.error, PeerLost)


def test_an_export_follows_the_tensors(endpoint: LocalEndpoint) -> None:
    tensors = [torch.arange(4), torch.arange(6)]
    first = endpoint.export(tensors)
    tensors[0].fill_(9)
    assert endpoint.export(tensors) == first
    tensors[1] = torch.arange(6) + 1
    second = endpoint.export(tensors)
    assert second != first
    local = [torch.zeros(4, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)]
    assert finish(endpoint, endpoint.post_read(second, local)) is State.DONE
    assert [t.tolist() for t in local] == [[9] * 4, [1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(4, 6).t(),
        torch.zeros(4)[::2],
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(0, device="meta"),
    ],
)
def test_tensors_whose_bytes_are_not_their_values_are_refused(endpoint: LocalEndpoint, bad: torch.Tensor) -> None:
    with pytest.raises(LocalProtocolError, match=r"Tensor 1 .*direct=False"):
        endpoint.export([torch.zeros(1), bad])
    good = endpoint.export([torch.zeros(bad.shape, dtype=bad.dtype)])
    with pytest.raises(LocalProtocolError, match="Tensor 0"):
        endpoint.post_read(good, [bad])


@pytest.mark.parametrize("shapes", [[(3,)], [(3,), (5,)], [(4,), (3,)], [(3,), (4,), (0,)]])
def test_other_sizes_are_refused_before_a_byte_moves(endpoint: LocalEndpoint, shapes: list[tuple[int, ...]]) -> None:
    remote = endpoint.export([torch.ones(3), torch.ones(4)])
    local = [torch.zeros(shape) for shape in shapes]
    with pytest.raises(RemoteProtocolError, match="sizes"):
        endpoint.post_read(remote, local)
    assert all(not t.any() for t in local)


def exported(**change: object) -> bytes:
    good = Export("", os.getpid(), start_time(os.getpid()), (), ((-1, 4096, 12),))
    return msgspec.msgpack.encode(attrs.evolve(good, **change))


@pytest.mark.parametrize(
    ("remote", "kind", "text"),
    [
        (b"junk", RemoteProtocolError, "no export"),
        (exported(tensors=((-1, -5, 12),)), RemoteProtocolError, "outside"),
        (exported(tensors=((-1, 5, -12),)), RemoteProtocolError, "outside"),
        (exported(tensors=((0, 0, 12),)), RemoteProtocolError, "outside"),
        (exported(tensors=((-1, (1 << 64) - 4, 12),)), RemoteProtocolError, "outside"),
        (exported(spans=(b"short",)), RemoteProtocolError, "length"),
        (exported(), TransportError, "another host"),
    ],
)
def test_a_wrong_export_is_refused(endpoint: LocalEndpoint, remote: bytes, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        endpoint.post_read(remote, [torch.zeros(3)])


def test_memory_that_is_gone_is_an_error_not_a_crash(endpoint: LocalEndpoint) -> None:
    good = msgspec.msgpack.decode(endpoint.export([torch.zeros(3)]), type=Export)
    remote = msgspec.msgpack.encode(attrs.evolve(good, tensors=((-1, 4096, 12),)))
    work = endpoint.post_read(remote, [torch.zeros(3)])
    assert finish(endpoint, work) is State.ERROR
    assert isinstance(work.error, PeerLost)


def test_closing_ends_a_pull(endpoint: LocalEndpoint) -> None:
    other, source = make(), torch.ones(12 * MIB)
    local = torch.zeros(12 * MIB)
    work = other.post_read(endpoint.export([source]), [local])
    other.progress()
    other.close()
    assert work.state is State.ERROR
    assert isinstance(work.error, EndpointClosed)
    assert (local[0], local[-1]) == (1, 0)
    with pytest.raises(EndpointClosed):
        other.post_read(b"", [])
    with pytest.raises(EndpointClosed):
        other.export([])


def reading_as_another_user(remote: bytes) -> str:
    os.setuid(65534)
    endpoint = make()
    work = endpoint.post_read(remote, [torch.zeros(3)])
    assert finish(endpoint, work) is State.ERROR
    return str(work.error)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_what_the_kernel_forbids_comes_with_advice(endpoint: LocalEndpoint) -> None:
    source = torch.ones(3)
    with Peer(f"{HERE}:reading_as_another_user", (endpoint.export([source]),), linked=False) as peer:
        assert "ptrace_scope" in peer.result()
