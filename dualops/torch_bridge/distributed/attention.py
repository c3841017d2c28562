"""The attention of one rank and its gradient, some heads at a time."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..arguments import with_dense_rows
from ..flash_attention import _operator_varlen as varlen
from .call import OP, TENSORS, Call
from .layout import Layout, Reach
from .ranks import Ranks
from .transfers import Gathering, Heads, Returning, sum_in_order

AT_ONCE = 2**30  # bytes of K and V of all ranks up to which all heads are gathered at once
GROUPS = 4  # of heads, for more bytes


class Part(NamedTuple):
    """Some heads of k and v, and the heads of q that share them."""

    kv: Heads
    q: Heads


def _parts(call: Call, layout: Layout) -> list[Part]:
    (_, H, _), (_, Hkv, D), Dv = call.q.shape, call.k.shape, call.v.shape[2]
    at_once = call.gather_heads
    if at_once is None:
        nbytes = layout.total * Hkv * (D + Dv) * call.k.element_size()
        at_once = Hkv if nbytes <= AT_ONCE else -(-Hkv // GROUPS)
    shared = H // Hkv if Hkv else 0
    bounds = [(begin, min(begin + at_once, Hkv)) for begin in range(0, Hkv, at_once)]
    return [Part(slice(begin, end), slice(begin * shared, end * shared)) for begin, end in bounds]


def _reach(call: Call) -> Reach:
    left, _ = call.params["window"] or (None, None)
    return Reach(bool(call.params["causal"]), left, max(call.q.shape[2], call.v.shape[2]))


class ContextParallel(torch.autograd.Function):
    """q, k, v, alibi_slopes, sinks and the checked call -> o, lse."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, ranks, layout, call = args
        results = _forward(call, ranks, layout)
        ctx.save_for_backward(*tensors, *results)
        ctx.ranks, ctx.layout, ctx.call = ranks, layout, call._replace(**dict.fromkeys(TENSORS))
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        if ctx.needs_input_grad[3]:
            raise NotImplementedError(f"{OP}: alibi_slopes requires a gradient, which is not implemented; detach it")
        *tensors, o, lse = ctx.saved_tensors
        call = ctx.call._replace(**dict(zip(TENSORS, tensors)))
        found = _Gradient.apply(*tensors, o, lse, *grad_outputs, ctx.ranks, ctx.layout, call, ctx.needs_input_grad[:5])
        return (*found, None, None, None)


class _Gradient(torch.autograd.Function):
    """The gradient; not differentiable itself."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor | None, ...]:
        *_, o, lse, do, dlse, ranks, layout, call, wanted = args
        return _backward(call, ranks, layout, o, lse, do, dlse, wanted)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> NoReturn:
        raise NotImplementedError(f"{OP}_backward: its gradient is not implemented")


def _forward(call: Call, ranks: Ranks, layout: Layout) -> tuple[Tensor, Tensor]:
    q, k, v = (x.detach() for x in call[:3])
    o = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[1], len(q), dtype=torch.promote_types(q.dtype, torch.float32))
    parts = _parts(call, layout)
    if not layout.total or not parts:
        return o, lse
    exchange = layout.exchange(ranks.rank, _reach(call), q.device)
    gathering = Gathering(ranks, exchange, (k, v), [part.kv for part in parts])
    gathering.start(0)
    keys = gathering.finish(0)
    for number, part in enumerate(parts):
        gathering.start(number + 1)
        if len(q):
            attention = _Attention.of(call, part, ranks, layout)
            attention.forward(q[:, part.q], keys, o[:, part.q], lse[part.q])
        keys = gathering.finish(number + 1)
    return o, lse


def _backward(
    call: Call,
    ranks: Ranks,
    layout: Layout,
    o: Tensor,
    lse: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return dq, dk, dv, None and dsinks, those that are needed."""
    q, k, v = (x.detach() for x in call[:3])
    o, lse = o.detach(), lse.detach()
    do = torch.zeros_like(o) if do is None else with_dense_rows(do.detach())
    dlse = None if dlse is None else with_dense_rows(dlse.detach())
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    sinks = call.sinks
    dsinks = None if sinks is None else torch.zeros_like(sinks.detach())
    parts = _parts(call, layout)
    if not layout.total or not parts:
        results: list[Tensor | None] = [dq, torch.zeros_like(k), torch.zeros_like(v), None, dsinks]
        return tuple([x if want else None for x, want in zip(results, wanted)])
    groups = [part.kv for part in parts]
    exchange = layout.exchange(ranks.rank, _reach(call), q.device)
    gathering, returning = Gathering(ranks, exchange, (k, v), groups), Returning(ranks, exchange, (k, v), groups)
    gathering.start(0)
    keys = gathering.finish(0)
    for number, part in enumerate(parts):
        gathering.start(number + 1)
        dkeys = returning.room(number)
        if len(q):
            attention = _Attention.of(call, part, ranks, layout)
            saved = o[:, part.q], lse[part.q], do[:, part.q], None if dlse is None else dlse[part.q]
            out = [dq[:, part.q], *dkeys, *([] if dsinks is None else [dsinks[part.q]])]
            attention.backward(q[:, part.q], keys, saved, out)
        else:
            for each in dkeys:
                each.zero_()
        returning.finish(number - 1)
        keys = gathering.finish(number + 1)
        returning.start(number)
    returning.finish(len(parts) - 1)
    ranks.wait_for_aside()
    if dsinks is not None and wanted[4] and call.reduce_sinks:
        dsinks = sum_in_order(ranks, dsinks)
    results = [dq, *returning.results, None, dsinks]
    return tuple([x if want else None for x, want in zip(results, wanted)])


