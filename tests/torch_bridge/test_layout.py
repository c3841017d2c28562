"""Who holds which tokens: every token once, as many each, and under a causal mask as much to do."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

from dualops.torch_bridge.distributed import layout
from dualops.torch_bridge.distributed.layout import BALANCES, Layout, Reach, ends_of, layout_of

TILE, KEY_TILES = 4, (5, 7)  # queries, keys of a tile
CPU = torch.device("cpu")
lengths = st.lists(st.integers(0, 40), max_size=8)
sizes = st.integers(1, 9)


def made(of: list[int], size: int, balance: str) -> Layout:
    return layout_of((0, *np.cumsum(of, dtype=int).tolist()), size, balance)


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layout, "TILE", TILE)
        patched.setattr(layout, "KEY_TILES", KEY_TILES)
        layout_of.cache_clear()
        yield
    layout_of.cache_clear()


@pytest.mark.parametrize("balance", BALANCES)
@example(of=[2 * TILE + 3] * 8, size=2)  # as many chunks as ranks, and a rest in the last
@given(of=lengths, size=sizes)
def test_every_token_is_on_one_rank(balance: str, of: list[int], size: int) -> None:
    shares = made(of, size, balance)
    assert sorted(np.concatenate(shares.rows).tolist()) == list(range(sum(of)))
    assert shares.counts == [len(rows) for rows in shares.rows]
    assert all((np.diff(rows) > 0).all() for rows in shares.rows)
    tiles, whole = {"head_tail": 2, "contiguous": 4}[balance], sum(of) / (layout.SHORT * size)
    assert max(shares.counts) - min(shares.counts) <= max(tiles * TILE - 1, whole)
    for rank in range(size):
        pieces = shares.pieces[rank]
        assert not ((pieces.starts - shares.cu[pieces.documents]) % TILE).any()


@given(of=lengths, size=sizes)
def test_head_and_tail(of: list[int], size: int) -> None:
    """A rank has at most two chunks of a document, at the same distance from its middle, of nearly the same size."""
    shares = made(of, size, "head_tail")
    cuts = {0, *(int(stop) for pieces in shares.pieces for stop in pieces.stops)}
    cuts |= {int(start) for pieces in shares.pieces for start in pieces.starts}
    for begin, end in pairwise(shares.ends):
        if begin == end:
            continue
        inside = sorted(cut for cut in cuts if begin <= cut <= end)
        whole = len(inside) == 2 and layout.SHORT * size * (end - begin) <= sum(of)
        wanted = 1 if whole else min(2 * size, max(1, (end - begin) // TILE))
        chunks = [(a, b) for a, b in pairwise(inside)]
        owners = [next(r for r, rows in enumerate(shares.rows) if a in rows) for a, _ in chunks]
        middle = 1 if wanted == 2 * size else 0  # the chunks next to the middle are one piece there
        assert len(chunks) == wanted - middle
        assert max(owners.count(rank) for rank in owners) <= 2
        assert owners[: len(owners) // 2] == owners[::-1][: len(owners) // 2] or wanted < 2 * size
        lengths = [b - a for i, (a, b) in enumerate(chunks) if not (middle and i == size - 1)]
        assert not lengths or max(lengths) - min(lengths) < 2 * TILE


@pytest.mark.parametrize("balance", BALANCES)
@given(of=lengths, size=sizes, left=st.none() | st.integers(0, 40), D=st.sampled_from((128, 136)))
def test_pieces_are_sequences(balance: str, of: list[int], size: int, left: int | None, D: int) -> None:
    """Each piece lies in one document. Its keys are the tokens that its queries see, from where a tile begins on."""
    shares, tile = made(of, size, balance), KEY_TILES[D > 128]
    for rank, rows in enumerate(shares.rows):
        assert shares.positions(rank).tolist() == [row - document_of(shares, row)[0] for row in rows.tolist()]
        for reach in (Reach(True, left, D), Reach(False)):
            found, read = shares.sequences(rank, reach, CPU), tokens_read(shares, rank, reach).tolist()
            assert found.max_seqlen_k == max(found.k_lengths.tolist(), default=0)
            assert found.total_k_lengths == int(found.k_lengths.sum())
            bounds = zip(pairwise(found.cu_seqlens_q.tolist()), found.k_starts.tolist(), found.k_lengths.tolist())
            for (begin, end), start, length in bounds:
                queries, keys = rows[begin:end].tolist(), read[start : start + length]
                (first, last) = document_of(shares, queries[0])
                assert queries == list(range(queries[0], queries[-1] + 1)) and queries[-1] < last
                assert keys == list(range(keys[0], queries[-1] + 1 if reach.causal else last))
                seen = first if reach.left is None else max(first, queries[0] - reach.left)
                assert (keys[0] - first) % tile == 0 and keys[0] <= seen
                assert seen - keys[0] < tile or (reach.left is None and keys[0] == first)


def document_of(shares: Layout, token: int) -> tuple[int, int]:
    return next((begin, end) for begin, end in pairwise(shares.ends) if begin <= token < end)


def tokens_read(shares: Layout, rank: int, reach: Reach | None) -> torch.Tensor:
    """What a rank has in order after it got the tokens that the others send it."""
    arrived = []
    mine = shares.exchange(rank, reach, CPU)
    for other, rows in enumerate(shares.rows):
        theirs = shares.exchange(other, reach, CPU)
        sent = torch.from_numpy(rows)[theirs.sent].split(theirs.sent_counts)[rank]
        assert len(sent) == mine.received_counts[other]
        arrived.append(sent)
    tokens = torch.full((mine.rows,), -1)
    tokens[mine.received], tokens[mine.own] = torch.cat(arrived), torch.from_numpy(shares.rows[rank])
    assert mine.in_order == torch.equal(tokens, torch.cat([*arrived, torch.from_numpy(shares.rows[rank])]))
    return tokens


@pytest.mark.parametrize("balance", BALANCES)
@given(of=lengths, size=sizes, left=st.none() | st.integers(0, 40))
def test_there_and_back(balance: str, of: list[int], size: int, left: int | None) -> None:
    """Ranks get the tokens that they read, and what they return comes to the tokens' owners."""
    shares = made(of, size, balance)
    for reach in (None, Reach(True, left), Reach(False)):
        for rank, rows in enumerate(shares.rows):
            exchange, read = shares.exchange(rank, reach, CPU), tokens_read(shares, rank, reach)
            assert read.tolist() == sorted(set(read.tolist())) and len(read) == exchange.rows
            assert reach is not None or len(read) == sum(of)
            assert read[exchange.own].tolist() == rows.tolist()
            back = read[exchange.received].split(exchange.received_counts)
            for other, owned in enumerate(shares.rows):
                theirs = shares.exchange(other, reach, CPU)
                sent = theirs.sent.split(theirs.sent_counts)[rank]
                assert torch.equal(back[other], torch.from_numpy(owned)[sent])


