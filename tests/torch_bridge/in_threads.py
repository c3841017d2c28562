"""The ranks of a group as threads of one process, on one device: context_parallel's own code, without a network."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualops.torch_bridge.distributed import attention
from dualops.torch_bridge.distributed.call import checked
from dualops.torch_bridge.distributed.layout import layout_of
from dualops.torch_bridge.distributed.ranks import Ranks

from .context import PER_HEAD, Case, Found


class Done:
    """A collective that was queued on the current stream."""

    def wait(self) -> None: ...


@dataclass(frozen=True)
class Thread(Ranks):
    """One of the threads. They meet at a barrier, and copy from each other's tensors. group: what they share."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.group.device

    def all_to_all(self, out: Tensor, x: Tensor, of_out: list[int], of_x: list[int]) -> Any:
        every = self.group.exchanged(self, x, of_x)
        for part, parts in zip(out.split(of_out), every):
            part.copy_(parts[self.rank])
        self.group.meet()
        return Done()

    def all_gather(self, out: Tensor, x: Tensor) -> Any:
        every = self.group.exchanged(self, x, [len(x)])
        for part, (given,) in zip(out.split(len(x)), every):
            part.copy_(given)
        self.group.meet()
        return Done()


class Board:
    """Where the threads of a group lay out what they send."""

    def __init__(self, size: int, device: torch.device):
        self.device, self.barrier = device, threading.Barrier(size)
        self.laid: list[Any] = [None] * size

    def meet(self) -> None:
        """Wait for all threads, and for all that they queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.barrier.wait()

    def exchanged(self, ranks: Ranks, x: Tensor, counts: list[int]) -> list[Any]:
        self.laid[ranks.rank] = x.split(counts)
        self.meet()
        return list(self.laid)


def in_threads(made: Case, size: int, device: str) -> Found:
    """Results and gradients of all tokens."""
    every, where = made.tensors(device), torch.device(device)
    board, shares = Board(size, where), layout_of(made.ends, size, made.balance)

    def of_rank(rank: int) -> list[Any]:
        try:
            return one(rank)
        except BaseException:
            board.barrier.abort()  # the others must not wait
            raise

    def one(rank: int) -> list[Any]:
        ranks, rows = Thread(board, rank, size), torch.from_numpy(shares.rows[rank]).to(where)
        q, k, v, do = (every[name][rows] for name in ("q", "k", "v", "do"))
        per_head = {name: every[name] for name in PER_HEAD if name in every}
        options = {"causal": True, "return_lse": True, "reduce_sinks": True} | made.options | per_head
        call = checked(ranks, q, k, v, made.ends, made.balance, made.gather_heads, options)
        with torch.no_grad():
            o, lse = attention._forward(call, ranks, shares)
            dlse = every["dlse"][:, rows]
            dq, dk, dv, _, dsinks = attention._backward(call, ranks, shares, o, lse, do, dlse, (True,) * 5)
        return [o, lse, dq, dk, dv, dsinks]

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(of_rank, range(size)))
    there = torch.from_numpy(np.argsort(np.concatenate(shares.rows))).to(where)
    whole: Found = {}
    for name, parts in zip(("o", "lse", "dq", "dk", "dv"), zip(*found)):
        dim = int(name == "lse")
        whole[name] = torch.cat(list(parts), dim).index_select(dim, there).cpu()
    if "sinks" in every:
        assert all(torch.equal(each[5], found[0][5]) for each in found)
        whole["dsinks"] = found[0][5].cpu()
    return whole
