"""Check a call of `context_parallel`: what one rank can check, and what all ranks must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ...spec import flash_attention_varlen as SPEC
from ...spec.domains import shown
from ..flash_attention import _operator_varlen as varlen
from ..ways import autocasting
from .layout import checked_balance, ends_of
from .ranks import Ranks

OP = "context_parallel"
PER_PIECE = "counts the queries and keys of each piece of a document, not those of the document"
UNBATCHED = "is for batches of equal length; documents are packed, with cu_seqlens"
REFUSED = {
    "score_mod": PER_PIECE,
    "mask_mod": PER_PIECE,
    "dropout_p": PER_PIECE,
    "seed": PER_PIECE,
    "bias": "would have to be sharded by queries, and not by keys",
    "key_padding_mask": UNBATCHED,
    "block_mask": UNBATCHED,
}
TENSORS = ("q", "k", "v", "alibi_slopes", "sinks")
PARAMS = ("causal", "scale", "window", "softcap")
MOST_RIGHT = 1000
_RIGHT: set[Any] = set()  # shapes, dtypes and options that the spec has accepted


class Call(NamedTuple):
    """A valid call: its tensors, its options in the spec's form, and what all ranks must have in common."""

    q: Tensor
    k: Tensor
    v: Tensor
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    params: dict[str, Any]  # PARAMS
    ends: tuple[int, ...] | None
    balance: str
    gather_heads: int | None
    return_lse: bool
    reduce_sinks: bool

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.q, self.k, self.v, self.alibi_slopes, self.sinks) if x is not None]

    def same(self) -> dict[str, Any]:
        """Arguments that must be equal on all ranks, apart from documents and balance, by names for an error."""
        gradients = torch.is_grad_enabled() and [x.requires_grad for x in self.tensors]
        per_head = {
            name: x if x is None else (x.dtype, tuple(x.shape))
            for name, x in (("alibi_slopes", self.alibi_slopes), ("sinks", self.sinks))
        }
        return {
            "gather_heads": self.gather_heads,
            **self.params,
            **per_head,
            "return_lse": self.return_lse,
            "reduce_sinks": self.reduce_sinks,
            "the dtype": self.q.dtype,
            "heads and their sizes": [tuple(x.shape[1:]) for x in (self.q, self.k, self.v)],
            "which tensors require a gradient": gradients,
        }


def checked(
    ranks: Ranks, q: Any, k: Any, v: Any, cu_seqlens: Any, balance: Any, gather_heads: Any, options: Mapping[str, Any]
) -> Call:
    """Check the call on this rank. Raises TypeError, ValueError and NotImplementedError for a wrong one."""
    options = dict(options)
    for name, reason in REFUSED.items():
        value = options.pop(name, None)
        if value is not None and not (name == "dropout_p" and value == 0):
            raise NotImplementedError(f"{OP}: {name} is given, which is not implemented: it {reason}")
    alibi_slopes, sinks = options.pop("alibi_slopes", None), options.pop("sinks", None)
    flags = {name: options.pop(name) for name in ("return_lse", "reduce_sinks")}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{OP}: {name} is {shown(flag)}, expected True or False")
    params = _params(options)
    if params["causal"] or (params["window"] or (None, None))[1] == 0:
        params["causal"] = True
    elif params["window"] not in (None, (None, None)):
        _refuse_without_causality("window", params["window"])
    elif alibi_slopes is not None:
        _refuse_without_causality("alibi_slopes", alibi_slopes)
    if gather_heads is not None:
        if not isinstance(gather_heads, int) or isinstance(gather_heads, bool):
            raise TypeError(f"{OP}: gather_heads is {shown(gather_heads)}, expected an integer or None")
        if gather_heads < 1:
            raise ValueError(f"{OP}: gather_heads is {gather_heads}, expected at least 1")
    ends = None if cu_seqlens is None else ends_of(OP, cu_seqlens)
    balance = checked_balance(OP, balance)
    q, k, v, alibi_slopes, sinks = _checked_tensors(ranks, q, k, v, alibi_slopes, sinks, params)
    return Call(q, k, v, alibi_slopes, sinks, params, ends, balance, gather_heads, **flags)


def _params(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return causal, scale, window and softcap in the spec's form."""
    known = {param.name: param for param in SPEC.params if param.name in PARAMS}
    for name in options:
        if name not in known:
            raise TypeError(f"{OP}: got an unexpected keyword argument {name!r}")
    params = {}
    for name, param in known.items():
        value = options.get(name, param.default)
        try:
            params[name] = param.domain(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{OP}: {name} is {shown(value)}, {error.args[0]}") from None
    return params


def _refuse_without_causality(name: str, value: Any) -> NoReturn:
    raise NotImplementedError(
        f"{OP}: {name} is {shown(value)} and causal is False, which is not implemented: {name} counts from a "
        "query's position among the keys, unknown in a piece of a document whose keys continue after it"
    )


def _checked_tensors(
    ranks: Ranks, q: Any, k: Any, v: Any, alibi_slopes: Any, sinks: Any, params: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the tensors of a call in the dtypes of the computation."""
    optional = {name: x for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)) if x is not None}
    for name, x in {"q": q, "k": k, "v": v, **optional}.items():
        if type(x) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{OP}: {name} is a {type(x).__name__}, expected a torch.Tensor of this rank's tokens")
        ranks.check_device(OP, name, x)
    for name, x in (("k", k), ("v", v)):
        if x.ndim and q.ndim and len(x) != len(q):
            raise ValueError(f"{OP}: {name} has {len(x)} tokens, q has {len(q)}, expected as many: this rank's share")
    cu = torch.empty(2, dtype=torch.int32, device=q.device)  # only its metadata is used
    tokens = len(q) if q.ndim else 0
    more = tuple(params.get(param.name, param.default) for param in varlen.params[3:])
    args: tuple[Any, ...] = (q, k, v, cu, cu, None, None, alibi_slopes, sinks, None, tokens, tokens, None, *more)
    if autocasting():
        args = varlen.cast(args)
    q, k, v, *_, alibi_slopes, sinks = args[:9]
    facts = [
        None if x is None else (x.dtype, x.shape[x.ndim > 1 :], x.stride()[-1:]) for x in (q, k, v, alibi_slopes, sinks)
    ]
    key = (*facts, *more)
    if key not in _RIGHT:
        try:
            varlen.bind(args)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise type(error)(str(error).replace(f"{SPEC.name}:", f"{OP}:")) from None
        if len(_RIGHT) >= MOST_RIGHT:
            _RIGHT.clear()
        _RIGHT.add(key)
    if sinks is not None:
        sinks = sinks.to(torch.promote_types(sinks.dtype, torch.float32))
    return q, k, v, alibi_slopes, sinks
