"""flash_attention on the GPU: which kernel serves which problem, and the public functions.

naive.py                 not fused: scores, softmax and product are a kernel each
simt.py                  fused and tiled, on CUDA cores: any GPU, dtype and width
sm80                     tensor cores, products of one warp: 16-bit dtypes and their gradient, float32 in two parts
sm90                     Hopper's tensor cores, fed by TMA: 16-bit dtypes, float32 in three parts, and gradients
block_masks.py           the tiles of keys that a mask_mod shows to a tile of queries
block_mask_transpose.py  the tiles of queries that see a tile of keys, for dk and dv
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
from .sm80 import backward as sm80_backward
from .sm90 import backward as sm90_backward, float32 as sm90_float32


class _Options(OptionKeywords[Array], Launch, Generic[Array], total=False):
    """What does not change what is returned."""


class _OptionsVarlen(OptionKeywordsVarlen[Array], Launch, Generic[Array], total=False):
    """The same of sequences of different lengths."""


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
    of query i is i + Sk - Sq; with causal="top_left" it is i. What happens to a score, in this order:

    scale: of q @ k.T, 1 / sqrt(D) if None
    softcap: scores become softcap * tanh(score / softcap)
    score_mod: (score, b, h, i, j) -> score, a function of numbers that Numba can compile; or a pair of it and its
        derivative by the score. The derivative is made from the source where none is given
    bias: added; q's dtype, any shape that broadcasts to [B, H, Sq, Sk]
    alibi_slopes [H]: - slope * |position - j| is added; float32 (float64 for float64) or q's dtype
    causal: key j is seen up to the query's position
    window (left, right): key j is seen from position - left to position + right; None is unbounded
    key_padding_mask [B, Sk] of bool: True keeps a key
    mask_mod: (b, h, i, j) -> whether query i sees key j
    block_mask: what `block_mask(mask_mod, ...)` made of it for so many queries and keys; or the `lists` of one, of
        which nothing but the shape is checked. Results are those without it. On sm90, where Sq is above 64, tiles of
        128 keys that no query of 128 sees are neither loaded nor multiplied, and mask_mod is asked in tiles alone that
        it cuts, and so in the gradient, of any Sq; elsewhere it is asked everywhere
    sinks [H]: one more logit in the softmax, without a value; dtypes as alibi_slopes
    dropout_p, seed: probabilities become 0, or are divided by 1 - dropout_p, which is rounded to a multiple of 2**-15.
        seed is an integer of 64 bits, or an int64 array without axes on the device (for CUDA graphs); the mask is that
        of every rung and of the reference

    What score_mod and mask_mod read from outside counts as it is at this call: variables, globals, arrays, attributes
    of modules and objects, functions that they call. It becomes part of the kernel: other values need another, which
    takes seconds to compile. A function of which nothing has changed is recognised in microseconds; its arrays are
    compared with what they were.

    Returns o [B, H, Sq, Dv] in q's dtype and axis order; with return_lse also lse [B, H, Sq], natural logarithm,
    float32 (float64 for float64), the sink's part included. A query that sees no key gives 0 and -inf (or the sink);
    so does one whose scores are all -inf. NaN in a key or value that it does not see does not reach it, nor where the
    key's score is -inf. A row with a score of NaN or +inf is NaN; its gradient makes NaN of dk and dv of all keys that
    it sees, also where a score is -inf, and of none that a mask hides. Bit-equal from run to run.

    Which rung a call takes, as `dualops.cuda.plan` says:

    sm90, on Hopper, serves 16-bit dtypes and D to 256, where scale is above 0 and rows of q, k and v lie at multiples
    of 16 bytes. It makes the scores once for every 256 columns of v, or every 128 with a bias or dropout and where Sq
    is up to 64. There it splits the keys among blocks, in up to 64 parts, as many as Sk alone says, and merges in their
    order what they find; heads of a group then read their keys once.

    sm90 serves float32 too, with float32's error, where Sq is above 64 and D and Dv are to 128, of any strides: as
    three parts of bfloat16 each, which a pass writes first; of heads wider than 64 not with five options and more, one
    of them a bias or dropout.

    sm80, from Ampere on, serves what is left of 16-bit dtypes, and by its name float32, as two parts of tf32 each, with
    float32's error: D and Dv to 256 (Dv of float32: 192), scale above 0, beside Dv above 128 no bias and one option
    that costs registers.

    simt serves all else; naive where shared memory is too small for that (float64 with the widest heads outside data
    centres).

    On tensor cores a row that comes out NaN or infinite under a mask, though its lse is finite, is made again without
    them, which is slow: where v has a NaN that queries see, all those rows. Memory beside the results: of sm90 a
    counter of 8 bytes where keys are masked, split or varlen, and for each part B * H * Sq * (Dv + 1) floats; of
    float32 6 bytes for each number of q, k and v, whose rows count as whole 64s; of sm80 and simt none; of naive
    B * H * Sq * Sk scores.

    out: an array for o, or (o, lse), sharing no memory with the inputs. kernel: a rung instead of the best. stream: a
    stream object or handle instead of the library's current one.
    Raises TypeError and ValueError for a wrong call, NotImplementedError where this device or rung can't do it. No
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
    """The gradient of `flash_attention`, from what it took, o and lse as it gave them, and do [B, H, Sq, Dv].

    dlse [B, H, Sq]: the gradient of lse, where it was used. bias_gradient: whether dbias is wanted. options are those
    of `flash_attention`, and must be what they were: variables of score_mod and mask_mod, which count as they are at
    this call, as much as the rest.
    Returns dq, dk, dv, then dbias (the bias's shape) if there is a bias and its gradient is wanted, then dsinks [H] if
    there are sinks, each in the dtype of its input. Bit-equal from run to run: each sum has one order.
    On Hopper the rung sm90 makes dq, dk and dv of 16-bit dtypes, D and Dv to 256, where scale is above 0 and rows of q,
    k, v and do lie at multiples of 16 bytes, but of heads wider than 128 with five options and more, one of them a bias
    or dropout; and of float32, as forward does, where Sk is above 64 too. It makes dbias of 16-bit dtypes too; that of
    float32, and dsinks, are simt's. A row of dq, dk or dv that comes out NaN or infinite is made
    again without tensor cores, which is slow: after an overflow, all rows. On GPUs from Ampere on the rung sm80 makes
    them of what is left of 16-bit dtypes, D and Dv to 128, of the same scales, with up to four options that cost
    registers, where D + Dv is above 192 with one; there too rows are made again. Elsewhere simt serves.
    Beside its results simt needs delta, as large as lse, and so do sm80 and sm90, this with a counter of 8 bytes; where
    one kernel of sm90 makes it all, dq in float32 and 8 bytes a tile of 64 queries (`plan` says it). sm90 needs of
    float32 6 bytes for each number of q, k, v and do, of a block mask 4 bytes for 128 * 128 pairs of each head that has
    its own, or of a group's where all have one, and of a bias that has one row, or is small beside what it was added
    to, parts of dbias in float32; naive twice B * H * Sq * Sk scores.
    out: arrays for all results. kernel, stream and errors as for `flash_attention`.
    """
    raise NotImplementedError  # `calls` makes it


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
    """`flash_attention` of B sequences whose tokens lie one after another, without padding and without waiting.

    q [total_q, H, D], k [total_k, Hkv, D], v [total_k, Hkv, Dv]. Sequence b has queries cu_seqlens_q[b] to
    cu_seqlens_q[b + 1] and keys cu_seqlens_k[b] to cu_seqlens_k[b + 1]; cu_seqlens [B + 1] of int32 begin at 0 and
    never fall; max_seqlen_q and max_seqlen_k are the lengths of the longest, or more. Tokens behind the last sequence
    belong to none: there o is 0, lse -inf and every gradient 0, whatever do and dlse are.
    In place of cu_seqlens_k, k_starts and k_lengths [B] of int32 say where keys are: sequence b has the keys
    k_starts[b] to k_starts[b] + k_lengths[b]. Such ranges may overlap, repeat, leave gaps, be empty and come in any
    order; k and v are not copied.
    Values on a GPU are not looked at: a wrong one of cu_seqlens, k_starts or k_lengths reads and writes beyond its
    sequence, a query beyond max_seqlen_q is left out.
    options are those of `flash_attention`; their b, i and j count the sequences, and places in a sequence.
    A max_seqlen of None is as many as there are tokens: the same result, maybe later. float32 goes by sm90 however few
    queries and keys there are.
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

    Arguments as `flash_attention_backward` and `flash_attention_varlen` have them; dlse is as lse, [H, total_q].
    With k_starts and k_lengths dk and dv of a key are sums over the sequences that have it, in float32 and in the order
    of b. Each sequence's own dk and dv take memory then: total_k_lengths rows of Hkv * (D + Dv) numbers of q's dtype.
    """
    raise NotImplementedError  # `calls` makes it


FORWARD = (
    sm90.forward_choices,
    sm90_float32.forward_choices,
    sm80.forward_choices,
    simt.forward_choices,
    sm80.float32_choices,
    naive.forward_choices,
)
BACKWARD = (
    sm90_backward.backward_choices,
    sm90_float32.backward_choices,
    sm80_backward.backward_choices,
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
