"""The spec of retention(q, k, v). Sun et al. 2023 (arXiv:2307.08621), "Retentive Network".

Query i of Sq stands at position p = i + Sk - Sq among the keys and sees key j where j <= p. With a the scale:

    s_ij = a * (q_i . k_j) * gamma^(p - j)      0 where j > p
    s_ij = a * (q_i . k_j) * mask_ij            with a mask [H, Sq, Sk] in place of the decay, for all j
    u_i = sum_j s_ij v_j + a * gamma^(p + 1) * q_i @ initial_state      the last term only with such a state
    r_i = sum_j s_ij     + a * gamma^(p + 1) * q_i . initial_norm
    o_i = u_i / n_i      n_i = 1, or with normalize="signed" max(1, |r_i|), with "abs" max(1, sum_j |s_ij|)

A sum that is NaN makes n NaN. Three forms give the same result: "parallel" computes all s; "recurrent" goes from token
to token with a state of fixed size; "chunk" is parallel within chunks of tokens and recurrent between them. The state
contains only keys and values, without scale (norm is the state of a value that is always 1):

    state_j = gamma * state_(j-1) + k_j^T v_j  [D, Dv]    u_j = a * q_j @ state_j
    norm_j = gamma * norm_(j-1) + k_j  [D]                r_j = a * q_j . norm_j

The state after the last key is a result (`state`, and `state_norm` with "signed"). It is the next call's initial_state
and initial_norm. Without tokens it is the initial one, or 0. `row_sum` is r, or for "abs" the sum of |s|, as backward
needs it; it has no gradient. gamma^n = exp2(n * log2(gamma)). log2(gamma) must have no error except its own rounding,
since it is multiplied by up to Sk. The default gamma is 1 - 2^(-5 - h). "abs" exists only in the parallel form: a sum
of magnitudes is no function of a state of fixed size.

log_decay [B, H, S] replaces gamma by a decay for each step, as natural logarithm and at most 0; Sq is Sk. With L_i =
sum of log_decay_t over t <= i, gamma^(i - j) is exp(L_i - L_j) everywhere above and below, gamma^(i + 1) is exp(L_i),
gamma^(S - 1 - j) is exp(L_(S-1) - L_j), and gamma in the recurrence is exp(log_decay_j).
Retention then covers:

    lightning attention-2 (arXiv:2401.04658)       gamma alone, exp of each head's slope; scale 1
    GLA with a scalar gate (arXiv:2312.06635)      log_decay the logarithm of the gate, "simple GLA"
    SSD of Mamba-2 (arXiv:2405.21060)              q, k, v are C, B and dt * x; log_decay is dt * A; scale 1

A difference of two L means the sum of the steps between them: at token 8192 of a head that forgets fast, L in float32
would give a decay to three digits at most. A step below -1000 counts as -1000. Its decay is 0 in any dtype, and a
smaller number would swamp the others in L.

The gradient, where n is a constant under "abs", and where |r_i| <= 1:

    du_i = do_i / n_i                dr_i = -sign(r_i) * (do_i . o_i) / n_i  where "signed" and |r_i| > 1, else 0
    ds_ij = du_i . v_j + dr_i        e_ij = a * gamma^(p - j) * ds_ij, 0 where j > p; a * mask_ij * ds_ij
    dq_i = sum_j e_ij k_j + a * gamma^(p + 1) * (initial_state @ du_i + dr_i * initial_norm)
    dk_j = sum_i e_ij q_i + gamma^(Sk - 1 - j) * (dstate @ v_j + dstate_norm)
    dv_j = sum_i s_ij du_i + gamma^(Sk - 1 - j) * k_j @ dstate
    dinitial_state = a * sum_i gamma^(p + 1) * q_i^T du_i + gamma^Sk * dstate
    dinitial_norm = a * sum_i gamma^(p + 1) * dr_i * q_i + gamma^Sk * dstate_norm

Every term that spans a step has the step's decay as a factor. So the gradient of log_decay is the sum of these terms.
The initial state counts as one more key, and the gradient of the last state as one more query:

    dlog_decay_t = sum_(j < t <= i) s_ij ds_ij
                 + sum_(i >= t) a * exp(L_i) * (q_i @ initial_state . du_i + dr_i * (q_i . initial_norm))
                 + sum_(j < t) exp(L_(S-1) - L_j) * (k_j @ dstate . v_j + k_j . dstate_norm)
                 + exp(L_(S-1)) * (initial_state . dstate + initial_norm . dstate_norm)
                 = exp(log_decay_t) * state_(t-1) . dstate_t, plus the term of the norm, step by step

A pair that is not seen adds nothing, even if it is NaN: no key reaches an earlier query, and no query's gradient a
later key. With a mask all pairs count, and 0 times NaN is NaN.

With 16-bit inputs, dlog_decay has rounded factors, as dq and dk have. Rounded to the digits of the dtype, in float32's
range, are e_ij, the decayed tokens that a state adds up, and the states that queries and keys are multiplied by. So it
can be computed from dq and dk before they are rounded:

    dlog_decay_t = sum_(i >= t) (q_i . dq_i - k_i . dk_i) + state_(S-1) . dstate + state_norm . dstate_norm

This adds and subtracts every pair after t, so a NaN may reach all steps of its sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any, Generic, TypedDict, TypeVar

import numpy as np

from .base import Input, Output, Param, Problem, Role, Spec
from .domains import boolean, finite, length_or_all, one_of, optional
from .lengths import LONGEST, check_ends, longest_in
from .meta import ArrayMeta, compute_dtype
from .retention_cases import CASES, CASES_VARLEN, generate
from .retention_cost import BACKWARD_COST, CHUNK as CHUNK, FORWARD_COST
from .retention_draws import draw, draw_varlen, special

MAX_KEY_DIM, MAX_VALUE_DIM = 256, 512
FORMS = ("parallel", "chunk", "recurrent")
Array = TypeVar("Array")
LEAST_LOG = -1000.0  # of a step: exp of it is 0 in float64


class KeywordsVarlen(TypedDict, Generic[Array], total=False):
    """The options of packed sequences, for functions that take `**options`, with arrays of a library."""

    gamma: Array | None
    log_decay: Array | None
    scale: float | None
    normalize: str | None
    initial_state: Array | None
    initial_norm: Array | None
    return_state: bool
    return_row_sum: bool


class Keywords(KeywordsVarlen[Array], Generic[Array], total=False):
    """The options of whole batches."""

    form: str
    mask: Array | None


def default_gamma(H: int) -> np.ndarray:
    """Return the default decay of each head: 1 - 2^(-5 - h). float64 [H]"""
    return 1.0 - 2.0 ** (-5.0 - np.arange(H))


def measure(op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Check the call; `params["scale"]` becomes a number. No sizes beyond the symbolic axes."""
    form, normalize, Sq, Sk = params["form"], params["normalize"], sizes["Sq"], sizes["Sk"]
    if Sq != Sk:
        if "log_decay" in arrays:
            raise ValueError(f"{op}: q has Sq={Sq}, k has Sk={Sk}, expected the same with log_decay")
        if form != "parallel":
            raise ValueError(f"{op}: q has Sq={Sq}, k has Sk={Sk}, expected the same in form {form!r}")
        _check_stateless(op, arrays, params, f"q has Sq={Sq}, k has Sk={Sk}, expected the same")
    if normalize == "abs":
        if form != "parallel":
            raise ValueError(
                f"{op}: normalize is 'abs' in form {form!r}, expected form 'parallel': the sum of |s| over all keys is "
                "no function of a state of fixed size ('signed' is)"
            )
        _check_stateless(op, arrays, params, "normalize is 'abs', expected None or 'signed'")
    if "mask" in arrays:
        if form != "parallel":
            raise ValueError(f"{op}: there is a mask in form {form!r}, expected form 'parallel'")
        for name in ("gamma", "log_decay"):
            if name in arrays:
                raise ValueError(
                    f"{op}: there is {name} and a mask, expected one of them: a mask is in place of the decay"
                )
        _check_stateless(op, arrays, params, "there is a mask, expected none")
    _check(op, arrays, params, sizes)
    return {}


