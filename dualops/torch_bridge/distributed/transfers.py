"""Gather K and V from all ranks and return their gradients, some heads at a time, overlapped with attention.

Everything here is queued on a separate stream (`Ranks.aside`), in this order for groups of heads 0, 1, 2 ...:

    gather 0 | attention 0 and gather 1 | attention 1, gather 2 and the gradients of 0 | ...

Memory is allocated once, before the first group: K and V of one group as they arrive, and of two groups in the order of
the tokens. The stream waits for attention on a group before it overwrites the group's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .layout import Layout
from .ranks import Ranks

Heads = slice


class Room:
    """Memory for a tensor of some heads: [rows, heads, D], contiguous for any number of heads up to `most`."""

    def __init__(self, rows: int, most: int, D: int, like: Tensor, dtype: torch.dtype | None = None):
        self.rows, self.D = rows, D
        self.memory = like.new_empty(rows * most * D, dtype=dtype)

    def of(self, heads: int) -> Tensor:
        shape = (self.rows, heads, self.D)
        return self.memory[: prod(shape)].view(shape)


class Gathering:
    """Gathers tensors [tokens, heads, D] of all ranks in token order, one of `groups` of heads at a time."""

    def __init__(self, ranks: Ranks, layout: Layout, tensors: Sequence[Tensor], groups: Sequence[Heads]):
        self.ranks, self.layout, self.tensors, self.groups = ranks, layout, tensors, groups
        self.index = layout.from_ranks(tensors[0].device)
        most = max(map(_count, groups))

        def room(rows: int) -> list[Room]:
            return [Room(rows, most, x.shape[-1], x) for x in tensors]

        arriving = layout.most * ranks.size
        self.sent = room(layout.most)
        if self.index is None:
            self.arriving = [room(arriving) for _ in groups[:2]]
        else:
            self.arriving = [room(arriving)] * 2
            self.ordered = [room(layout.total) for _ in groups[:2]]
        self.works: list[Any] = []

    def start(self, number: int) -> None:
        """Send this rank's share of a group of heads. Attention on the group before the last must be queued."""
        if number >= len(self.groups):
            return
        self.ranks.aside_waits()
        with self.ranks.aside():
            heads = self.groups[number]
            for x, sent, arriving in zip(self.tensors, self.sent, self.arriving[number % 2]):
                share = sent.of(_count(heads))
                share[: x.shape[0]].copy_(x[:, heads])
                self.works.append(self.ranks.all_gather(arriving.of(_count(heads)), share))

    def finish(self, number: int) -> list[Tensor]:
        """Return the tensors of a group of heads, [all tokens, heads, D], for the current stream."""
        if number >= len(self.groups):
            return []
        heads, found = _count(self.groups[number]), []
        with self.ranks.aside():
            for work in self.works:
                work.wait()
            self.works.clear()
            for i, arriving in enumerate(self.arriving[number % 2]):
                if self.index is None:
                    found.append(arriving.of(heads)[: self.layout.total])
                else:
                    ordered = self.ordered[number % 2][i].of(heads)
                    found.append(torch.index_select(arriving.of(heads), 0, self.index, out=ordered))
        self.ranks.wait_for_aside()
        return found


class Returning:
    """Returns gradients of all tokens to their ranks: summed in float32 (float64 for float64), in rank order.

    So the sum has the same bits in every run. Gradients are sent in their own dtype.
    """

    def __init__(self, ranks: Ranks, layout: Layout, like: Sequence[Tensor], groups: Sequence[Heads]):
        """like: this rank's tensors [tokens, heads, D] that have such gradients."""
        self.ranks, self.layout, self.groups = ranks, layout, groups
        self.index = layout.to_ranks(like[0].device)
        self.results = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]
        most, wide = max(map(_count, groups)), torch.promote_types(like[0].dtype, torch.float32)

        def room(rows: int, dtype: torch.dtype | None = None) -> list[Room]:
            return [Room(rows, most, x.shape[-1], x, dtype) for x in like]

        self.count = layout.counts[ranks.rank]
        self.given = [room(layout.total) for _ in groups[:2]]
        self.sent = room(layout.total) if self.index is not None else []
        self.arriving, self.sums = room(self.count * ranks.size), room(self.count, wide)
        self.works: list[Any] = []

    def room(self, number: int) -> list[Tensor]:
        """Return the memory for the gradients of a group of heads, [all tokens, heads, D]."""
        return [room.of(_count(self.groups[number])) for room in self.given[number % 2]]

    def start(self, number: int) -> None:
        """Send the gradients of a group of heads, which must be queued."""
        self.ranks.aside_waits()
        with self.ranks.aside():
            heads = _count(self.groups[number])
            for i, given in enumerate(self.room(number)):
                if self.index is not None:
                    given = torch.index_select(given, 0, self.index, out=self.sent[i].of(heads))
                arriving, counts = self.arriving[i].of(heads), self.layout.counts
                self.works.append(self.ranks.all_to_all(arriving, given, [self.count] * len(counts), counts))

    def finish(self, number: int) -> None:
        """Sum the received gradients of a group of heads into `results`."""
        if number < 0:
            return
        heads = self.groups[number]
        with self.ranks.aside():
            for work in self.works:
                work.wait()
            self.works.clear()
            for i, result in enumerate(self.results):
                parts = self.arriving[i].of(_count(heads)).unflatten(0, (self.ranks.size, self.count))
                total = self.sums[i].of(_count(heads))
                total.copy_(parts[0])
                for part in parts[1:]:
                    total.add_(part)
                result[:, heads] = total


def sum_in_order(ranks: Ranks, x: Tensor) -> Tensor:
    """Sum a short float32 or float64 vector over the ranks, in rank order, on each of them."""
    every = x.new_empty(ranks.size * len(x))
    ranks.aside_waits()
    with ranks.aside():
        ranks.all_gather(every, x).wait()
    ranks.wait_for_aside()
    first, *others = every.unflatten(0, (ranks.size, len(x)))
    total = first.clone()
    for part in others:
        total += part
    return total


def _count(heads: Heads) -> int:
    return heads.stop - heads.start
