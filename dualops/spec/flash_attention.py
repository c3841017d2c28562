"""The spec of flash_attention(q, k, v). Dao et al. 2022 (arXiv:2205.14135), Dao 2023 (arXiv:2307.08691).

Query i of Sq stands at position i + Sk - Sq among the keys, or at position i with `causal="top_left"` (torch's way);
causal, window and ALiBi count from there. The order is: scale * q @ k.T; the options, each a record in `attention/`; a
softmax; dropout of its probabilities; the product with v.

A query sees the keys that no mask (causal, window, key_padding_mask, mask_mod, the ends of a sequence) hides. A score
of -inf, as a bias of -inf gives, is no mask: its key is seen, with probability 0. The first two rules below match
torch's math backend (`SDPBackend.MATH`). The others differ where torch multiplies NaN by 0:

- A row that sees no key, or only scores of -inf, gives o = 0, lse = -inf (with a sink: the sink) and gradients of 0.
- A row with a score of NaN or +inf is NaN: its o, lse and dq, and dk, dv and dbias of every key that the query sees,
  also of one whose own score is -inf.
- A row whose lse is a number ignores keys whose scores are -inf: a NaN in such a key or value does not reach the row,
  and a NaN in the row's do does not reach the key.
- A row ignores keys that a mask hides. A NaN in a key or value that no query sees stays there. A NaN row does not reach
  dk, dv and dbias of keys that the query does not see.
- A row whose scores are finite in float32 has a softmax, whatever their size. If the greatest score exceeds 2**20,
  gradients may treat scores as equal to it that float32 can't separate from it, since the saved lse is a float32.
- A token of varlen that belongs to no sequence, because cu_seqlens end before it, gives o = 0, lse = -inf (with a sink
  too) and gradients of 0. A key in no range has gradients of 0 too.

Key ranges: sequence b of varlen has the keys k_starts[b] to k_starts[b] + k_lengths[b]. Ranges may overlap, repeat,
leave gaps, be empty and come in any order. A key's dk and dv are sums over the sequences, in float32 and in the order
of b; each sequence's part is rounded to the storage dtype.

    P = exp(S - lse)                 S after the options, s0 = scale * q @ k.T before them
    dP = weight * (do @ v.T)         weight: 0 or 1 / (1 - dropout_p)
    dS = P * (dP - delta)            delta = rowsum(do * o) - dlse
    ds0 = dS * slope                 slope = dS / ds0 through softcap and score_mod
    dq = scale * ds0 @ k    dk = scale * ds0.T @ q    dv = (weight * P).T @ do
    dbias = dS, summed over the broadcast axes of the bias    dsinks = -sum(exp(sink - lse) * delta)
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np

from .attention import OPTIONS, OPTIONS_VARLEN, Option, band
from .attention.cases import CASES, CASES_VARLEN, generate
from .attention.draws import draw, draw_varlen, special
from .base import Cost, Input, Output, Param, Problem, Role, Spec
from .domains import boolean, finite, length_or_all, optional
from .lengths import LONGEST, check_ends, check_ranges, longest_in
from .meta import ArrayMeta, compute_dtype, itemsize

MAX_HEAD_DIM = 512
KEYS = ("cu_seqlens_k", "k_starts", "k_lengths")  # the arrays that place the keys of varlen


def measure(op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    H, Hkv, D = sizes["H"], sizes["Hkv"], sizes["D"]
    if H == 0 or Hkv == 0 or H % Hkv:
        raise ValueError(f"{op}: q has H={H}, k has Hkv={Hkv}, expected H to be a multiple of Hkv, neither of them 0")
    for name, axis in (("q", "D"), ("v", "Dv")):
        if not 1 <= sizes[axis] <= MAX_HEAD_DIM:
            raise ValueError(f"{op}: {name} has {axis}={sizes[axis]}, expected 1 to {MAX_HEAD_DIM}")
    if params["scale"] is None:
        params["scale"] = 1.0 / sqrt(D)
    for option in OPTIONS:
        option.check(op, arrays, params, sizes)
    return {"group": H // Hkv}


def measure_varlen(
    op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]
) -> dict[str, Any]:
    """Measure B sequences; Sq and Sk are the most tokens of one sequence, packed_k the number of all keys."""
    if sizes["B+1"] < 1:
        raise ValueError(f"{op}: cu_seqlens_q has no elements, expected B+1 of them")
    B = sizes["B+1"] - 1
    given = [name for name in KEYS if name in arrays]
    if given not in (["cu_seqlens_k"], ["k_starts", "k_lengths"]):
        names = " and ".join(given) if given else "nothing"
        raise TypeError(f"{op}: the keys are given by {names}, expected cu_seqlens_k alone, or k_starts and k_lengths")
    Sq, Sk = (longest_in(params, f"max_seqlen_{side}", sizes[f"total_{side}"]) for side in ("q", "k"))
    if "k_starts" in arrays:
        if sizes["B"] != B:
            raise ValueError(f"{op}: k_starts has B={sizes['B']}, cu_seqlens_q has B+1={sizes['B+1']}, expected B={B}")
        packed_k = longest_in(params, "total_k_lengths", B * Sk)
    else:
        if params["total_k_lengths"] is not None:
            raise ValueError(f"{op}: total_k_lengths is {params['total_k_lengths']}, expected None without k_lengths")
        packed_k = sizes["total_k"]
    longest = {"B": B, "Sq": Sq, "Sk": Sk, "packed_k": packed_k}
    return {**longest, **measure(op, arrays, params, sizes | longest)}


def check_lengths(op: str, arrays: Mapping[str, np.ndarray], problem: Problem) -> None:
    """Check that sequences and key ranges stay within the tokens and within max_seqlen."""
    for side in ("q", "k") if "cu_seqlens_k" in arrays else ("q",):
        tokens = (side, f"total_{side}", problem.dims[f"total_{side}"])
        longest = (f"max_seqlen_{side}", problem.params[f"max_seqlen_{side}"])
        check_ends(op, f"cu_seqlens_{side}", arrays[f"cu_seqlens_{side}"], tokens, longest)
    if "k_starts" in arrays:
        bounds = [(name, problem.params[name]) for name in ("max_seqlen_k", "total_k_lengths")]
        check_ranges(op, arrays["k_starts"], arrays["k_lengths"], problem.dims["total_k"], *bounds)


def visible_pairs(problem: Problem) -> int:
    """Count the pairs (query, key) that causal mask and window show, in one head of one batch."""
    Sq, Sk = problem.Sq, problem.Sk
    left, right = band(problem)
    position = np.arange(Sq) + (0 if problem.causal == "top_left" else Sk - Sq)
    seen = np.minimum(Sk, position + right + 1) - np.maximum(0, position - left)
    return int(np.maximum(seen, 0).sum())


def _scores_flops(problem: Problem) -> int:
    return 2 * problem.B * problem.H * visible_pairs(problem)


def _parts_bytes(problem: Problem) -> int:
    """Bytes of dk and dv of each sequence, if ranges may share keys."""
    p = problem
    return p.packed_k * p.Hkv * (p.D + p.Dv) * itemsize(p.dtype) if "k_starts" in p.arrays else 0


INPUT_NAMES = ("q", "k", "v", *(entry.name for option in OPTIONS for entry in option.inputs if not entry.host))
FORWARD_COST = Cost(
    flops=lambda p: _scores_flops(p) * (p.D + p.Dv),
    bytes_read=lambda p: p.nbytes(*INPUT_NAMES),
    bytes_written=lambda p: p.nbytes("o", "lse"),
)
BACKWARD_COST = Cost(
    flops=lambda p: _scores_flops(p) * (3 * p.D + 2 * p.Dv),
    bytes_read=lambda p: p.nbytes(*INPUT_NAMES, "o", "lse", "do", "dlse"),
    bytes_written=lambda p: p.nbytes("dq", "dk", "dv", "dbias", "dsinks"),
    extra_memory=lambda p: p.nbytes("lse") + _parts_bytes(p),  # delta, and dk and dv of each sequence
)


def _inputs(options: tuple[Option, ...]) -> tuple[Input, ...]:
    return tuple(entry for option in options for entry in option.inputs)


def _params(options: tuple[Option, ...]) -> tuple[Param, ...]:
    return (
        Param("scale", None, optional(finite), "factor of q @ k.T; None is 1 / sqrt(D)"),
        *(param for option in options for param in option.params),
        Param("return_lse", False, boolean, "also return the log of the sum of exponentials"),
    )


def _lengths(name: str, axis: str, **options: Any) -> Input:
    return Input(name, (axis,), ("int32",), role=Role.OTHER, **options)


def _gradient(name: str, **options: Any) -> Output:
    """The gradient of an input: the same shape, dtype and order of axes, but dense."""
    return Output(
        f"d{name}",
        lambda p: p.arrays[name].shape,
        lambda p: p.arrays[name].dtype,
        like=name,
        when=lambda p: name in p.arrays and p.params.get(f"{name}_gradient", True),
        **options,
    )


def _spec(
    tokens: tuple[str, ...],
    keys: tuple[str, ...],
    statistic: tuple[str, ...],
    options: tuple[Option, ...],
    lengths: tuple[Input, ...] = (),
    longest: tuple[Param, ...] = (),
) -> dict[str, Any]:
    """Build the spec of either form. tokens, keys: axes of q and k except the last; statistic: those of lse."""
    qkv = (
        Input("q", (*tokens, "D"), contiguous_last=True),
        Input("k", (*keys, "D"), contiguous_last=True),
        Input("v", (*keys, "Dv"), contiguous_last=True),
    )
    results = (
        Input("o", (*tokens, "Dv"), contiguous_last=True),
        Input("lse", statistic, role=Role.STATISTIC),
        Input("do", (*tokens, "Dv"), contiguous_last=True),
        Input("dlse", statistic, optional=True, role=Role.STATISTIC),
    )
    return {
        "formula": "o = softmax(scale * q @ k.T + mask) @ v;  lse = log(sum(exp(scale * q @ k.T + mask)))",
        "paper": "Dao 2023, arXiv:2307.08691, Algorithms 1 and 2",
        "inputs": (*qkv, *lengths, *_inputs(options)),
        "params": (*longest, *_params(options)),
        "outputs": (
            Output("o", lambda p: (*p.arrays["q"].shape[:-1], p.Dv), lambda p: p.dtype, like="q", contiguous_last=True),
            Output(
                "lse",
                lambda p: tuple(p.dims[axis] for axis in statistic),
                lambda p: compute_dtype(p.dtype),
                like="q",
                when=lambda p: p.return_lse,
            ),
        ),
        "gradient_inputs": (*qkv, *results[:3], *lengths, *results[3:], *_inputs(options)),
        "gradients": tuple(
            _gradient(entry.name, contiguous_last=entry.contiguous_last)
            for entry in (*qkv, *_inputs(options))
            if entry.name in ("q", "k", "v", "bias", "sinks")
        ),
        "saved": ("q", "k", "v", "o", "lse", *(entry.name for entry in (*lengths, *_inputs(options)))),
        "forward_cost": FORWARD_COST,
        "backward_cost": BACKWARD_COST,
        "rounding": "P and dS before they meet a matrix, and the results, to the storage dtype; all else in float32",
        "floor": 16.0,
        "rungs": ("naive", "simt", "sm80", "sm90"),
        "generate": generate,
        "special": special,
    }


SPEC = Spec(
    name="flash_attention",
    **_spec(("B", "H", "Sq"), ("B", "Hkv", "Sk"), ("B", "H", "Sq"), OPTIONS),
    measure=measure,
    gradient_params=(Param("bias_gradient", True, boolean, "whether to return dbias"),),
    cases=CASES,
    draw=draw,
)
SPEC_VARLEN = Spec(
    name="flash_attention_varlen",
    **_spec(
        ("total_q", "H"),
        ("total_k", "Hkv"),
        ("H", "total_q"),
        OPTIONS_VARLEN,
        (
            _lengths("cu_seqlens_q", "B+1"),
            _lengths("cu_seqlens_k", "B+1", optional=True),
            _lengths("k_starts", "B", optional=True, doc="the first key of each sequence, in place of cu_seqlens_k"),
            _lengths("k_lengths", "B", optional=True, doc="how many keys each sequence has"),
        ),
        (
            *(Param(f"max_seqlen_{side}", None, length_or_all, LONGEST) for side in ("q", "k")),
            Param("total_k_lengths", None, length_or_all, "the sum of k_lengths, or more; B * max_seqlen_k if None"),
        ),
    ),
    measure=measure_varlen,
    cases=CASES_VARLEN,
    draw=draw_varlen,
    values=check_lengths,
    parent="flash_attention",
)
