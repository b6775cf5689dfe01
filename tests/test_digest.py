"""The digest against a reference that follows its definition word by word."""

from itertools import pairwise

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbus import digest
from weightbus.errors import ConfigError

LEAF = 64 * 1024


def reference(data: bytes) -> int:
    leaves = [data[at : at + LEAF] for at in range(0, len(data), LEAF)]
    over = b"".join(xxhash.xxh3_64(leaf + bytes(LEAF - len(leaf)), seed=0).intdigest().to_bytes(8, "little")
                    for leaf in leaves)  # fmt: skip
    return xxhash.xxh3_64(over + len(data).to_bytes(8, "little"), seed=0).intdigest()


def some_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("nbytes", [0, 1, 7, LEAF - 1, LEAF, LEAF + 1, 3 * LEAF, 3 * LEAF + 4097])
def test_equals_the_reference_at_every_edge(nbytes: int) -> None:
    data = some_bytes(nbytes, 1)
    assert digest.digest(data, nbytes) == reference(bytes(data.tolist()))


@settings(max_examples=40, deadline=None)
@given(nbytes=st.integers(0, 4 * LEAF), spare=st.integers(0, 99), seed=st.integers(0, 9))
def test_bytes_behind_the_used_ones_do_not_count(nbytes: int, spare: int, seed: int) -> None:
    data = some_bytes(nbytes + spare, seed)
    assert digest.digest(data, nbytes) == reference(bytes(data[:nbytes].tolist()))


@settings(max_examples=40, deadline=None)
@given(nbytes=st.integers(1, 5 * LEAF), cuts=st.lists(st.integers(0, 5), max_size=4))
def test_leaves_may_be_digested_in_pieces(nbytes: int, cuts: list[int]) -> None:
    view = digest.tensor_bytes_view(some_bytes(nbytes, 2))
    count = digest.num_leaves(nbytes)
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    pieces = b"".join(digest.leaf_digests(view, a, b, nbytes) for a, b in pairwise(edges))
    assert len(pieces) == 8 * count
    assert digest.root(pieces, nbytes) == digest.host_digest(view, nbytes) == reference(bytes(view))


def test_padding_is_told_from_zeros() -> None:
    short, padded = torch.ones(10, dtype=torch.uint8), torch.zeros(LEAF, dtype=torch.uint8)
    padded[:10] = 1
    assert digest.digest(short, 10) != digest.digest(padded, LEAF)


def test_order_of_leaves_counts() -> None:
    data = some_bytes(2 * LEAF, 3)
    assert digest.digest(data, 2 * LEAF) != digest.digest(data.roll(LEAF), 2 * LEAF)


def test_one_flipped_bit_shows() -> None:
    data = some_bytes(2 * LEAF + 5, 4)
    before = digest.digest(data, data.numel())
    data[-1] ^= 1
    assert digest.digest(data, data.numel()) != before


def test_view_shares_the_memory_both_ways_and_keeps_it() -> None:
    data = torch.zeros(100, dtype=torch.uint8)[10:20]
    view = digest.tensor_bytes_view(data)
    view[3] = 7
    data[4] = 9
    assert data.tolist() == [0, 0, 0, 7, 9, 0, 0, 0, 0, 0]
    assert bytes(view) == bytes(data.tolist())
    del data
    assert view[3] == 7


@pytest.mark.parametrize("tensor", [torch.zeros(4), torch.zeros(8, dtype=torch.uint8)[::2]])
def test_view_refuses_what_is_not_plain_bytes(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="contiguous uint8"):
        digest.tensor_bytes_view(tensor)


def test_a_device_without_a_digest_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no digest for memory on meta.*verify='off'"):
        digest.digest(torch.empty(4, dtype=torch.uint8, device="meta"), 4)