class _Attention(NamedTuple):
    """`flash_attention_varlen` and its gradient for some heads, writing to the caller's memory."""

    tables: tuple[Any, ...]  # cu_seqlens_q, cu_seqlens_k, k_starts, k_lengths
    lengths: tuple[int, int, int]
    per_head: tuple[Tensor | None, Tensor | None]  # alibi_slopes, sinks
    params: dict[str, Any]

    @classmethod
    def of(cls, call: Call, part: Part, ranks: Ranks, layout: Layout) -> _Attention:
        found = layout.sequences(ranks.rank, _reach(call), call.q.device)
        per_head = [None if x is None else x.detach()[part.q] for x in (call.alibi_slopes, call.sinks)]
        tables = found.cu_seqlens_q, None, found.k_starts, found.k_lengths
        return cls(tables, found[3:], (per_head[0], per_head[1]), call.params)

    def forward(self, q: Tensor, keys: Sequence[Tensor], o: Tensor, lse: Tensor) -> None:
        """keys: k and v of the tokens that this rank reads."""
        if q.is_cuda:
            kernel, longest = self._kernel("flash_attention_varlen"), self.lengths[:2]
            kernel(q, *keys, *self.tables[:2], *longest, out=(o, lse), return_lse=True, **self._more())
            return
        found = varlen(q, *keys, *self.tables, *self.per_head, None, *self.lengths, *self._in_order())
        _copy(found, (o, lse))

    def backward(
        self, q: Tensor, keys: Sequence[Tensor], saved: Sequence[Tensor | None], out: Sequence[Tensor]
    ) -> None:
        """saved: o, lse and the gradients of both. out: for dq, dk, dv and, if there are sinks, dsinks."""
        *saved, dlse = saved
        if q.is_cuda:
            kernel, longest = self._kernel("flash_attention_varlen_backward"), self.lengths[:2]
            more = {"dlse": dlse, "out": tuple(out), "return_lse": True, **self._more()}
            kernel(q, *keys, *saved, *self.tables[:2], *longest, **more)
            return
        backward: Any = varlen.backward
        arrays = q, *keys, *saved, *self.tables, dlse, *self.per_head, None
        _copy(backward(*arrays, *self.lengths, *self._in_order()), out)

    def _kernel(self, name: str) -> Any:
        return getattr(import_module("dualops.cuda"), name)

    def _more(self) -> dict[str, Any]:
        _, _, k_starts, k_lengths = self.tables
        named = {"alibi_slopes": self.per_head[0], "sinks": self.per_head[1], "k_starts": k_starts}
        return {**named, "k_lengths": k_lengths, "total_k_lengths": self.lengths[2], **self.params}

    def _in_order(self) -> list[Any]:
        return [self.params.get(param.name, param.default) for param in varlen.params[3:]]


def _copy(found: Sequence[Tensor | None], out: Sequence[Tensor]) -> None:
    for target, x in zip(out, found):
        if x is not None:
            target.copy_(x)