@given(of=lengths, size=sizes)
def test_no_piece_has_few_queries_and_many_keys(of: list[int], size: int) -> None:
    """Kernels would split its keys, and come to other bits."""
    for balance in BALANCES:
        shares = made(of, size, balance)
        for pieces in shares.pieces:
            for start, stop, document in zip(*(each.tolist() for each in pieces)):
                assert stop - start >= TILE or stop - shares.ends[document] < 2 * TILE


def test_one_rank_has_whole_documents() -> None:
    shares = layout_of((0, 13, 13, 50), 1, "head_tail")
    assert shares.pieces[0].starts.tolist() == [0, 13] and shares.pieces[0].stops.tolist() == [13, 50]


def test_short_documents_are_shared_out_in_turn() -> None:
    assert layout_of(tuple(range(9)), 4, "head_tail").counts == [2, 2, 2, 2]


def test_documents_are_whole_while_shorter_ones_fill_the_shares() -> None:
    shares = made([*[12] * 6, 200, *[1] * 20], 2, "head_tail")
    begins = shares.ends[:6]
    owners = [next(rank for rank, rows in enumerate(shares.rows) if begin in rows) for begin in begins]
    assert sorted(owners) == [0, 0, 0, 1, 1, 1] and max(shares.counts) - min(shares.counts) <= 2 * TILE
    for begin, owner in zip(begins, owners):
        assert {*range(begin, begin + 12)} <= {*shares.rows[owner].tolist()}
    alone = made([12, 200], 2, "head_tail")  # nothing could fill the other share
    assert max(alone.counts) - min(alone.counts) <= 2 * TILE


@pytest.mark.parametrize("wrong", [3, "abc", [0.0, 1.0], [[0, 1]], None, [0, None], []])
def test_cu_seqlens_that_are_no_integers(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"op: cu_seqlens is .*, expected integers along one axis"):
        ends_of("op", wrong)


@pytest.mark.parametrize("wrong", [[1, 2], [0, 3, 2]])
def test_cu_seqlens_that_fall(wrong: list[int]) -> None:
    with pytest.raises(ValueError, match="op: cu_seqlens is "):
        ends_of("op", wrong)
