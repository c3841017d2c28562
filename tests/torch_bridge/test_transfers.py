"""The order of what context_parallel queues on streams: nothing is read before it is there, or overwritten too soon.

Streams exist on GPUs alone. Here the calls of one rank run on the CPU, with a group that notes on which stream each
operation would be, and what it waits for. Two operations on the same memory, of which one writes, must be in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualops.torch_bridge.distributed import attention, layout
from dualops.torch_bridge.distributed.call import Call
from dualops.torch_bridge.distributed.transfers import Gathering, Returning, Room

from .context import Case

Clock = dict[str, int]  # of each stream, how many of its operations are known to be done
NAMES = {
    "copy_",
    "index_select",
    "index_copy_",
    "index_add_",
    "add_",
    "zero_",
    "flash_attention_varlen",
    "flash_attention_varlen_backward",
}


@dataclass
class Access:
    begin: int
    end: int  # in memory
    writes: bool
    stream: str
    number: int  # among the operations of its stream
    what: str


class Streams:
    """Happened-before of operations on several streams, and what they did to memory."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {}
        self.accesses: list[Access] = []
        self.races: list[str] = []

    def run(self, stream: str, what: str, reads: list[Tensor], writes: list[Tensor]) -> Clock:
        clock = self.clocks.setdefault(stream, {})
        clock[stream] = number = clock.get(stream, 0) + 1
        for tensors, written in ((reads, False), (writes, True)):
            for x in tensors:
                begin = x.data_ptr()
                extent = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + 1 if x.numel() else 0
                now = Access(begin, begin + extent * x.element_size(), written, stream, number, what)
                self.races += [f"{old.what} and {what}" for old in self.accesses if self._race(old, now, clock)]
                self.accesses.append(now)
        return dict(clock)

    def wait(self, stream: str, for_what: Clock) -> None:
        clock = self.clocks.setdefault(stream, {})
        for name, number in for_what.items():
            clock[name] = max(clock.get(name, 0), number)

    @staticmethod
    def _race(old: Access, now: Access, clock: Clock) -> bool:
        meet = old.begin < now.end and now.begin < old.end and (old.writes or now.writes)
        return meet and clock.get(old.stream, 0) < old.number


class Work:
    def __init__(self, ranks: Noting, clock: Clock):
        self.ranks, self.clock = ranks, clock

    def wait(self) -> None:
        self.ranks.streams.wait(self.ranks.current, self.clock)


class Noting:
    """In the place of `Ranks`: rank `rank` of `size`; nothing is exchanged."""

    def __init__(self, rank: int, size: int, streams: Streams, forgets: str = ""):
        self.rank, self.size, self.streams, self.forgets = rank, size, streams, forgets
        self.current, self.device = "main", torch.device("cpu")

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.current = "aside"
        yield
        self.current = "main"

    def aside_waits(self) -> None:
        if self.forgets != "aside_waits":
            self.streams.wait("aside", self.streams.clocks.get("main", {}))

    def wait_for_aside(self) -> None:
        if self.forgets != "wait_for_aside":
            self.streams.wait("main", self.streams.clocks.get("aside", {}))

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        return self._collective("all_gather", out, x)

    def all_to_all(self, out: Tensor, x: Tensor, of_out: list[int], of_x: list[int]) -> Work:
        assert sum(of_out) == len(out) and sum(of_x) == len(x)
        return self._collective("all_to_all", out, x)

    def _collective(self, what: str, out: Tensor, x: Tensor) -> Work:
        self.streams.wait("network", self.streams.clocks.get(self.current, {}))
        out.numpy()[...] = 0  # past Watch
        work = Work(self, self.streams.run("network", what, [x], [out]))
        return Work(self, {}) if self.forgets == what else work


class Watch(TorchDispatchMode):
    """Notes every operation on tensors on the current stream."""

    def __init__(self, ranks: Noting):
        super().__init__()
        self.ranks, self.seen = ranks, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        if name in NAMES:
            self.seen.add(name)
            given = dict(zip((each.name for each in func._schema.arguments), args)) | kwargs
            alias = {each.name: each.alias_info for each in func._schema.arguments}
            reads: list[Tensor] = []
            writes: list[Tensor] = [x for x in tree_leaves(results) if isinstance(x, Tensor)]
            for key, x in given.items():
                if isinstance(x, Tensor):
                    (writes if alias[key] is not None and alias[key].is_write else reads).append(x)
            self.ranks.streams.run(self.ranks.current, name, reads, writes)
        return results


