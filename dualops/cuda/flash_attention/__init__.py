"""flash_attention on the GPU: which kernel serves which problem, and the public functions.

naive.py                 not fused: scores, softmax and product are a kernel each
simt.py                  fused and tiled, on CUDA cores: any GPU, dtype and width
sm80                     tensor cores, products of one warp: 16-bit dtypes and their gradient
sm90                     Hopper's tensor cores, fed by TMA: 16-bit dtypes, float32 in three parts, and gradients
block_masks.py           the tiles of keys that a mask_mod shows to a tile of queries, and their transpose
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, Unpack, overload

from ...spec import flash_attention as SPEC, flash_attention_varlen as SPEC_VARLEN
from ...spec.attention import (
    BlockMask,
    Keywords,
    KeywordsVarlen,
    OptionKeywords,
    OptionKeywordsVarlen,
    as_they_are,
    lists_of,
)
from ..launch.operation import Operation
from ..public import Array, Launch, calls
from ..unowned import with_steps
from . import naive, simt, sm80, sm90
from .arguments import unowned
from .block_masks import block_mask as block_mask
from .key_ranges import with_key_ranges
from .sm90 import backward as sm90_backward, float32 as sm90_float32


class _Options(OptionKeywords[Array], Launch, Generic[Array], total=False):
    """Options that do not change the type of the result."""


class _OptionsVarlen(OptionKeywordsVarlen[Array], Launch, Generic[Array], total=False):
    """`_Options`, for sequences of different lengths."""


@overload
def flash_attention(
    q: Array, k: Array, v: Array, *, return_lse: Literal[False] = False, **options: Unpack[_Options[Array]]
) -> Array: ...


@overload
def flash_attention(
    q: Array, k: Array, v: Array, *, return_lse: Literal[True], **options: Unpack[_Options[Array]]
) -> tuple[Array, Array]: ...


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    key_padding_mask: Any = None,
    score_mod: Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    return_lse: bool = False,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """softmax(scale * q @ k.T + mask) @ v without ever holding the scores; Dao 2023, arXiv:2307.08691.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]: device arrays of one library and dtype (float64, float32,
    float16, bfloat16), any strides with a contiguous last axis, H a multiple of Hkv, D and Dv up to 512. The position
    of query i is i + Sk - Sq; with causal="top_left" it is i. Options are applied to a score in this order:

    scale: of q @ k.T, 1 / sqrt(D) if None
    softcap: scores become softcap * tanh(score / softcap)
    score_mod: (score, b, h, i, j) -> score, a function of numbers that Numba can compile; or a pair of it and its
        derivative by the score. Without one, the derivative is generated from the source
    bias: added; q's dtype, any shape that broadcasts to [B, H, Sq, Sk]
    alibi_slopes [H]: - slope * |position - j| is added; float32 (float64 for float64) or q's dtype
    causal: key j is seen up to the query's position
    window (left, right): key j is seen from position - left to position + right; None is unbounded
    key_padding_mask [B, Sk] of bool: True keeps a key
    mask_mod: (b, h, i, j) -> whether query i sees key j
    block_mask: the result of `block_mask(mask_mod, ...)` for this number of queries and keys, or its `lists`, of which
        only the shape is checked. It does not change results. On sm90, if Sq is above 64, tiles of 128 keys that none
        of 128 queries sees are neither loaded nor multiplied, and mask_mod is evaluated only in partly visible tiles.
        The gradient does the same for any Sq. Elsewhere mask_mod is evaluated for all pairs
    sinks [H]: one more logit in the softmax, without a value; dtypes as alibi_slopes
    dropout_p, seed: probabilities become 0, or are divided by 1 - dropout_p, which is rounded to a multiple of 2**-15.
        seed is an integer of 64 bits, or an int64 array without axes on the device (for CUDA graphs). All rungs and the
        reference draw the same mask

    score_mod and mask_mod read values from outside at this call: variables, globals, arrays, attributes of modules and
    objects, and functions that they call. The values become part of the kernel: other values need another kernel, which
    takes seconds to compile. An unchanged function is recognised in microseconds; its arrays are compared with their
    previous values.

    Returns o [B, H, Sq, Dv] in q's dtype and axis order; with return_lse also lse [B, H, Sq], natural logarithm,
    float32 (float64 for float64), including the sink. A query that sees no key, or only scores of -inf, gives 0 and
    -inf (or the sink). NaN in a hidden key or value does not reach the query, nor does it if the key's score is -inf. A
    row with a score of NaN or +inf is NaN. Its gradient sets dk and dv to NaN for all keys that it sees, even if a
    score is -inf. Keys that a mask hides are not affected. Results are bit-equal from run to run.

    Which rung serves a call, as `dualops.cuda.plan` shows:

    sm90, on Hopper, serves 16-bit dtypes and D to 256, if scale is above 0 and rows of q, k and v lie at multiples of
    16 bytes. It computes the scores once for every 256 columns of v, or for every 128 with a bias or dropout, or if Sq
    is at most 64. Then it splits the keys among blocks, in up to 64 parts that depend on Sk alone, and merges the
    results in order; heads of a group read their keys once.

    sm90 also serves float32, with float32's error, if Sq is above 64 and D and Dv are at most 128, with any strides. It
    splits each number in three parts of bfloat16, which a first launch writes. Heads wider than 64 exclude five options
    and more, one of them a bias or dropout.

    sm80, from Ampere on, serves other calls of 16-bit dtypes: D and Dv to 256, scale above 0; with Dv above 128 no
    bias, and one option that takes registers.

    simt serves all other calls; naive those for which simt has too little shared memory (float64 with the widest heads
    outside data centres).

    On tensor cores, a row that is NaN or infinite under a mask, although its lse is finite, is recomputed without them,
    which is slow: if v has a NaN that queries see, all those rows. Memory in addition to the results: sm90 needs a
    counter of 8 bytes for masked, split or varlen keys, and for each part B * H * Sq * (Dv + 1) floats; for float32 6
    bytes for each number of q, k and v, with rows padded to multiples of 64; sm80 and simt need none; naive B * H * Sq
    * Sk scores.

    out: an array for o, or (o, lse), sharing no memory with the inputs. kernel: a rung instead of the best. stream: a
    stream object or handle instead of the library's current one.
    Raises TypeError and ValueError for a wrong call, NotImplementedError if this device or rung can't serve it. No
    gradient is recorded.
    """
    score_mod, mask_mod = as_they_are(score_mod, mask_mod)
    if block_mask is not None:
        block_mask = lists_of("flash_attention", block_mask, mask_mod, q, k)
    arrays = (q, k, v, bias, alibi_slopes, key_padding_mask, block_mask, sinks, seed)
    params = (scale, softcap, score_mod, causal, window, mask_mod, dropout_p, return_lse)
    return forward(arrays, params, out, kernel, stream)


def _backward_as_they_are(score_mod: Any, mask_mod: Any, block_mask: Any) -> tuple[Any, Any, Any]:
    score_mod, mask_mod = as_they_are(score_mod, mask_mod)
    return score_mod, mask_mod, lists_of("flash_attention_backward", block_mask, mask_mod)


@calls("backward", SPEC, backward=True, settled=_backward_as_they_are)
def flash_attention_backward(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    do: Array,
    dlse: Array | None = None,
    *,
    bias_gradient: bool = True,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
    **options: Unpack[Keywords[Array]],
) -> tuple[Array, ...]:
    """The gradient of `flash_attention`, from its inputs, o, lse, and do [B, H, Sq, Dv].

    dlse [B, H, Sq]: the gradient of lse, if lse was used. bias_gradient: whether to compute dbias. options: those of
    `flash_attention`, unchanged, including the values that score_mod and mask_mod read. Returns dq, dk, dv, then dbias
    (the bias's shape) if there is a bias and its gradient is wanted, then dsinks [H] if there are sinks, each in the
    dtype of its input. Bit-equal from run to run: each sum has one order. On Hopper the rung sm90 computes dq, dk and
    dv of 16-bit dtypes, D and Dv to 256, if scale is above 0 and rows of q, k, v and do lie at multiples of 16 bytes.
    Heads wider than 128 exclude five options and more, one of them a bias or dropout. It computes those of float32
    under forward's conditions, if Sk is above 64 too; and dbias of 16-bit dtypes. simt computes dbias of float32, and
    dsinks. A row of dq, dk or dv that is NaN or infinite is recomputed without tensor cores, which is slow: after an
    overflow, all rows. From Ampere on, the rung sm80 serves other calls of 16-bit dtypes, D and Dv to 128, of the same
    scales, with up to four options that take registers, or one if D + Dv is above 192; it recomputes rows, too. simt
    serves all other calls. Memory in addition to the results: simt, sm80 and sm90 need delta, as large as lse, and sm90
    a counter of 8 bytes. If one kernel of sm90 computes everything (see `plan`), dq in float32 and 8 bytes for each
    tile of 64 queries. For float32 sm90 needs 6 bytes for each number of q, k, v and do; for a block mask 4 bytes for
    128 * 128 pairs of each head, or of each group if all heads have the same mask; and parts of dbias in float32 for a
    bias that has one row, or is much smaller than the scores. naive needs twice B * H * Sq * Sk scores. out: arrays for
    all results. kernel, stream and errors as for `flash_attention`.
    """
    raise NotImplementedError  # `calls` replaces it


@overload
def flash_attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_OptionsVarlen[Array]],
) -> Array: ...


@overload
def flash_attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[_OptionsVarlen[Array]],
) -> tuple[Array, Array]: ...


@calls("forward_varlen", SPEC_VARLEN, settled=as_they_are)
def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
    **options: Unpack[KeywordsVarlen[Any]],
) -> Any:
    """`flash_attention` of B sequences whose tokens follow one another, without padding and without waiting.

    q [total_q, H, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv]. Sequence b has queries cu_seqlens_q[b] to
    cu_seqlens_q[b + 1] and keys cu_seqlens_k[b] to cu_seqlens_k[b + 1]; cu_seqlens [B + 1] of int32 begin at 0 and
    are nondecreasing. max_seqlen_q and max_seqlen_k are the lengths of the longest sequences, or more. Tokens after
    the last sequence belong to none: there o is 0, lse -inf and every gradient 0, whatever do and dlse are.
    In place of cu_seqlens_k, k_starts and k_lengths [B] of int32 say where keys are: sequence b has the keys
    k_starts[b] to k_starts[b] + k_lengths[b]. Such ranges may overlap, repeat, leave gaps, be empty and come in any
    order; k and v are not copied.
    Values on a GPU are not checked: a wrong one of cu_seqlens, k_starts or k_lengths reads and writes beyond its
    sequence, and a query beyond max_seqlen_q is left out.
    options are those of `flash_attention`; their b counts sequences, and i and j count within a sequence.
    A max_seqlen of None means the number of tokens: the same result, maybe later. float32 uses sm90 for any number of
    queries and keys.
    Returns o [total_q, H, Dv]; with return_lse also lse [H, total_q].
    """


@calls("backward_varlen", SPEC_VARLEN, backward=True, settled=as_they_are)
def flash_attention_varlen_backward(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    do: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    dlse: Array | None = None,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
    **options: Unpack[KeywordsVarlen[Array]],
) -> tuple[Array, ...]:
    """The gradient of `flash_attention_varlen`: dq, dk, dv as q, k, v, then dsinks [H] if there are sinks.

    Arguments are those of `flash_attention_backward` and `flash_attention_varlen`; dlse is like lse, [H, total_q]. With
    k_starts and k_lengths, dk and dv of a key are sums over the sequences that have it, in float32 and in the order of
    b. Then each sequence's own dk and dv take memory: total_k_lengths rows of Hkv * (D + Dv) numbers of q's dtype.
    """
    raise NotImplementedError  # `calls` replaces it


FORWARD = (
    sm90.forward_choices,
    sm90_float32.forward_choices,
    sm80.forward_choices,
    simt.forward_choices,
    naive.forward_choices,
)
BACKWARD = (
    sm90_backward.backward_choices,
    sm90_float32.backward_choices,
    sm80.backward_choices,
    simt.backward_choices,
    naive.backward_choices,
)
forward = Operation(SPEC, rungs=FORWARD)
backward = Operation(SPEC, rungs=BACKWARD, backward=True)
FORWARD_VARLEN, BACKWARD_VARLEN = (
    [with_steps(with_key_ranges(rung), unowned) for rung in rungs] for rungs in (FORWARD, BACKWARD)
)
forward_varlen = Operation(SPEC_VARLEN, rungs=FORWARD_VARLEN)
backward_varlen = Operation(SPEC_VARLEN, rungs=BACKWARD_VARLEN, backward=True)
