"""Attention over documents whose tokens are split among the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

from torch import Tensor

from ..compiled import past_compilation
from ..flash_attention import flash_attention_varlen
from .agreement import agreed_layout, refused
from .attention import ContextParallel
from .call import OP, checked
from .ranks import Ranks


class Options(TypedDict, total=False):
    """Options of `flash_attention_varlen` that `context_parallel` takes."""

    scale: float | None
    window: tuple[int | None, int | None] | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


@overload
def context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    cu_seqlens: Any = None,
    balance: str = "head_tail",
    gather_heads: int | None = None,
    causal: bool | str = True,
    reduce_sinks: bool = True,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    cu_seqlens: Any = None,
    balance: str = "head_tail",
    gather_heads: int | None = None,
    causal: bool | str = True,
    reduce_sinks: bool = True,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


def context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    cu_seqlens: Any = None,
    balance: str = "head_tail",
    gather_heads: int | None = None,
    causal: bool | str = True,
    reduce_sinks: bool = True,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention over documents whose tokens are split among the ranks of a group: each rank computes its queries.

    q [tokens, H, D], k [tokens, Hkv, D], v [tokens, Hkv, Dv]: this rank's tokens, as `shard` returns them. All ranks
    of the group make the same call, and the same calls of backward.

    group: a ProcessGroup, or a DeviceMesh of one axis
    cu_seqlens: where each document begins among all tokens, and the end, the same on all ranks: a list or a tensor on
        the CPU. A tensor on a GPU is read once, which waits for the GPU. None: one document; every call then waits for
        the other ranks to know its length. cu_seqlens=[0, length] avoids that
    balance: "head_tail" or "contiguous", see `shard`
    gather_heads: the number of heads whose K and V of all ranks are gathered at a time. The next are sent while
        attention works on the current ones. None: a quarter of the heads, or all if these are at most 1 GiB
    causal: key j of a document is seen by its queries from j on. "top_left" is the same, since a document has as many
        queries as keys. False: all keys of the document
    reduce_sinks: whether the gradient of sinks is summed over the ranks here, as those of k and v are. False returns
        each rank's own part, for a parameter whose gradients FSDP or DDP sums over the same ranks
    scale, window, softcap, alibi_slopes [H], sinks [H], return_lse: as in `flash_attention_varlen`. With causal=False
        alibi_slopes and window are not implemented, except for window=(left, 0)

    Returns o [tokens, H, Dv], with return_lse also lse [H, tokens]. A group of one makes the plain call of
    `flash_attention_varlen`. Otherwise an all-to-all sends each rank the K and V that its queries see: those of a
    document up to its last query there, or from where a window begins (rounded down to a tile's multiple). Each piece
    of a document on a rank is a sequence whose keys are a range of them, up to the end of the piece. So forward has the
    bits of one process for any number of ranks, and windows, ALiBi, softcap and sinks are exact.

    Differentiable once, by q, k, v and sinks. Backward gathers K and V again, and each rank computes its queries' part
    of dk and dv for the keys that they see, in k's dtype. An all-to-all sends these parts to the ranks that own the
    keys. They add the parts in float32 (float64 for float64), first their own, then the others in the order of the
    ranks: gradients have the same bits in every run. Parts of 16 bits are rounded before they are sent. The gradient of
    sinks is added in the order of the ranks; sinks of 16 bits are read as float32.

    With P ranks, T tokens that this rank's queries see and rows of G * (D + Dv) numbers of k's dtype, where G is
    gather_heads:
      - forward needs memory for 2 * T rows, with all heads at once for T, for the rows that it receives, and for those
        that it sends, once for each rank that reads them. With "contiguous" received rows need no memory of their own:
        they arrive in order
      - backward needs twice that memory, including the gradients, and the memory for parts of key ranges
        (`flash_attention_varlen`). It receives about twice as much as forward.
    Each call first exchanges a few integers. If arguments differ, or a rank refuses its own, every rank raises an
    error. On a GPU the first call with such arguments and documents waits for the device; later calls compare on the
    device. If only one rank has new arguments in a later call, a CUDA assertion fails on the others.

    CPU tensors need a group with gloo, and CUDA tensors one with NCCL. Works under autocast and torch.utils.checkpoint;
    torch.compile makes a graph break. Raises TypeError and ValueError for a wrong call, NotImplementedError for an
    option that can't be sharded: dropout, score_mod, mask_mod, bias and masks.
    """
    options = {"causal": causal, "reduce_sinks": reduce_sinks, "return_lse": return_lse, **options}
    return attend(group, q, k, v, cu_seqlens, balance, gather_heads, options)


@past_compilation
def attend(
    group: Any,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any,
    balance: Any,
    gather_heads: Any,
    options: Mapping[str, Any],
    refusal: Exception | None = None,
) -> Any:
    """`context_parallel`; refusal: the error that the caller found on this rank, to be raised on all."""
    ranks, call = Ranks.of(OP, group), None
    try:
        if refusal is None:
            call = checked(ranks, q, k, v, cu_seqlens, balance, gather_heads, options)
    except Exception as error:  # any error: the others must not wait for this rank
        refusal = error
    if call is None:
        raise refused(OP, ranks, refusal)
    layout = agreed_layout(OP, ranks, call.ends, call.balance, len(call.q), call.same())
    if ranks.size == 1:
        cu, longest = layout.whole(call.q.device)
        more: dict[str, Any] = {"alibi_slopes": call.alibi_slopes, "sinks": call.sinks, "return_lse": call.return_lse}
        tensors = call.q, call.k, call.v
        return flash_attention_varlen(*tensors, cu, cu, longest, longest, **more, **call.params)
    found = ContextParallel.apply(*call[:5], ranks, layout, call)
    return found if call.return_lse else found[0]
