"""Who holds which tokens: documents that lie one after another, shared out among the ranks of a group.

    head_tail     each document is cut into n = 2 * P chunks for P ranks. The i-th rank has chunks i and n - 1 - i. A
                  causal query late in its document sees more keys than an early one; together the two chunks of any
                  rank see as many as those of any other.
    contiguous    rank r has the r-th of P runs of all tokens, whatever documents they are of. A run ends with a
                  document that has less than LEAST_CHUNK tokens left.

With head_tail, ranks count from the one that has the fewest tokens of the documents before. Chunks of a document differ
by one token at most. None has less than LEAST_CHUNK tokens, but for a document that has less: shorter documents have
fewer chunks, and short ones are whole. A chunk then fills a tile of queries. Nor are its keys split among blocks, as
kernels do for a few queries with many keys, which gives other bits than those of the whole document.

A rank has its tokens in the order of the documents. What lies in one piece in a document is one sequence of
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
LEAST_CHUNK = 128  # tokens: queries of a tile on Hopper
Ends = tuple[int, ...]  # where documents begin, and the end
_READ = WeakTensorKeyDictionary()  # cu_seqlens on a device -> their version, and what they are


class Pieces(NamedTuple):
    """Runs of tokens of one rank, each of one document, as they lie one after another on that rank."""

    starts: np.ndarray  # among all tokens
    stops: np.ndarray
    documents: np.ndarray  # the document's number


class Sequences(NamedTuple):
    """The pieces of a rank as sequences of `flash_attention_varlen`, whose keys are those of all documents."""

    cu_seqlens_q: Tensor
    k_starts: Tensor
    k_lengths: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    total_k_lengths: int


class Layout:
    """Of documents and a number of ranks. Made once (`layout_of`)."""

    def __init__(self, ends: Ends, size: int, balance: str):
        self.ends, self.size, self.balance = ends, size, balance
        self.cu = np.asarray(ends, np.int64)
        self.total = ends[-1]
        cut = _head_tail if balance == "head_tail" else _contiguous
        self.pieces = cut(self.cu, size)
        self.counts = [int((each.stops - each.starts).sum()) for each in self.pieces]
        self.most = max(self.counts)  # to which all shares are filled up where they travel
        self._on_device: dict[Any, Any] = {}

    @cached_property
    def rows(self) -> list[np.ndarray]:
        """Each rank's tokens, by their places among all of them."""
        return [_runs(each.starts, each.stops) for each in self.pieces]

    def positions(self, rank: int) -> np.ndarray:
        """Of a rank's tokens, each in its document."""
        starts, stops, documents = self.pieces[rank]
        return _runs(starts - self.cu[documents], stops - self.cu[documents])

    def rows_on(self, rank: int, device: torch.device) -> Tensor:
        return self._once(("rows", rank, device), lambda: _on(device, self.rows[rank]))

    def from_ranks(self, device: torch.device) -> Tensor | None:
        """Where each token is among the shares of all ranks, filled up; None if all are in their places."""

        def made() -> Tensor | None:
            place = np.empty(self.total, np.int64)
            for rank, rows in enumerate(self.rows):
                place[rows] = rank * self.most + np.arange(len(rows))
            return None if (place == np.arange(self.total)).all() else _on(device, self._narrow(place))

        return self._once(("from_ranks", device), made)

    def to_ranks(self, device: torch.device) -> Tensor | None:
        """The tokens of one rank after those of another; None if all are in their places."""

        def made() -> Tensor | None:
            order = np.concatenate(self.rows)
            return None if (order == np.arange(self.total)).all() else _on(device, self._narrow(order))

        return self._once(("to_ranks", device), made)

    def sequences(self, rank: int, causal: bool, device: torch.device) -> Sequences:
        """causal: keys end where the piece ends, so that its last query stands at the last key. Else all are seen."""

        def made() -> Sequences:
            starts, stops, documents = self.pieces[rank]
            begins = self.cu[documents]
            lengths = (stops if causal else self.cu[documents + 1]) - begins
            queries = stops - starts
            ends = np.concatenate([np.zeros(1, np.int64), queries.cumsum()])
            cu_q, k_starts, k_lengths = (_on(device, each.astype(np.int32)) for each in (ends, begins, lengths))
            longest_q, longest_k = (int(each.max(initial=0)) for each in (queries, lengths))
            return Sequences(cu_q, k_starts, k_lengths, longest_q, longest_k, int(lengths.sum()))

        return self._once(("sequences", rank, causal, device), made)

    def whole(self, device: torch.device) -> tuple[Tensor, int]:
        """cu_seqlens of all documents, and the length of the longest."""
        longest = int(np.diff(self.cu).max(initial=0))
        return self._once(("whole", device), lambda: (_on(device, self.cu.astype(np.int32)), longest))

    def _narrow(self, places: np.ndarray) -> np.ndarray:
        """In 32 bits, where they suffice."""
        return places.astype(np.int32) if self.size * self.most < 2**31 else places

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
    """cu_seqlens as numbers. A tensor on a device is read once, which waits for the device.

    Raises TypeError for what are no integers along one axis, ValueError where they do not begin at 0 or fall.
    """
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.device.type != "cpu":
        version = None if cu_seqlens.is_inference() else cu_seqlens._version
        known = _READ.get(cu_seqlens)
        if known is None or version is None or known[0] != version:
            known = _READ[cu_seqlens] = version, ends_of(op, cu_seqlens.detach().cpu())
        return known[1]
    told = f"{op}: cu_seqlens is {shown(cu_seqlens)}"
    try:
        values = np.asarray(cu_seqlens)
    except (TypeError, ValueError, RuntimeError):
        values = np.empty(0)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise TypeError(f"{told}, expected integers along one axis: where each document begins, and the end")
    if not len(values) or values[0] != 0 or (values[1:] < values[:-1]).any():
        raise ValueError(f"{told}, expected numbers that begin at 0 and never fall")
    return tuple(map(int, values))


