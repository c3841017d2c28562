"""Attention for torch tensors. Semantics: `dualops.spec.flash_attention`; integration with torch: `interop`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from .. import reference
from ..spec import flash_attention as SPEC, flash_attention_varlen as SPEC_VARLEN
from ..spec.attention import BlockMask, OptionKeywords, OptionKeywordsVarlen, UserFunction, as_they_are, lists_of
from ..spec.attention.blocks import kept
from ..spec.domains import finite, shown
from ..spec.meta import number_meta
from .arguments import longest_or_all
from .interop import register
from .recomputed import note
from .schema import remember

Function = Callable[..., Any]

_KINDS = {"scale": "float?", "softcap": "float?"} | dict.fromkeys(("score_mod", "causal", "window", "mask_mod"), "text")
_LENGTHS = {"max_seqlen_q": "SymInt", "max_seqlen_k": "SymInt", "total_k_lengths": "SymInt?"}
_LSE = {"return_lse": True}  # backward needs it

_operator = register(
    SPEC, reference.flash_attention, reference.flash_attention_backward, kinds=_KINDS, fixed=_LSE, autocast="lower"
)
_operator_varlen = register(
    SPEC_VARLEN,
    reference.flash_attention_varlen,
    reference.flash_attention_varlen_backward,
    kinds=_KINDS | _LENGTHS,
    fixed=_LSE,
    autocast="lower",
)


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[OptionKeywords[Tensor]]
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[OptionKeywords[Tensor]]
) -> tuple[Tensor, Tensor]: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    score_mod: Function | tuple[Function, Function] | None = None,
    mask_mod: Function | None = None,
    block_mask: BlockMask | Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention: softmax(scale * q @ k.T + mask) @ v. Dao 2023, arXiv:2307.08691.

    o and lse are differentiable once, with respect to q, k, v, bias and sinks.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] of one dtype (float64, float32, float16, bfloat16) on a CUDA
    device or the CPU, any strides with a contiguous last axis, H a multiple of Hkv, D and Dv at most 512. The position
    of query i is i + Sk - Sq; with causal="top_left" it is i, as in torch's scaled_dot_product_attention.

    scale: of q @ k.T, 1 / sqrt(D) if None
    softcap: scores become softcap * tanh(score / softcap)
    score_mod: (score, b, h, i, j) -> score, a function of numbers; or a pair of it and its derivative by the score
    bias: added; q's dtype, any shape that broadcasts to [B, H, Sq, Sk]
    alibi_slopes [H]: - slope * |position - j| is added; no gradient
    causal: key j is seen up to the query's position
    window (left, right): key j is seen from position - left to position + right; None is unbounded
    key_padding_mask [B, Sk] of bool: True keeps a key
    mask_mod: (b, h, i, j) -> whether query i sees key j
    block_mask: the result of `block_mask(mask_mod, ...)`, or its `lists`: hidden tiles are skipped
    sinks [H]: one more logit in the softmax, without a value
    dropout_p, seed: probabilities become 0 or are divided by 1 - dropout_p, which is rounded to a multiple of 2**-15;
        backward draws the same ones

    sinks and alibi_slopes are of q's dtype, or float32 (float64 for float64). seed is an integer of 64 bits or an int64
    tensor without axes. A tensor on the CPU acts as an integer. The kernel reads a tensor on q's device, so a captured
    CUDA graph can be replayed with another seed. None draws a seed on q's device from torch's generator, and
    torch.manual_seed repeats it. Compiled functions do the same; Inductor uses its own generator unless its
    fallback_random is set.

    Returns o [B, H, Sq, Dv] of q's dtype and order of axes in memory; with return_lse also lse [B, H, Sq]
    (float32, float64 for float64), the natural logarithm of the sum of exponentials. A query that sees no key, or only
    scores of -inf, gives o = 0 and lse = -inf (or the sink). A row with a score of NaN or +inf is NaN. Its gradient
    sets dk and dv to NaN for all keys that it sees, even if a score is -inf. Keys that a mask hides are not affected.
    Gradients are deterministic; the bias gradient is computed only if needed.
    Under autocast q, k, v and bias take autocast's dtype; sinks and alibi_slopes keep theirs or become float32.

    score_mod and mask_mod read values from outside at this call, for its gradient too: variables, globals, arrays,
    attributes of modules and objects, and functions. The values become part of the kernel: other values need another
    kernel. If they have changed when torch.utils.checkpoint repeats the call, backward raises RuntimeError.

    Works under torch.compile (fullgraph, dynamic B, H, Sq and Sk; a new seed needs no compilation, other new numbers
    do), torch.export and, outside torch.compile, torch.func.grad. score_mod and mask_mod work there, too: a graph has
    their name and a digest, and finds them in this process when it runs. If numbers or strings that they read change,
    or functions that they call, torch.compile compiles again. It can't see a change of an array or a NumPy number. The
    graph then raises RuntimeError until the old value is restored. torch 2.11 refuses arrays as default values. A
    function may be defined inside the compiled one. Then its enclosing variables must be constant to torch.compile, and
    a changed global raises RuntimeError. An exported program keeps the values of its export. In another process, call
    the same functions once before you run it.

    CUDA tensors run on torch's current stream. CPU tensors use the NumPy reference, which is slow.

    Raises TypeError and ValueError for a wrong call. Raises NotImplementedError for vmap, for a gradient of the
    gradient or of alibi_slopes, and for a call that the device does not support.

    >>> import torch
    >>> q = k = torch.zeros(1, 1, 2, 4)
    >>> flash_attention(q, k, torch.tensor([[[[1.0], [3.0]]]]), causal=True)
    tensor([[[[1.],
              [2.]]]])
    """
    score_mod, mask_mod = _at_call(score_mod, mask_mod)
    drawn = _seed(SPEC.name, q, dropout_p, seed)
    lists = None if block_mask is None else lists_of(SPEC.name, block_mask, mask_mod, q, k)
    arrays = (q, k, v, bias, alibi_slopes, key_padding_mask, lists, sinks, drawn)
    results = _operator(*arrays, scale, softcap, score_mod, causal, window, mask_mod, dropout_p)
    return _wanted(SPEC.name, results, return_lse)


