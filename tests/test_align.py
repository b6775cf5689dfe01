"""The aligner: values on each rank, every divergence by rank, name and dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbus.align import Aligner
from weightbus.errors import AlignmentError, LocalProtocolError


def batch(*names: str, value: float = 0, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full((2,), value, dtype=dtype)) for name in names]


def names(pulled: object) -> list[list[str]]:
    return [[name for name, _ in one] for one in pulled[0]]  # type: ignore[index]


def test_the_longest_common_run_and_the_tokens_it_uses_up() -> None:
    aligner = Aligner([0, 1])
    aligner.feed(0, batch("a", "b", "c"), "t0")
    assert aligner.pull() is None
    assert aligner.hungry() == [1]
    aligner.feed(1, batch("a", "b"), "t1")
    pulled = aligner.pull()
    assert names(pulled) == [["a", "b"], ["a", "b"]]
    assert pulled is not None and pulled[1] == ["t1"]
    assert aligner.hungry() == [1]
    aligner.feed(1, batch("c"), "t2")
    pulled = aligner.pull()
    assert names(pulled) == [["c"], ["c"]]
    assert pulled is not None and pulled[1] == ["t0", "t2"]
    aligner.end(0)
    assert not aligner.done
    aligner.end(1)
    assert aligner.done and aligner.pull() is None


def test_each_rank_gets_its_own_values_in_the_order_of_ranks() -> None:
    aligner = Aligner([5, 2, 9])
    for rank in (9, 5, 2):
        aligner.feed(rank, batch("w", value=rank), rank)
    pulled = aligner.pull()
    assert pulled is not None
    assert [one[0][1].tolist() for one in pulled[0]] == [[5, 5], [2, 2], [9, 9]]
    assert pulled[1] == [5, 2, 9]


def test_an_empty_batch_only_gives_its_token_back() -> None:
    aligner = Aligner([0, 1])
    aligner.feed(0, [], "empty")
    aligner.feed(1, batch("a"), "full")
    assert aligner.pull() == ([[], []], ["empty"])
    assert aligner.pull() is None
    aligner.feed(0, batch("a"), "late")
    assert names(aligner.pull()) == [["a"], ["a"]]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (batch("x"), r"rank 0 goes on with 'a' \(float32\), rank 1 goes on with 'x' \(float32\)"),
        (batch("a", dtype=torch.float16), r"rank 0 goes on with 'a' \(float32\), rank 1 goes on with 'a' \(float16\)"),
    ],
)
def test_divergence_names_ranks_names_and_dtypes(other: list[tuple[str, torch.Tensor]], text: str) -> None:
    aligner = Aligner([0, 1])
    aligner.feed(0, batch("a"), 0)
    aligner.feed(1, other, 1)
    with pytest.raises(AlignmentError, match=text):
        aligner.pull()


def test_what_is_common_comes_before_a_divergence() -> None:
    aligner = Aligner([0, 1])
    aligner.feed(0, batch("a", "b"), 0)
    aligner.feed(1, batch("a", "c"), 1)
    assert names(aligner.pull()) == [["a"], ["a"]]
    with pytest.raises(AlignmentError, match=r"'b'.*'c'"):
        aligner.pull()


def test_different_ends_name_who_ended_where() -> None:
    aligner = Aligner([0, 1])
    aligner.feed(0, batch("a", "b"), 0)
    aligner.feed(1, batch("a"), 1)
    aligner.end(1)
    assert names(aligner.pull()) == [["a"], ["a"]]
    with pytest.raises(AlignmentError, match="rank 1 after 'a'; but rank 0 goes on with 'b'"):
        aligner.pull()


def test_a_rank_that_brings_nothing_at_all_is_a_different_end() -> None:
    aligner = Aligner([0, 1])
    aligner.end(1)
    aligner.feed(0, batch("a"), 0)
    with pytest.raises(AlignmentError, match="rank 1 empty; but rank 0 goes on with 'a'"):
        aligner.pull()


def test_duplicates_are_refused_within_and_across_batches() -> None:
    aligner = Aligner([3])
    with pytest.raises(AlignmentError, match=r"rank 3 sent 'a' \(float32\) twice"):
        aligner.feed(3, batch("a", "a"), 0)
    aligner = Aligner([3])
    aligner.feed(3, batch("a"), 0)
    aligner.pull()
    with pytest.raises(AlignmentError, match="twice"):
        aligner.feed(3, batch("a"), 1)


def test_one_outstanding_batch_is_all() -> None:
    aligner = Aligner([0, 1])
    aligner.feed(0, batch("a"), 0)
    with pytest.raises(LocalProtocolError, match="rank 0 was fed but has a batch outstanding"):
        aligner.feed(0, batch("b"), 1)
    aligner.end(1)
    with pytest.raises(LocalProtocolError, match="rank 1 was fed but has ended"):
        aligner.feed(1, batch("b"), 1)
    with pytest.raises(LocalProtocolError, match="rank 7"):
        aligner.end(7)


@pytest.mark.parametrize("ranks", [[], [1, 1]])
def test_ranks_are_some_and_unique(ranks: list[int]) -> None:
    with pytest.raises(LocalProtocolError, match="each rank once"):
        Aligner(ranks)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.lists(st.lists(st.integers(1, 5), max_size=20), min_size=1, max_size=4))
def test_any_cuts_of_one_list_come_out_whole(count: int, cuts: list[list[int]]) -> None:
    """Ranks cut the same names anywhere, with empty batches; all come out once, in order, and every token returns."""
    ranks = list(range(len(cuts)))
    streams = []
    for rank, sizes in enumerate(cuts):
        whole = [(f"n{i}", torch.tensor([rank, i])) for i in range(count)]
        pieces, at = [], 0
        for size in sizes:
            pieces.append(whole[at : at + size])
            at += size
        streams.append([*pieces, whole[at:]])
    aligner, fed, back, out = Aligner(ranks), 0, 0, [[] for _ in ranks]  # type: ignore[var-annotated]
    while not aligner.done:
        for rank in aligner.hungry():
            if streams[rank]:
                aligner.feed(rank, streams[rank].pop(0), rank)
                fed += 1
            else:
                aligner.end(rank)
        while (pulled := aligner.pull()) is not None:
            back += len(pulled[1])
            for rank, one in zip(ranks, pulled[0], strict=True):
                out[rank] += [tensor.tolist() for _, tensor in one]
    assert out == [[[rank, i] for i in range(count)] for rank in ranks]
    assert back == fed
