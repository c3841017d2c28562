"""Gather the keys and values that a rank reads, and return their gradients, some heads at a time.

Everything here is queued on a separate stream (`Ranks.aside`), in this order for groups of heads 0, 1, 2 ...:

    gather 0 | attention 0 and gather 1 | attention 1, gather 2 and the gradients of 0 | ...

Memory is allocated once, before the first group: K and V of one group as they arrive from other ranks, and of two
groups in the order of the tokens. The stream waits for attention on a group before it overwrites the group's memory.
Attention waits until the next exchange can begin: its blocks stay on the GPU to the end, and would leave no room for
those that send.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .layout import Exchange
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
    """Gathers tensors [tokens, heads, D]: the tokens that this rank reads, one of `groups` of heads at a time."""

    def __init__(self, ranks: Ranks, exchange: Exchange, tensors: Sequence[Tensor], groups: Sequence[Heads]):
        self.ranks, self.exchange, self.tensors, self.groups = ranks, exchange, tensors, groups
        most = max(map(_count, groups))

        def room(rows: int) -> list[Room]:
            return [Room(rows, most, x.shape[-1], x) for x in tensors]

        self.sent, self.read = room(len(exchange.sent)), [room(exchange.rows) for _ in groups[:2]]
        self.arriving = [] if exchange.in_order else room(len(exchange.received))
        self.works: list[Any] = []

    def start(self, number: int) -> None:
        """Send a group of heads to the ranks that read them. Attention on the group before the last must be queued."""
        if number >= len(self.groups):
            return
        heads, exchange = self.groups[number], self.exchange
        count = _count(heads)
        self.ranks.aside_waits()
        with self.ranks.aside():
            for x, sent, read in zip(self.tensors, self.sent, self._read(number)):
                torch.index_select(x[:, heads], 0, exchange.sent, out=sent.of(count))
                _place(x[:, heads], read, exchange.own)
        self.ranks.wait_for_aside()
        with self.ranks.aside():
            for arriving, sent in zip(self._arriving(number), self.sent):
                counts = exchange.received_counts, exchange.sent_counts
                self.works.append(self.ranks.all_to_all(arriving, sent.of(count), *counts))

    def finish(self, number: int) -> list[Tensor]:
        """Return the tensors of a group of heads, [read tokens, heads, D], for the current stream."""
        if number >= len(self.groups):
            return []
        read = self._read(number)
        with self.ranks.aside():
            _wait(self.works)
            if not self.exchange.in_order:
                for each, arrived in zip(read, self._arriving(number)):
                    _place(arrived, each, self.exchange.received)
        self.ranks.wait_for_aside()
        return read

    def _read(self, number: int) -> list[Tensor]:
        return [room.of(_count(self.groups[number])) for room in self.read[number % 2]]

    def _arriving(self, number: int) -> list[Tensor]:
        """Return where the tokens of other ranks arrive: before this rank's own if that is their order."""
        if self.exchange.in_order:
            return [read[: len(self.exchange.received)] for read in self._read(number)]
        return [room.of(_count(self.groups[number])) for room in self.arriving]


class Returning:
    """Returns gradients of the tokens that this rank reads to the ranks that own them.

    They are sent in their own dtype. This rank's part is first in the sum, then those of the others in rank order, so
    the sum has the same bits in every run. It is float32 (float64 for float64), rounded once. With two ranks it is one
    addition, which rounds once in any dtype.
    """

    def __init__(self, ranks: Ranks, exchange: Exchange, like: Sequence[Tensor], groups: Sequence[Heads]):
        """like: this rank's tensors [tokens, heads, D] that have such gradients."""
        self.ranks, self.exchange, self.groups = ranks, exchange, groups
        self.results = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]
        most, dtype = max(map(_count, groups)), like[0].dtype
        wide = torch.promote_types(dtype, torch.float32) if ranks.size > 2 else dtype
        self.widens = wide != dtype

        def room(rows: int, dtype: torch.dtype | None = None) -> list[Room]:
            return [Room(rows, most, x.shape[-1], x, dtype) for x in like]

        self.count = len(like[0])
        self.given = [room(exchange.rows) for _ in groups[:2]]
        self.sent, self.arriving = room(len(exchange.received)), room(len(exchange.sent))
        self.own = room(self.count)
        self.sums = room(self.count, wide) if self.widens else self.own
        self.widened = room(max(exchange.sent_counts), wide) if self.widens else []  # what is added to the sums
        self.works: list[Any] = []

    def room(self, number: int) -> list[Tensor]:
        """Return the memory for the gradients of a group of heads, [read tokens, heads, D]."""
        return [room.of(_count(self.groups[number])) for room in self.given[number % 2]]

    def start(self, number: int) -> None:
        """Send the gradients of a group of heads, which must be queued."""
        heads, exchange, pairs = _count(self.groups[number]), self.exchange, []
        self.ranks.aside_waits()
        with self.ranks.aside():
            for given, sent, arriving in zip(self.room(number), self.sent, self.arriving):
                packed = torch.index_select(given, 0, exchange.received, out=sent.of(heads))
                pairs.append((arriving.of(heads), packed))
        self.ranks.wait_for_aside()
        with self.ranks.aside():
            for arriving, packed in pairs:
                self.works.append(
                    self.ranks.all_to_all(arriving, packed, exchange.sent_counts, exchange.received_counts)
                )

    def finish(self, number: int) -> None:
        """Sum the gradients of a group of heads, from all ranks, into `results`."""
        if number < 0:
            return
        heads, exchange = self.groups[number], self.exchange
        count, rows = _count(heads), exchange.sent.split(exchange.sent_counts)
        with self.ranks.aside():
            _wait(self.works)
            for i, (result, given) in enumerate(zip(self.results, self.room(number))):
                total = self.sums[i].of(count)
                own = torch.index_select(given, 0, exchange.own, out=self.own[i].of(count))
                if self.widens:
                    total.copy_(own)
                for places, part in zip(rows, self.arriving[i].of(count).split(exchange.sent_counts)):
                    if not len(part):
                        continue
                    if self.widens:
                        part = self.widened[i].of(count)[: len(part)].copy_(part)
                    total.index_add_(0, places, part)
                result[:, heads] = total


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
    works.clear()


def _place(rows: Tensor, into: Tensor, places: Tensor) -> None:
    """Copy rows [n, heads, D] into places of a dense tensor, 8 bytes at a time if they allow it: twice as fast."""
    steps = rows.storage_offset(), rows.shape[-1], *rows.stride()[:-1]
    nbytes = rows.data_ptr(), *(step * rows.element_size() for step in steps)
    if rows.stride(-1) == 1 and not any(number % 8 for number in nbytes):
        rows, into = rows.view(torch.int64), into.view(torch.int64)
    into.index_copy_(0, places, rows)


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