def block_mask(mask_mod: Function, B: int | None, H: int | None, Sq: int, Sk: int, *, like: Tensor) -> BlockMask:
    """Build the block mask of a mask_mod for `flash_attention`.

    The mask says which tiles of 128 x 128 (query, key) are hidden, partly visible or fully visible.

    mask_mod: (b, h, i, j) -> whether query i sees key j. B, H: the number of batches and heads with different masks;
    None or 1 if the mask is the same for all, and mask_mod is then called with index 0. Sq, Sk: the number of queries
    and keys. like: a tensor (q); the mask is built on its device. Masks are reused: a call with an equal function and
    the same sizes, device and stream returns the same BlockMask, as long as it is alive. Make it outside of
    torch.compile. Inside, `flash_attention` may use it, without a check that mask_mod is the mask's function.
    Raises TypeError and ValueError for a wrong call.
    """
    if not isinstance(like, Tensor):
        raise TypeError(f"block_mask: like is a {type(like).__name__}, expected a torch.Tensor")
    if like.is_cuda:
        return import_module("dualops.cuda").block_mask(mask_mod, B, H, Sq, Sk, like=like.detach())
    made = reference.block_mask(mask_mod, B, H, Sq, Sk)
    sizes = (made.B, made.H, made.Sq, made.Sk)
    return kept(made.mask_mod, sizes, str(like.device), lambda: torch.from_numpy(made.lists.copy()).to(like.device))


@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionKeywordsVarlen[Tensor]],
) -> Tensor: ...