def races(made: Case, rank: int, size: int, forgets: str = "") -> list[str]:
    shares, streams = layout.layout_of(made.ends, size, made.balance), Streams()
    ranks: Any = Noting(rank, size, streams, forgets)
    every = made.tensors()
    rows = torch.from_numpy(shares.rows[rank])
    q, k, v, do = (every[name][rows] for name in ("q", "k", "v", "do"))
    params = {"causal": True, "scale": None, "window": None, "softcap": None}
    call = Call(q, k, v, None, None, params, made.ends, made.balance, made.gather_heads, True, True)
    shares.exchange(rank, attention._reach(call), ranks.device)  # made before anything is noted
    with torch.no_grad(), Watch(ranks) as watch:
        o, lse = attention._forward(call, ranks, shares)
        attention._backward(call, ranks, shares, o, lse, do, None, (True,) * 5)
    assert {"copy_", "index_select", "flash_attention_varlen", "flash_attention_varlen_backward"} <= watch.seen
    return streams.races


CALLS = {
    "a head at a time": Case(heads=(5, 5), gather_heads=1),
    "two heads at a time": Case(heads=(5, 5), gather_heads=2),
    "all at once": Case(heads=(5, 5), gather_heads=5),
    "contiguous": Case(heads=(5, 5), gather_heads=1, balance="contiguous"),
    "contiguous, in place": Case(heads=(5, 5), gather_heads=1, balance="contiguous", ends=(0, 13, 64)),
}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(layout, "TILE", 4)
    layout.layout_of.cache_clear()
    yield
    layout.layout_of.cache_clear()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_out_of_order(name: str, rank: int) -> None:
    assert not races(CALLS[name], rank, 2)


@pytest.mark.parametrize("forgets", ["aside_waits", "wait_for_aside", "all_to_all"])
def test_a_wait_that_is_left_out_is_found(forgets: str) -> None:
    assert races(CALLS["a head at a time"], 0, 2, forgets)


@pytest.mark.parametrize(("kind", "name"), [(Gathering, "read"), (Returning, "given")])
def test_memory_for_one_group_alone_is_found_too_little(kind: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = kind.__init__

    def with_one(self: Any, *args: Any) -> None:
        begin(self, *args)
        setattr(self, name, [getattr(self, name)[0]] * 2)

    monkeypatch.setattr(kind, "__init__", with_one)
    assert races(CALLS["a head at a time"], 0, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", [Gathering, Returning])
def test_no_memory_is_allocated_without_use(kind: Any, size: int, dtype: torch.dtype) -> None:
    """With two ranks, or in float32, gradients are added in their own dtype and need no memory of a wider one."""
    shares, groups = layout.layout_of((0, 64), size, "head_tail"), [slice(n, n + 1) for n in range(3)]
    for rank in range(size):
        ranks: Any = Noting(rank, size, streams := Streams())
        like = [torch.zeros(shares.counts[rank], len(groups), D, dtype=dtype) for D in (8, 6)]
        made = kind(ranks, shares.exchange(rank, None, ranks.device), like, groups)
        with Watch(ranks):
            for number in range(len(groups)):
                made.start(number)
                made.finish(number)
        rooms = [room for each in vars(made).values() for room in tree_leaves(each) if isinstance(room, Room)]
        assert rooms
        for room in rooms:
            begin = room.memory.data_ptr()
            used = max((each.end - begin for each in streams.accesses if each.begin == begin), default=0)
            assert used == room.memory.nbytes


def test_a_quarter_of_the_heads_at_a_time_where_they_are_many_bytes() -> None:
    for total, expected in ((2**19, [2, 2, 2, 2]), (65536, [8])):
        q, k = torch.empty(0, 32, 128, dtype=torch.bfloat16), torch.empty(0, 8, 128, dtype=torch.bfloat16)
        call = Call(q, k, k, None, None, {}, (0, total), "head_tail", None, False, True)
        parts = attention._parts(call, layout.layout_of((0, total), 2, "head_tail"))
        assert [part.kv.stop - part.kv.start for part in parts] == expected
        assert [part.q.stop - part.q.start for part in parts] == [4 * count for count in expected]
