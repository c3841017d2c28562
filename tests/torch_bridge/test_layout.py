"""Who holds which tokens: every token once, as many each, and under a causal mask as much to do."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dualops.torch_bridge.distributed.layout import BALANCES, Layout, ends_of, layout_of

CPU = torch.device("cpu")
lengths = st.lists(st.integers(0, 40), max_size=8)
sizes = st.integers(1, 9)


def made(of: list[int], size: int, balance: str) -> Layout:
    return layout_of((0, *np.cumsum(of, dtype=int).tolist()), size, balance)


@pytest.mark.parametrize("balance", BALANCES)
@given(of=lengths, size=sizes)
def test_every_token_is_on_one_rank(balance: str, of: list[int], size: int) -> None:
    layout = made(of, size, balance)
    assert sorted(np.concatenate(layout.rows).tolist()) == list(range(sum(of)))
    assert max(layout.counts) - min(layout.counts) <= 1
    assert layout.counts == [len(rows) for rows in layout.rows]
    assert all((np.diff(rows) > 0).all() for rows in layout.rows)


@given(of=lengths, size=sizes)
def test_head_and_tail(of: list[int], size: int) -> None:
    """The chunks of a document follow one another over the ranks and back, and differ by one token at most."""
    layout = made(of, size, "head_tail")
    owner = np.empty(sum(of), int)
    for rank, rows in enumerate(layout.rows):
        owner[rows] = rank
    for begin, end in pairwise(layout.ends):
        here = owner[begin:end]
        turn = int(np.argmin(np.append(np.diff(here) >= 0, False))) + 1  # tokens up to the first step back
        assert (np.diff(here[:turn]) >= 0).all() and (np.diff(here[turn:]) <= 0).all()
        counts = np.bincount(here, minlength=size)
        least = (end - begin) // (2 * size)
        assert ((2 * least <= counts) & (counts <= 2 * least + 2)).all()


@pytest.mark.parametrize("balance", BALANCES)
@given(of=lengths, size=sizes)
def test_pieces_are_sequences(balance: str, of: list[int], size: int) -> None:
    """Each piece lies in one document, and its causal keys end with it."""
    layout = made(of, size, balance)
    for rank, rows in enumerate(layout.rows):
        causal, full = (layout.sequences(rank, each, CPU) for each in (True, False))
        assert causal.max_seqlen_k == max(causal.k_lengths.tolist(), default=0)
        assert causal.total_k_lengths == int(causal.k_lengths.sum())
        bounds = zip(pairwise(causal.cu_seqlens_q.tolist()), causal.k_starts.tolist(), causal.k_lengths.tolist())
        for ((begin, end), start, length), whole in zip(bounds, full.k_lengths.tolist(), strict=True):
            queries = rows[begin:end].tolist()
            assert queries == list(range(queries[0], start + length))
            document = layout.ends.index(start)
            assert start + whole in layout.ends[document:] and queries[0] >= start and start + length <= start + whole
        expected = [row - max(end for end in layout.ends if end <= row) for row in rows.tolist()]
        assert layout.positions(rank).tolist() == expected


@pytest.mark.parametrize("balance", BALANCES)
@given(of=lengths, size=sizes)
def test_there_and_back(balance: str, of: list[int], size: int) -> None:
    layout = made(of, size, balance)
    tokens = torch.arange(sum(of))
    gathered = torch.full((size, layout.most), -1)
    for rank, rows in enumerate(layout.rows):
        gathered[rank, : len(rows)] = tokens[rows]
    flat, there, back = gathered.flatten(), layout.to_ranks(CPU), layout.from_ranks(CPU)
    assert torch.equal(flat[: sum(of)] if back is None else flat[back], tokens)
    sent = tokens if there is None else tokens[there]
    assert sent.tolist() == np.concatenate(layout.rows).tolist()


def test_one_rank_has_whole_documents() -> None:
    layout = layout_of((0, 13, 13, 50), 1, "head_tail")
    assert layout.pieces[0].starts.tolist() == [0, 13] and layout.pieces[0].stops.tolist() == [13, 50]


def test_short_documents_are_shared_out_in_turn() -> None:
    assert layout_of(tuple(range(9)), 4, "head_tail").counts == [2, 2, 2, 2]


@pytest.mark.parametrize("wrong", [3, "abc", [0.0, 1.0], [[0, 1]], None, [0, None], []])
def test_cu_seqlens_that_are_no_integers(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"op: cu_seqlens is .*, expected integers along one axis"):
        ends_of("op", wrong)


@pytest.mark.parametrize("wrong", [[1, 2], [0, 3, 2]])
def test_cu_seqlens_that_fall(wrong: list[int]) -> None:
    with pytest.raises(ValueError, match="op: cu_seqlens is "):
        ends_of("op", wrong)
