"""Layout of packed documents: which rank of a group holds which tokens.

    head_tail     each document is cut into n = 2 * P chunks for P ranks. The i-th rank has chunks i and n - 1 - i. A
                  causal query late in its document sees more keys than an early one. Together the two chunks of any
                  rank see as many as those of any other. A document of at most 1 / SHORT of a rank's share of all
                  tokens is whole if shorter ones can fill the other ranks' shares: nothing of it is sent.
    contiguous    rank r has the r-th of P runs of all tokens, across documents. A run ends with a document that has
                  less than TILE tokens left.

With head_tail, the longest document is cut first, and ranks count from the one with the fewest tokens so far. Chunks
are whole tiles of TILE queries, with nearly the same number of tiles; the last chunk also has the rest of the document.
Documents of few tiles have n < 2 * P chunks; chunk n - 1 - i is the i-th rank's then, too. So no rank gets less of a
document than a rank that had more tokens before. Shares differ by less than 2 * TILE tokens, or by at most a whole
document: 1 / SHORT of the mean share.

Tiles keep the bits of one process. Kernels split the keys of a few queries among blocks: no chunk is that short. With
softcap the queries of a warp share the choice of a formula: no cut separates them. And no query tile is partly filled
that would be full in one process.

A rank has its tokens in the order of the documents. A contiguous piece of a document is one sequence of
`flash_attention_varlen`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...spec.domains import shown

BALANCES = ("head_tail", "contiguous")
TILE = 128  # tokens: the queries of a tile on Hopper
SHORT = 8
KEY_TILES = 384, 13440  # tokens: multiples of the keys of any kernel's tile, for heads to 128 wide and for wider ones
Ends = tuple[int, ...]  # where documents begin, and the end
_READ = WeakTensorKeyDictionary()  # cu_seqlens on a device -> their version and values


class Pieces(NamedTuple):
    """Runs of tokens of one rank, each of one document, in their order on that rank."""

    starts: np.ndarray  # among all tokens
    stops: np.ndarray
    documents: np.ndarray  # the document's number


class Reach(NamedTuple):
    """The keys of its document that a query at token i sees."""

    causal: bool  # those up to i; else all
    left: int | None = None  # those from i - left on
    D: int = 1  # the widest head


class Sequences(NamedTuple):
    """The pieces of a rank as sequences of `flash_attention_varlen`, whose keys are those that the rank reads."""

    cu_seqlens_q: Tensor
    k_starts: Tensor
    k_lengths: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    total_k_lengths: int


class Exchange(NamedTuple):
    """What one rank sends and receives so that it has all tokens that it reads: its own and some of other ranks."""

    rows: int  # tokens that the rank reads
    sent: Tensor  # the rank's tokens that others read, for rank 0, 1 ... : places among its own
    sent_counts: list[int]
    received: Tensor  # tokens from rank 0, 1 ...: places among those that the rank reads
    received_counts: list[int]
    own: Tensor  # places of its own among those
    in_order: bool  # the received tokens and then its own are those it reads, in their order


class Layout:
    """Layout of documents over a number of ranks. Built once (`layout_of`)."""

    def __init__(self, ends: Ends, size: int, balance: str):
        self.ends, self.size, self.balance = ends, size, balance
        self.cu = np.asarray(ends, np.int64)
        self.total = ends[-1]
        cut = _head_tail if balance == "head_tail" else _contiguous
        self.pieces = cut(self.cu, size)
        self.counts = [int((each.stops - each.starts).sum()) for each in self.pieces]
        self._on_device: dict[Any, Any] = {}

    @cached_property
    def rows(self) -> list[np.ndarray]:
        """Each rank's tokens, by their places among all of them."""
        return [_runs(each.starts, each.stops) for each in self.pieces]

    def positions(self, rank: int) -> np.ndarray:
        """Position of each of a rank's tokens in its document."""
        starts, stops, documents = self.pieces[rank]
        return _runs(starts - self.cu[documents], stops - self.cu[documents])

    def rows_on(self, rank: int, device: torch.device) -> Tensor:
        return self._once(("rows", rank, device), lambda: _on(device, self.rows[rank]))

    def exchange(self, rank: int, reach: Reach | None, device: torch.device) -> Exchange:
        """Return what a rank sends and receives. reach: of its queries; None: it reads all tokens."""

        def made() -> Exchange:
            own, read = self.rows[rank], self._read(rank, reach)
            others = [other for other in range(self.size) if other != rank]
            sent, received = ([np.empty(0, np.int64)] * self.size for _ in range(2))
            for other in others:
                sent[other] = self._read(other, reach)[own].nonzero()[0]
                received[other] = self.rows[other][read[self.rows[other]]]
            arrived, place = np.concatenate(received), read.cumsum() - 1
            places = np.concatenate([place[arrived], place[own]])
            return Exchange(
                len(places),
                _on(device, np.concatenate(sent)),
                [len(each) for each in sent],
                _on(device, place[arrived]),
                [len(each) for each in received],
                _on(device, place[own]),
                bool((places == np.arange(len(places))).all()),
            )

        return self._once(("exchange", rank, reach, device), made)

    def sequences(self, rank: int, reach: Reach, device: torch.device) -> Sequences:
        """Return a rank's sequences. Causal: keys end at the piece's end, so that its last query is at the last key."""

        def made() -> Sequences:
            starts, stops, _ = self.pieces[rank]
            begins, ends = self._keys(rank, reach)
            queries, lengths = stops - starts, ends - begins
            cu_q = np.concatenate([np.zeros(1, np.int64), queries.cumsum()])
            place = self._read(rank, reach).cumsum() - 1
            cu_q, k_starts, k_lengths = (_on(device, each.astype(np.int32)) for each in (cu_q, place[begins], lengths))
            longest_q, longest_k = (int(each.max(initial=0)) for each in (queries, lengths))
            return Sequences(cu_q, k_starts, k_lengths, longest_q, longest_k, int(lengths.sum()))

        return self._once(("sequences", rank, reach, device), made)

    def _keys(self, rank: int, reach: Reach) -> tuple[np.ndarray, np.ndarray]:
        """Return where each piece's keys begin and end. They begin where a tile does, so that no bit changes."""
        starts, stops, documents = self.pieces[rank]
        begins = self.cu[documents]
        ends = stops if reach.causal else self.cu[documents + 1]
        if reach.left is not None:
            before = (starts - begins - max(reach.left, 0)).clip(0)
            begins = begins + before - before % KEY_TILES[reach.D > 128]
        return begins, ends

    def _read(self, rank: int, reach: Reach | None) -> np.ndarray:
        """Return for each token whether a rank reads it."""
        if reach is None:
            return np.ones(self.total, bool)
        read = np.zeros(self.total, bool)
        read[_runs(*self._keys(rank, reach))] = True
        return read

    def whole(self, device: torch.device) -> tuple[Tensor, int]:
        """cu_seqlens of all documents, and the length of the longest."""
        longest = int(np.diff(self.cu).max(initial=0))
        return self._once(("whole", device), lambda: (_on(device, self.cu.astype(np.int32)), longest))

    def _once(self, key: Any, make: Any) -> Any:
        if key not in self._on_device:
            self._on_device[key] = make()
        return self._on_device[key]


