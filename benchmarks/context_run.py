"""Attention over tokens that are split among several GPUs, and the same attention on one of them.

    python -m benchmarks context --json FILE

Efficiency is (time on one / P) / time on P: 1 would be P times as fast. Every process has a GPU. First each of them
does all of the attention by itself, at the same time as the others, so that power limits are the same. Then all do it
together. Both are timed in turns, in bursts between two events. The slowest process's time counts, and the median of
`BURSTS` is kept. Before anything is timed, forward's bits on P are compared with those on one. Memory is the peak of a
call with gradient beyond its inputs, on the process that needs most.

`gather_heads` has the values that are timed for that argument of `context_parallel`; None is its default.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from dualops.torch_bridge import flash_attention_varlen
from dualops.torch_bridge.distributed import context_parallel, shard

from .comparison import commit
from .tree import ROOT
from .workload import WrongResult

CALLS, BURSTS = 4, 5


@dataclass(frozen=True)
class Row:
    """A timed problem: documents, options, and the target efficiencies, forward and with gradient."""

    lengths: tuple[int, ...]
    options: dict[str, Any]
    targets: tuple[float, float]

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.lengths, initial=0))


@dataclass(frozen=True)
class Size:
    heads: tuple[int, int]  # of q, of k and v
    D: int
    dtype: str
    rows: dict[str, Row]
    gather_heads: tuple[int | None, ...]


MIXED = (17001, 512, 3000, 9123, 77, 2048, 6500, 1311, 4096, 12000, 640, 1800, 5200, 300, 900, 1028)
LARGE = Size(
    (32, 8),
    128,
    "bfloat16",
    {
        "65,536 causal": Row((65536,), {}, (0.96, 0.97)),
        "window 4096, softcap": Row((65536,), {"window": (4096, 0), "softcap": 30.0}, (0.92, 0.92)),
        "16 documents": Row(MIXED, {}, (0.92, 0.94)),
    },
    (None, 1),
)
TINY = Size(  # for CPUs
    (4, 2),
    8,
    "float32",
    {"causal": Row((48,), {}, (0.0, 0.0)), "documents": Row((31, 2, 15), {"window": (9, 0)}, (0.0, 0.0))},
    (None, 1),
)


@dataclass(frozen=True)
class Point:
    """One row with one gather_heads. Pairs: forward, with gradient; seconds on one process and on all."""

    row: str
    gather_heads: int | None
    processes: int
    one: tuple[float, float]
    all: tuple[float, float]
    extra_memory: tuple[int, int] | None  # bytes, on one and on the worst of all; None on CPUs

    @property
    def efficiency(self) -> tuple[float, float]:
        forward, both = (one / self.processes / many for one, many in zip(self.one, self.all))
        return forward, both


def run(processes: int, *, tiny: bool, show: Callable[[str], None]) -> list[Point]:
    """Time all rows in this many processes. Raises WrongResult if bits differ, or a process fails."""
    size = TINY if tiny else LARGE
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_work, (processes, tiny, folder), nprocs=processes)
        except ProcessRaisedException as error:
            raise WrongResult(str(error)) from None
        found: list[Point] = torch.load(Path(folder) / "found.pt", weights_only=False)
    show(header())
    for point in found:
        show(line(point, size.rows[point.row]))
    return found


def _work(rank: int, processes: int, tiny: bool, folder: str) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if tiny:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo" if tiny else "nccl", init_method=meeting, rank=rank, world_size=processes)
    device = torch.device("cpu") if tiny else torch.device("cuda", rank)
    size, found = TINY if tiny else LARGE, []
    for name in size.rows:
        for gather_heads in size.gather_heads:
            found.append(point(name, size, gather_heads, processes, device))
            if rank == 0:  # progress; the table follows at the end
                print(line(found[-1], size.rows[name]), file=sys.stderr, flush=True)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    distributed.destroy_process_group()


def point(name: str, size: Size, gather_heads: int | None, processes: int, device: torch.device) -> Point:
    """Time a row; all processes make the same call."""
    row, group = size.rows[name], distributed.group.WORLD
    torch.manual_seed(0)
    T, (H, Hkv) = row.ends[-1], size.heads
    dtype = getattr(torch, size.dtype)
    drawn = [torch.randn(T, heads, size.D, device=device, dtype=dtype) for heads in (H, Hkv, Hkv, H)]
    *qkv, do = drawn
    cu, longest = torch.tensor(row.ends, dtype=torch.int32, device=device), max(row.lengths)
    one = partial(
        flash_attention_varlen,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
        **row.options,
    )
    mine = partial(shard, dim=0, group=group, cu_seqlens=row.ends)
    together = partial(context_parallel, group=group, cu_seqlens=row.ends, gather_heads=gather_heads, **row.options)
    calls = [*both_ways(one, qkv, do), *both_ways(together, [mine(x) for x in qkv], mine(do))]
    expected, got = mine(calls[0]()), calls[2]()
    same = torch.equal(expected, got) if device.type == "cuda" else torch.allclose(expected, got, atol=1e-6)
    if not same:
        raise WrongResult(f"context_parallel, {name}, gather_heads {gather_heads}: not the bits of one process")
    del expected, got
    for call in calls:
        call()
    seconds = [[burst(call, device) for call in calls] for _ in range(BURSTS)]
    times = [median(each) for each in zip(*seconds)]
    memory = None
    if device.type == "cuda":
        memory = int(slowest(peak(calls[1]), device)), int(slowest(peak(calls[3]), device))
    return Point(name, gather_heads, processes, (times[0], times[1]), (times[2], times[3]), memory)


def both_ways(call: Callable[..., Any], tensors: list[Tensor], do: Tensor) -> list[Callable[[], Any]]:
    """Return forward alone, and forward with the gradient."""
    leaves = [x.clone().requires_grad_() for x in tensors]

    def forward() -> Tensor:
        with torch.no_grad():
            return call(*leaves)

    def with_gradient() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(*leaves), leaves, do)

    return [forward, with_gradient]


def burst(call: Callable[[], Any], device: torch.device) -> float:
    """Measure seconds per call, back to back, of the slowest process."""
    distributed.barrier()
    if device.type == "cpu":
        began = perf_counter()
        call()
        return slowest(perf_counter() - began, device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()  # keeps the device busy while the host queues the next
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return slowest(begin.elapsed_time(end) / 1e3 / CALLS, device)


def slowest(value: float, device: torch.device) -> float:
    """Return the largest of all processes' values."""
    found = torch.tensor(float(value), dtype=torch.float64, device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return float(found)


def peak(call: Callable[[], Any]) -> int:
    """Measure the peak bytes of a call, beyond those allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


WIDTHS = (22, 14, 14, 12, 12, 9, 14, 12, 12, 9, 16)


def header() -> str:
    names = ("row", "gather_heads", "forward, one", "all", "efficiency", "target")
    more = ("gradient too", "all", "efficiency", "target", "GiB, one / all")
    return "".join(f"{name:>{width}}" for name, width in zip((*names, *more), WIDTHS))


def line(found: Point, row: Row) -> str:
    cells = [found.row, "None" if found.gather_heads is None else str(found.gather_heads)]
    for one, many, efficiency, target in zip(found.one, found.all, found.efficiency, row.targets):
        cells += [f"{1e3 * one:.2f} ms", f"{1e3 * many:.2f} ms", f"{efficiency:.3f}"]
        cells.append(f"{target:.2f} {'ok' if efficiency >= target else 'no'}")
    memory = found.extra_memory
    cells.append("–" if memory is None else " / ".join(f"{each / 2**30:.2f}" for each in memory))
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS))


def document(found: list[Point], *, tiny: bool) -> dict[str, Any]:
    """Return the content of the file."""
    size = TINY if tiny else LARGE
    return {
        "date": date.today().isoformat(),
        "gpu": None if tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(ROOT),
        "heads": size.heads,
        "D": size.D,
        "dtype": size.dtype,
        "points": [{**asdict(one), "efficiency": one.efficiency} for one in found],
    }