def _check(op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Check what both operators require."""
    if "gamma" in arrays and "log_decay" in arrays:
        raise ValueError(f"{op}: there is gamma and log_decay, expected one of them: each is the whole decay")
    for name, axis, most in (("q", "D", MAX_KEY_DIM), ("v", "Dv", MAX_VALUE_DIM)):
        if not 1 <= sizes[axis] <= most:
            raise ValueError(f"{op}: {name} has {axis}={sizes[axis]}, expected 1 to {most}")
    _check_norms(op, arrays, params["normalize"])
    if "do" in arrays:
        for name in {None: (), "abs": ("row_sum",), "signed": ("o", "row_sum")}[params["normalize"]]:
            if name not in arrays:
                raise TypeError(f"{op}: {name} is missing, expected what forward gave with its normalize")
    if params["scale"] is None:
        params["scale"] = 1.0 / sqrt(sizes["D"])


def _check_stateless(op: str, arrays: Mapping[str, ArrayMeta], params: Mapping[str, Any], reason: str) -> None:
    for name in ("initial_state", "initial_norm", "dstate", "dstate_norm"):
        if name in arrays:
            raise ValueError(f"{op}: {reason} with {name}")
    if params["return_state"]:
        raise ValueError(f"{op}: {reason} with return_state")


def _check_norms(op: str, arrays: Mapping[str, ArrayMeta], normalize: str | None) -> None:
    """Check that a state comes with its norm if "signed" normalizes, and without one otherwise."""
    if normalize == "signed":
        for name, other in (("initial_state", "initial_norm"), ("initial_norm", "initial_state")):
            if name in arrays and other not in arrays:
                raise ValueError(f"{op}: there is {name} and no {other}, expected both with normalize='signed'")
    else:
        for name in ("initial_norm", "dstate_norm"):
            if name in arrays:
                raise ValueError(f"{op}: there is {name} with normalize={normalize!r}, expected normalize='signed'")


def measure_varlen(
    op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]
) -> dict[str, Any]:
    """Measure B sequences; Sq = Sk is the most tokens of one of them."""
    B = sizes["B+1"] - 1
    if B < 0:
        raise ValueError(f"{op}: cu_seqlens has no elements, expected B+1 of them")
    if sizes.get("B", B) != B:
        name = next(name for name in ("initial_state", "initial_norm", "dstate", "dstate_norm") if name in arrays)
        raise ValueError(f"{op}: {name} has B={sizes['B']}, expected {B}: cu_seqlens has {B + 1} elements")
    longest = longest_in(params, "max_seqlen", sizes["total"])
    _check(op, arrays, params, sizes)
    return {"B": B, "Sq": longest, "Sk": longest, "form": "chunk"}


def check_decay(op: str, arrays: Mapping[str, np.ndarray], problem: Problem) -> None:
    """Check that every gamma is above 0 and at most 1, and every log_decay finite and at most 0."""
    if "gamma" in arrays:
        gamma = arrays["gamma"]
        wrong = ~((gamma > 0) & (gamma <= 1))  # NaN is wrong
        if wrong.any():
            head = int(np.argmax(wrong))
            raise ValueError(f"{op}: gamma is {gamma[head]} for head {head}, expected above 0 and at most 1")
    if "log_decay" in arrays:
        logs = arrays["log_decay"]
        wrong = ~((logs > -np.inf) & (logs <= 0))  # NaN is wrong
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(f"{op}: log_decay is {logs[at]} at {at}, expected a finite number of at most 0")


def check_values_varlen(op: str, arrays: Mapping[str, np.ndarray], problem: Problem) -> None:
    """Check the decays, and that cu_seqlens begin at 0, are nondecreasing, within the tokens and within max_seqlen."""
    check_decay(op, arrays, problem)
    check_ends(
        op, "cu_seqlens", arrays["cu_seqlens"], ("q", "total", problem.total), ("max_seqlen", problem.max_seqlen)
    )


def _gradient(name: str) -> Output:
    """The gradient of an input: the same shape, dtype and order of axes, but dense."""
    return Output(
        f"d{name}",
        lambda p: p.arrays[name].shape,
        lambda p: p.arrays[name].dtype,
        like=name,
        when=lambda p: name in p.arrays,
        contiguous_last=name != "log_decay",
    )


def _state(name: str, axes: tuple[str, ...], doc: str = "") -> Input:
    return Input(name, axes, optional=True, contiguous_last=True, role=Role.STATISTIC, doc=doc)


STATE, NORM = ("B", "H", "D", "Dv"), ("B", "H", "D")
_NORMALIZE = "'signed' divides o by max(1, |sum of s|), 'abs' by max(1, sum of |s|) without a gradient through it"


def _spec(
    tokens: tuple[str, ...],
    keys: tuple[str, ...],
    statistic: tuple[str, ...],
    steps: tuple[str, ...],
    options: tuple[Input, ...],
    lengths: tuple[Input, ...],
    params: tuple[Param, ...],
) -> dict[str, Any]:
    """Build the spec of either operator. tokens, keys: axes of q and k except the last; statistic: those of row_sum;
    steps: those of log_decay.
    """
    qkv = (
        Input("q", (*tokens, "D"), contiguous_last=True),
        Input("k", (*keys, "D"), contiguous_last=True),
        Input("v", (*keys, "Dv"), contiguous_last=True),
    )
    options = (
        Input("gamma", ("H",), optional=True, role=Role.STATISTIC, doc="the decay; None is 1 - 2^(-5 - h)"),
        Input(
            "log_decay",
            steps,
            optional=True,
            role=Role.STATISTIC,
            doc="in place of gamma, the natural logarithm of each step's decay",
        ),
        *options,
        _state("initial_state", STATE, "the state before token 0, from an earlier call"),
        _state("initial_norm", NORM, "its norm, if 'signed'"),
    )
    results = (
        Input("o", (*tokens, "Dv"), optional=True, contiguous_last=True),
        Input("row_sum", statistic, optional=True, role=Role.STATISTIC),
        _state("dstate", STATE),
        _state("dstate_norm", NORM),
    )
    return {
        "formula": "s = scale * (q @ k.T) * gamma^(i - j) for j <= i;  o = s @ v / n",
        "paper": "Sun et al. 2023, arXiv:2307.08621, equations 5 to 8; log_decay: Dao and Gu 2024, arXiv:2405.21060",
        "inputs": (*qkv, *lengths, *options),
        "params": (
            *params,
            Param("return_state", False, boolean, "also return the state after the last key"),
            Param("return_row_sum", False, boolean, "also return what backward needs of a normalized call"),
        ),
        "outputs": (
            Output("o", lambda p: (*p.arrays["q"].shape[:-1], p.Dv), lambda p: p.dtype, like="q", contiguous_last=True),
            Output(
                "state",
                lambda p: tuple(p.dims[axis] for axis in STATE),
                lambda p: compute_dtype(p.dtype),
                like="q",
                when=lambda p: p.return_state,
                contiguous_last=True,
                row_major=True,
            ),
            Output(
                "state_norm",
                lambda p: tuple(p.dims[axis] for axis in NORM),
                lambda p: compute_dtype(p.dtype),
                like="q",
                when=lambda p: p.return_state and p.normalize == "signed",
                contiguous_last=True,
                row_major=True,
            ),
            Output(
                "row_sum",
                lambda p: tuple(p.dims[axis] for axis in statistic),
                lambda p: compute_dtype(p.dtype),
                like="q",
                when=lambda p: p.return_row_sum and p.normalize is not None,
                row_major=True,
            ),
        ),
        "gradient_inputs": (*qkv, Input("do", (*tokens, "Dv"), contiguous_last=True), *lengths, *results, *options),
        "gradients": tuple(_gradient(name) for name in ("q", "k", "v", "initial_state", "initial_norm", "log_decay")),
        "saved": ("q", "k", "v", "o", "row_sum", *(entry.name for entry in (*lengths, *options))),
        "saved_when": {"o": lambda p: p.normalize == "signed", "row_sum": lambda p: p.normalize is not None},
        "forward_cost": FORWARD_COST,
        "backward_cost": BACKWARD_COST,
        "rounding": "o, dq, dk and dv once, to the storage dtype; of 16-bit inputs the factors of dlog_decay's "
        "products too; all else in float32 (float64 for float64)",
        "floor": 16.0,
        "generate": generate,
        "special": special,
    }


SPEC = Spec(
    name="retention",
    rungs=("naive", "simt", "sm80", "sm90"),
    **_spec(
        ("B", "H", "Sq"),
        ("B", "H", "Sk"),
        ("B", "H", "Sq"),
        ("B", "H", "Sk"),
        (
            Input(
                "mask",
                ("H", "Sq", "Sk"),
                optional=True,
                contiguous_last=True,
                role=Role.WEIGHT,
                doc="in place of the decay",
            ),
        ),
        (),
        (
            Param("scale", None, optional(finite), "factor of q @ k.T; None is 1 / sqrt(D)"),
            Param("form", "chunk", one_of(*FORMS), "how it is computed: 'parallel', 'chunk' or 'recurrent'"),
            Param("normalize", None, one_of(None, "signed", "abs"), _NORMALIZE),
        ),
    ),
    measure=measure,
    cases=CASES,
    draw=draw,
    values=check_decay,
)
SPEC_VARLEN = Spec(
    name="retention_varlen",
    rungs=("naive", "simt", "sm80"),
    **_spec(
        ("total", "H"),
        ("total", "H"),
        ("H", "total"),
        ("total", "H"),
        (),
        (Input("cu_seqlens", ("B+1",), ("int32",), role=Role.OTHER),),
        (
            Param("max_seqlen", None, length_or_all, LONGEST),
            Param("scale", None, optional(finite), "factor of q @ k.T; None is 1 / sqrt(D)"),
            Param("normalize", None, one_of(None, "signed"), _NORMALIZE.partition(", 'abs'")[0]),
        ),
    ),
    measure=measure_varlen,
    cases=CASES_VARLEN,
    draw=draw_varlen,
    values=check_values_varlen,
    parent="retention",
)