@lru_cache(maxsize=16)
def layout_of(ends: Ends, size: int, balance: str) -> Layout:
    return Layout(ends, size, balance)


def checked_balance(op: str, balance: Any) -> str:
    if balance not in BALANCES:
        raise ValueError(f"{op}: balance is {shown(balance)}, expected one of {', '.join(map(repr, BALANCES))}")
    return balance


def ends_of(op: str, cu_seqlens: Any) -> Ends:
    """Return cu_seqlens as numbers. A tensor on a device is read once, which waits for the device.

    Raises TypeError for anything but integers along one axis, ValueError if they do not begin at 0, or decrease.
    """
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.device.type != "cpu":
        version = None if cu_seqlens.is_inference() else cu_seqlens._version
        known = _READ.get(cu_seqlens)
        if known is None or version is None or known[0] != version:
            known = _READ[cu_seqlens] = version, ends_of(op, cu_seqlens.detach().cpu())
        return known[1]
    message = f"{op}: cu_seqlens is {shown(cu_seqlens)}"
    try:
        values = np.asarray(cu_seqlens)
    except (TypeError, ValueError, RuntimeError):
        values = np.empty(0)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise TypeError(f"{message}, expected integers along one axis: where each document begins, and the end")
    if not len(values) or values[0] != 0 or (values[1:] < values[:-1]).any():
        raise ValueError(f"{message}, expected numbers that begin at 0 and are nondecreasing")
    return tuple(map(int, values))