@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[OptionKeywordsVarlen[Tensor]],
) -> tuple[Tensor, Tensor]: ...


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: Function | tuple[Function, Function] | None = None,
    mask_mod: Function | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    k_starts: Tensor | None = None,
    k_lengths: Tensor | None = None,
    total_k_lengths: int | None = None,
) -> Any:
    """`flash_attention` of B sequences of different lengths, packed without padding.

    q [total_q, H, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv]. Sequence b has queries cu_seqlens_q[b] to
    cu_seqlens_q[b + 1] and keys cu_seqlens_k[b] to cu_seqlens_k[b + 1]. cu_seqlens [B + 1] of int32 begin at 0 and are
    nondecreasing. max_seqlen_q and max_seqlen_k are the lengths of the longest sequences, or more. Tokens after the
    last sequence belong to none: their o is 0, their lse -inf and their gradients 0. In options b counts the sequences,
    and i and j the tokens within a sequence. The other arguments are those of `flash_attention`, whose docstring
    applies here too.

    k_starts, k_lengths [B] of int32, in place of cu_seqlens_k: sequence b has the keys k_starts[b] to k_starts[b] +
        k_lengths[b]. Ranges may overlap, repeat, leave gaps, be empty and come in any order. So pieces of a document
        read their part of k without a copy, and sequences share a prefix. max_seqlen_k is the longest length, or more
    total_k_lengths: the sum of k_lengths, or more; B * max_seqlen_k if None. The gradient on a CUDA device needs memory
        for this many rows of Hkv * (D + Dv) numbers of q's dtype: the parts of dk and dv, which it adds in float32

    On a CUDA device the values of cu_seqlens, k_starts and k_lengths are not checked: that would wait for the device.
    A max_seqlen of None means the number of all tokens: the same result, maybe later.
    Returns o [total_q, H, Dv]; with return_lse also lse [H, total_q]. A compiled function is compiled once for all
    lengths and values of max_seqlen.
    """
    score_mod, mask_mod = _at_call(score_mod, mask_mod)
    drawn = _seed(SPEC_VARLEN.name, q, dropout_p, seed)
    arrays = (q, k, v, cu_seqlens_q, cu_seqlens_k, k_starts, k_lengths, alibi_slopes, sinks, drawn)
    lengths = longest_or_all(max_seqlen_q, q), longest_or_all(max_seqlen_k, k), total_k_lengths
    results = _operator_varlen(*arrays, *lengths, scale, softcap, score_mod, causal, window, mask_mod, dropout_p)
    return _wanted(SPEC_VARLEN.name, results, return_lse)


def _at_call(score_mod: Any, mask_mod: Any) -> tuple[Any, Any]:
    """Return both as UserFunctions with the current values of the variables that they read, for forward and backward.

    While torch.compile traces, both are returned unchanged: `compiled` handles them.
    """
    if (score_mod is None and mask_mod is None) or torch.compiler.is_dynamo_compiling():
        return score_mod, mask_mod
    functions = as_they_are(score_mod, mask_mod)
    for function in functions:
        if isinstance(function, UserFunction):
            note(function)
            remember(repr(function), function)
    return functions


def _seed(op: str, q: Any, dropout_p: Any, seed: Any) -> Any:
    """Return the seed as a tensor without axes, on the CPU for a number; None without dropout and seed."""
    if isinstance(seed, Tensor):
        return seed
    if seed is None:
        if not _drops(dropout_p) or not isinstance(q, Tensor):
            return None
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device=q.device)
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        seed = number_meta(seed, op, "seed").pointer  # or raise the spec's error
    return torch.full((), seed, dtype=torch.int64, device="cpu")


def _drops(dropout_p: Any) -> bool:
    """Whether a seed is needed. False for an invalid probability, which raises the spec's error later."""
    if isinstance(dropout_p, float):
        return bool(dropout_p)
    try:
        return bool(finite(dropout_p))
    except (TypeError, ValueError):
        return False


def _wanted(op: str, results: tuple[Tensor, Tensor], return_lse: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Return both results, or o."""
    if not isinstance(return_lse, bool):
        raise TypeError(f"{op}: return_lse is {shown(return_lse)}, expected True or False")
    return results if return_lse else results[0]