def _head_tail(cu: np.ndarray, size: int) -> list[Pieces]:
    counts = [0] * size
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
    for document, (begin, end) in enumerate(pairwise(cu.tolist())):
        chunks = min(2 * size, max(1, (end - begin) // LEAST_CHUNK))
        each, left = divmod(end - begin, chunks)
        order = sorted(range(size), key=lambda rank: (counts[rank], rank))
        heads = range(min(size, chunks))
        longer = {*[*heads, *range(chunks - 1, size - 1, -1)][:left]}  # chunks that have a token more
        for chunk in range(chunks):
            rank = order[chunk if chunk < size else chunks - 1 - chunk]
            stop = begin + each + (chunk in longer)
            found[rank].append((begin, stop, document))
            counts[rank] += stop - begin
            begin = stop
    return [_pieces(*np.array(pieces, np.int64).reshape(-1, 3).T) for pieces in found]


def _contiguous(cu: np.ndarray, size: int) -> list[Pieces]:
    bounds = []
    for rank in range(size + 1):
        cut = int(cu[-1]) * rank // size
        end = int(cu[np.searchsorted(cu, cut)])  # of the document that it is in
        bounds.append(end if end - cut < LEAST_CHUNK else cut)
    documents = np.arange(len(cu) - 1)
    return [_pieces(cu[:-1].clip(*run), cu[1:].clip(*run), documents) for run in pairwise(bounds)]


def _pieces(starts: np.ndarray, stops: np.ndarray, documents: np.ndarray) -> Pieces:
    """Without those that have no token; those that meet in a document are one."""
    there = stops > starts
    starts, stops, documents = starts[there], stops[there], documents[there]
    apart = np.ones(len(starts) + 1, bool)
    apart[1:-1] = (starts[1:] != stops[:-1]) | (documents[1:] != documents[:-1])
    return Pieces(starts[apart[:-1]], stops[apart[1:]], documents[apart[:-1]])


def _runs(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """The numbers from each start to its stop, one run after another."""
    lengths = stops - starts
    return np.repeat(starts - (lengths.cumsum() - lengths), lengths) + np.arange(lengths.sum())


def _on(device: torch.device, values: Sequence[int] | np.ndarray) -> Tensor:
    """On a device, without waiting for it."""
    made = torch.from_numpy(np.ascontiguousarray(values))
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