def _head_tail(cu: np.ndarray, size: int) -> list[Pieces]:
    counts = [0] * size
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
    rest = int(cu[-1])  # tokens of shorter documents
    for document in np.argsort(-np.diff(cu), kind="stable").tolist():
        begin, end = cu[document : document + 2].tolist()
        length, missing = end - begin, max(counts) - min(counts)
        rest -= length
        whole = SHORT * size * length <= cu[-1] and (length <= missing or size * length <= rest)
        chunks = 1 if whole else min(2 * size, max(1, length // TILE))
        each, left = divmod(length // TILE, chunks)
        order = sorted(range(size), key=lambda rank: (counts[rank], rank))
        heads = range(min(size, chunks))
        longer = {*[*heads, *range(chunks - 1, size - 1, -1)][:left]}  # chunks with one more tile
        for chunk in range(chunks):
            behind = chunks - 1 - chunk
            rank = order[behind if behind < size else chunk]
            stop = begin + TILE * (each + (chunk in longer)) if chunk < chunks - 1 else end
            found[rank].append((begin, stop, document))
            counts[rank] += stop - begin
            begin = stop
    return [_pieces(*np.array(sorted(pieces), np.int64).reshape(-1, 3).T) for pieces in found]


def _contiguous(cu: np.ndarray, size: int) -> list[Pieces]:
    bounds: list[int] = []
    for rank in range(size + 1):
        cut = int(cu[-1]) * rank // size
        begin, end = int(cu[np.searchsorted(cu, cut, "right") - 1]), int(cu[np.searchsorted(cu, cut)])
        cut -= (cut - begin) % TILE  # begin, end: of the document that contains the cut
        low = max([begin, *bounds[-1:]])
        cut = low if cut - low < TILE else cut
        bounds.append(end if end - cut < TILE else cut)
    documents = np.arange(len(cu) - 1)
    return [_pieces(cu[:-1].clip(*run), cu[1:].clip(*run), documents) for run in pairwise(bounds)]


def _pieces(starts: np.ndarray, stops: np.ndarray, documents: np.ndarray) -> Pieces:
    """Drop empty pieces, and join adjacent pieces of a document."""
    there = stops > starts
    starts, stops, documents = starts[there], stops[there], documents[there]
    apart = np.ones(len(starts) + 1, bool)
    apart[1:-1] = (starts[1:] != stops[:-1]) | (documents[1:] != documents[:-1])
    return Pieces(starts[apart[:-1]], stops[apart[1:]], documents[apart[:-1]])


def _runs(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return the numbers from each start to its stop, one run after another."""
    lengths = stops - starts
    return np.repeat(starts - (lengths.cumsum() - lengths), lengths) + np.arange(lengths.sum())


def _on(device: torch.device, values: Sequence[int] | np.ndarray) -> Tensor:
    """Copy to a device without waiting for it."""
    made = torch.from_numpy(np.ascontiguousarray(values))
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
