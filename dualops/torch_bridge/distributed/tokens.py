"""Distribute tokens to the ranks of a group, and collect them."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ...spec.domains import shown
from ..compiled import past_compilation
from .agreement import agreed_layout, refused
from .layout import Layout, checked_balance, ends_of, layout_of
from .ranks import Ranks
from .transfers import Gathering, Returning


@past_compilation
def shard(x: Tensor, dim: int, group: Any, *, cu_seqlens: Any = None, balance: str = "head_tail") -> Tensor:
    """This rank's tokens of x, which has all tokens along `dim` and is the same on every rank. Nothing is sent.

    cu_seqlens: where each document begins, and the end, as for `context_parallel`; None: one document.
    balance: "head_tail" cuts each document into 2 * P chunks for P ranks. One rank has the first and the last, another
        the second and the last but one, and so on: under a causal mask all ranks then have the same work. Chunks begin
        at multiples of 128 tokens of their document. Documents of less than 2 * P * 128 tokens have fewer chunks. Those
        of less than 256 tokens are not cut, nor are many of at most 1/8 of a rank's share of all tokens. The shares of
        two ranks differ by at most 255 tokens or 1/8 of the mean share, whichever is larger.
        "contiguous" gives rank r the r-th of P runs of all tokens. The rest of a document, if less than 128 tokens,
        goes to the run before. A share may be empty.

    Differentiable. Raises TypeError and ValueError for a wrong call.

    >>> import torch
    >>> from torch import distributed
    >>> from torch.distributed import HashStore
    >>> distributed.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    >>> shard(torch.arange(6), 0, distributed.group.WORLD)
    tensor([0, 1, 2, 3, 4, 5])
    >>> distributed.destroy_process_group()
    """
    op = "shard"
    ranks = Ranks.of(op, group)
    dim = _axis(op, x, dim)
    layout = _layout(op, ranks, (0, x.shape[dim]) if cu_seqlens is None else ends_of(op, cu_seqlens), balance)
    if layout.total != x.shape[dim]:
        raise ValueError(f"{op}: x has {x.shape[dim]} tokens along axis {dim}, expected {layout.total}, as cu_seqlens")
    return x.index_select(dim, layout.rows_on(ranks.rank, x.device))


@past_compilation
def unshard(x: Tensor, dim: int, group: Any, *, cu_seqlens: Any = None, balance: str = "head_tail") -> Tensor:
    """Return all tokens in order on every rank, from x with this rank's tokens along `dim`: the inverse of `shard`.

    All ranks make the same call. The other arguments are those of `shard`. As in `context_parallel`, the ranks first
    check that they agree. That waits for a GPU in the first call with such arguments, and with cu_seqlens=None in every
    call. The gradient is the sum of all ranks' gradients.
    """
    op = "unshard"
    ranks = Ranks.of(op, group)
    ends = None
    try:
        dim = _axis(op, x, dim)
        ranks.check_device(op, "x", x)
        ends = None if cu_seqlens is None else ends_of(op, cu_seqlens)
        checked_balance(op, balance)
    except Exception as error:
        raise refused(op, ranks, error) from None
    same = {
        "dim": dim,
        "the dtype": x.dtype,
        "the shape": (*x.shape[:dim], *x.shape[dim + 1 :]),
        "whether x requires a gradient": torch.is_grad_enabled() and x.requires_grad,
    }
    layout = agreed_layout(op, ranks, ends, balance, x.shape[dim], same)
    moved = x.movedim(dim, 0)
    rows = moved.reshape(len(moved), 1, prod(moved.shape[1:]))
    found = _Unshard.apply(rows, ranks, layout)
    return found.reshape(layout.total, *moved.shape[1:]).movedim(0, dim)


@past_compilation
def positions(
    cu_seqlens: Any, group: Any, *, balance: str = "head_tail", device: torch.device | str | None = None
) -> Tensor:
    """Return the position of each of this rank's tokens in its document, [tokens] of int64, for rotary embeddings.

    cu_seqlens: where each document begins, and the end; [0, length] for one document. balance as for `shard`.
    device: of the result; None: the device of the group's tensors. Nothing is sent.
    """
    op = "positions"
    ranks = Ranks.of(op, group)
    layout = _layout(op, ranks, ends_of(op, cu_seqlens), balance)
    return torch.from_numpy(layout.positions(ranks.rank)).to(ranks.device if device is None else device)


def _layout(op: str, ranks: Ranks, ends: tuple[int, ...], balance: str) -> Layout:
    return layout_of(ends, ranks.size, checked_balance(op, balance))


def _axis(op: str, x: Any, dim: Any) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: x is a {type(x).__name__}, expected a torch.Tensor")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{op}: dim is {shown(dim)}, expected an integer")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{op}: dim is {dim}, x has {x.ndim} axes, expected {-x.ndim} to {x.ndim - 1}")
    return dim % x.ndim


class _Unshard(torch.autograd.Function):
    """[this rank's tokens, 1, N] -> [all tokens, 1, N]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, layout: Layout) -> Tensor:
        ctx.ranks, ctx.layout = ranks, layout
        ctx.shape = x.shape
        if not layout.total or not x.shape[2]:
            return x.new_empty(layout.total, *x.shape[1:])
        gathering = Gathering(ranks, layout.exchange(ranks.rank, None, x.device), (x,), [slice(0, 1)])
        gathering.start(0)
        return gathering.finish(0)[0].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        (dy,) = grad_outputs
        ranks, layout = ctx.ranks, ctx.layout
        like = dy.new_empty(ctx.shape)
        if not layout.total or not ctx.shape[2]:
            return like, None, None
        returning = Returning(ranks, layout.exchange(ranks.rank, None, dy.device), (like,), [slice(0, 1)])
        returning.room(0)[0].copy_(dy)
        returning.start(0)
        returning.finish(0)
        ranks.wait_for_aside()
        return returning.results[0], None, None
