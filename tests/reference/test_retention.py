"""Retention in NumPy: three forms against loops over numbers, states handed on, NaN, errors."""

from collections.abc import Mapping
from itertools import combinations
from math import sqrt
from re import escape
from typing import Any

import numpy as np
import pytest

from dualops.reference import retention, retention_varlen
from dualops.reference.retention import decay_of
from dualops.reference.retention_forms import Decay, StepDecay
from dualops.spec import OPERATORS, Tag, compare
from dualops.spec.meta import numpy_dtype
from dualops.spec.retention_cases import PAIRS
from dualops.testing.terms.retention import result_terms
from dualops.testing.truth import bind, widened
from tests.checks import call
from tests.problems import elements, random_problems, values
from tests.retention import normal, qkv, with_steps

SPEC, VARLEN = OPERATORS["retention"], OPERATORS["retention_varlen"]
FORMS = ("parallel", "chunk", "recurrent")
OPTIONS = ("initial_state", "mask", "log_decay")
CASES = [case for case in SPEC.tagged(Tag.TEST) + SPEC.tagged(Tag.SIM) if elements(case) <= 1 << 15]

CASES += [with_steps(case) for case in CASES if case.name.startswith("options_") and "mask" not in case.shapes]

pytestmark = pytest.mark.filterwarnings("error")  # no NumPy warning reaches a user


def formula(arrays: Mapping[str, np.ndarray], params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All results of a call of retention in float64, a score at a time; written from the operator's description."""
    q, k, v = (arrays[name].astype(np.float64) for name in "qkv")
    (B, H, Sq, D), Sk, Dv = q.shape, k.shape[2], v.shape[3]
    scale = 1 / sqrt(D) if params.get("scale") is None else params["scale"]

    def kept(b: int, h: int, j: int, i: int) -> float:
        """Of what stood at j, in the state after i."""
        if "log_decay" in arrays:
            return float(np.exp(arrays["log_decay"][b, h, j + 1 : i + 1].astype(np.float64).sum()))
        return (float(arrays["gamma"][h]) if "gamma" in arrays else 1 - 2.0 ** (-5 - h)) ** (i - j)

    o, row_sum = np.zeros((B, H, Sq, Dv)), np.zeros((B, H, Sq))
    state, norm = np.zeros((B, H, D, Dv)), np.zeros((B, H, D))
    for b, h in np.ndindex(B, H):
        for i in range(Sq):
            position, total, absolute, sums = i + Sk - Sq, 0.0, 0.0, np.zeros(Dv)
            for j in range(Sk):
                if "mask" not in arrays and j > position:
                    continue
                weight = float(arrays["mask"][h, i, j]) if "mask" in arrays else kept(b, h, j, position)
                s = scale * sum(q[b, h, i, d] * k[b, h, j, d] for d in range(D)) * weight
                total, absolute, sums = total + s, absolute + abs(s), sums + s * v[b, h, j]
            for d in range(D) if "initial_state" in arrays else ():
                old = scale * kept(b, h, -1, position) * q[b, h, i, d]
                sums = sums + old * arrays["initial_state"][b, h, d]
                total += old * arrays["initial_norm"][b, h, d] if "initial_norm" in arrays else 0.0
            row_sum[b, h, i] = absolute if params.get("normalize") == "abs" else total
            o[b, h, i] = sums / (max(1.0, abs(row_sum[b, h, i])) if params.get("normalize") else 1.0)
        if "initial_state" in arrays:
            state[b, h] = kept(b, h, -1, Sk - 1) * arrays["initial_state"][b, h]
        if "initial_norm" in arrays:
            norm[b, h] = kept(b, h, -1, Sk - 1) * arrays["initial_norm"][b, h]
        for j in range(Sk):
            state[b, h] += kept(b, h, j, Sk - 1) * np.outer(k[b, h, j], v[b, h, j])
            norm[b, h] += kept(b, h, j, Sk - 1) * k[b, h, j]
    return {"o": o, "state": state, "state_norm": norm, "row_sum": row_sum}


def everything(arrays: Mapping[str, np.ndarray], params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All results that the call can have, by name."""
    stateless = "mask" in arrays or arrays["q"].shape[2] != arrays["k"].shape[2] or params.get("normalize") == "abs"
    params = {**params, "return_state": not stateless, "return_row_sum": True}
    found = call(retention, SPEC.inputs, arrays, **params)
    names = bind(SPEC, dict(arrays), params, False).outputs()
    return dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))


def with_states(arrays: dict[str, Any], normalize: str | None) -> dict[str, Any]:
    (B, H, _, D), Dv = arrays["q"].shape, arrays["v"].shape[3]
    states = {"initial_state": normal(B, H, D, Dv, seed=4)}
    return arrays | states | ({"initial_norm": normal(B, H, D, seed=5)} if normalize == "signed" else {})


def hold(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], limit: float = 1e-12) -> None:
    for name, result in found.items():
        assert result.shape == expected[name].shape, name
        size = 1 + np.abs(expected[name]).max(initial=0.0)
        assert np.abs(result - expected[name]).max(initial=0.0) <= limit * size, name


@pytest.mark.parametrize("case", [case for case in CASES if Tag.SIM in case.tags], ids=lambda case: case.id)
def test_cases_against_the_formula(case):
    """In half precision o is off by its rounding."""
    arrays = values(SPEC, case)
    limit = {"float64": 1e-12, "float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}[case.dtype]
    hold(everything(arrays, case.params), formula(arrays, case.params), limit)


def test_random_problems_against_the_formula():
    seen: set[tuple[Any, ...]] = set()
    for number, drawn in enumerate(random_problems("retention", 5, 120, max_elements=500, dtypes=["float64"])):
        case = with_steps(drawn) if number % 3 == 0 else drawn
        arrays = values(SPEC, case)
        hold(everything(arrays, case.params), formula(arrays, case.params), 1e-11)
        seen.add((case.params["form"], case.params["normalize"], *(name in arrays for name in OPTIONS)))
    assert len(seen) >= 25 and {row[:2] for row in seen if row[-1]} >= {(form, "signed") for form in FORMS}


@pytest.mark.parametrize("h", [0, 5, 12, 20, 30])
def test_powers_of_gamma_are_exact_to_rounding_however_near_one_it_is(h):
    """In float32, where 1 - 2^-30 is 1 and log2 of what is near 1 needs care; 8192 tokens."""
    q = np.zeros((1, h + 1, 1, 1), np.float32)
    problem = bind(SPEC, {"q": q, "k": q, "v": q}, {}, False)
    n = np.array([1, 100, 8192])
    decay = decay_of(problem, {})
    assert isinstance(decay, Decay)
    found = decay.power(n)[h].astype(np.float64)
    exact = np.exp(n * np.log1p(-(2.0 ** (-5 - h))))
    assert (np.abs(found - exact) <= exact * 2.0**-24 * (2 + n * 2.0 ** (-5 - h)) + 2.0**-126).all()


def test_products_of_decays_are_exact_to_rounding_however_far_into_a_sequence():
    """In float32, of 1000 tokens that forget fast and some that forget all, where the sum of all is past any digit."""
    S = 1000
    logs = -np.random.default_rng(0).exponential(1.0, (1, 1, S)).astype(np.float32)
    logs[..., 300:500:50] = -1e30
    weights, seen = StepDecay(logs).between(S, S)
    exact = np.exp(np.cumsum(logs[0, 0, : S - 64 : -1].astype(np.float64)))  # of the last steps, from the last on
    found = weights[0, 0, -1, S - 64 : -1][::-1]
    assert found.dtype == np.float32 and seen.sum() == S * (S + 1) // 2
    assert (np.abs(found - exact) <= exact * 2.0**-24 * (2 + np.abs(np.log(exact)))).all()
    assert (weights[0, 0, 300:350, :300] == 0).all() and (weights[0, 0, 301:330, 300] > 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_is_rounded_once(form, dtype):
    arrays: dict[str, Any] = {name: x.astype(numpy_dtype(dtype)) for name, x in qkv(D=16, Dv=24).items()}
    for normalize in (None, "signed"):
        params = {"form": form, "normalize": normalize}
        o, exact = retention(**arrays, **params), retention(**widened(arrays), **params)
        unit = 2.0**-11 if dtype == "float16" else 2.0**-8
        assert (np.abs(o.astype(np.float64) - exact) <= 1.01 * unit * np.abs(exact) + 1e-5).all()


def state_space(A: np.ndarray, dt: np.ndarray, B: np.ndarray, C: np.ndarray, x: np.ndarray) -> np.ndarray:
    """SSD as Dao and Gu 2024 define it: h_t = exp(dt_t * A) h_(t-1) + dt_t * B_t x_t, y_t = C_t h_t; one B, one C."""
    (batches, H, S, P), N, y = x.shape, B.shape[-1], np.zeros_like(x)
    for b, head in np.ndindex(batches, H):
        h = np.zeros((N, P))
        for t in range(S):
            h = np.exp(dt[b, head, t] * A[head]) * h
            for n in range(N):
                h[n] += dt[b, head, t] * B[b, t, n] * x[b, head, t]
                y[b, head, t] += C[b, t, n] * h[n]
    return y


def gated(q: np.ndarray, k: np.ndarray, v: np.ndarray, gates: np.ndarray) -> np.ndarray:
    """Linear attention whose state is multiplied by a gate before each token, a loop over pairs: o without a scale."""
    o = np.zeros_like(v)
    for b, h, i in np.ndindex(*v.shape[:3]):
        for j in range(i + 1):
            o[b, h, i] += (q[b, h, i] @ k[b, h, j]) * gates[b, h, j + 1 : i + 1].prod() * v[b, h, j]
    return o


@pytest.mark.parametrize("form", FORMS)
def test_lightning_attention_simple_gla_and_state_spaces_are_one_call_each(form):
    arrays, shape = qkv(B=2, H=3, S=67), (2, 3, 67)
    slopes = np.array([2.0**-4, 2.0**-2, 1.0])  # lightning attention: M_ij = exp(-slope * (i - j))
    constant = np.broadcast_to(np.exp(-slopes)[:, None], shape)
    lightning = retention(**arrays, gamma=np.exp(-slopes), scale=1.0, form=form)
    hold({"o": lightning}, {"o": gated(**arrays, gates=constant)})
    gates = 1 / (1 + np.exp(-normal(*shape, seed=6)))
    gla = retention(**arrays, log_decay=np.log(gates), form=form)
    hold({"o": gla}, {"o": gated(**arrays, gates=gates) / sqrt(5)})
    A, dt = -np.exp(normal(3)), np.log1p(np.exp(normal(*shape, seed=7)))
    B, C = arrays["k"][:, 0], arrays["q"][:, 0]
    q, k = (np.broadcast_to(each[:, None], (*shape, 5)) for each in (C, B))
    found = retention(q, k, dt[..., None] * arrays["v"], log_decay=dt * A[:, None], scale=1.0, form=form)
    hold({"y": found}, {"y": state_space(A, dt, B, C, arrays["v"])})
    narrow, x = numpy_dtype("bfloat16"), arrays["v"].astype(numpy_dtype("bfloat16"))
    dt, A = dt.astype(np.float32), A.astype(np.float32)
    q, k = (np.broadcast_to(each.astype(narrow)[:, None], (*shape, 5)) for each in (C, B))
    dtx = (dt[..., None] * x).astype(x.dtype)
    rounded = retention(q, k, dtx, log_decay=dt * A[:, None], scale=1.0, form=form)
    wide = [np.array(each, np.float64, order="C") for each in (q, k, dtx, dt * A[:, None])]
    exact = retention(*wide[:3], log_decay=wide[3], scale=1.0, form=form)
    assert rounded.dtype == narrow and np.abs(rounded.astype(np.float64) - exact).max() <= 2**-8 * np.abs(exact).max()


@pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])
@pytest.mark.parametrize("case", {case.id: case for case in CASES}.values(), ids=lambda case: case.id)
def test_every_form_is_as_near_the_truth_as_the_rule_asks(case, special):
    """Each form in the case's dtype, against the parallel form in float64, and NaN where that has it."""
    arrays = values(SPEC, case, special=special)
    truth = everything(widened(arrays), {**case.params, "form": "parallel"})
    baseline = everything(arrays, case.params)
    terms = result_terms(arrays, bind(SPEC, arrays, case.params, False))
    for form in FORMS if "state" in truth else FORMS[:1]:
        for name, result in everything(arrays, {**case.params, "form": form}).items():
            rule = {"dtype": case.dtype, "floor": SPEC.floor, "terms": terms[name]}
            found = compare(result, truth[name], baseline[name], **rule, name=f"{form} {name}")
            assert found.passed, found.message


@pytest.mark.parametrize("normalize", [None, "signed"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", [0, 1, 30, 64, 69, 70])
def test_a_sequence_in_two_parts_is_the_whole(place, form, normalize):
    arrays = with_states(qkv(), normalize)
    params = {"gamma": np.array([1.0, 0.01, 0.97]), "form": form, "normalize": normalize, "return_state": True}
    whole = retention(**arrays, **params)
    first = {name: x[:, :, :place] if name in "qkv" else x for name, x in arrays.items()}
    o, *states = retention(**first, **params)
    rest = {name: arrays[name][:, :, place:] for name in "qkv"}
    rest |= dict(zip(("initial_state", "initial_norm"), states))
    o_rest, *states = retention(**rest, **params)
    for one, two in zip((np.concatenate([o, o_rest], axis=2), *states), whole, strict=True):
        assert np.abs(one - two).max() <= 1e-12 * (1 + np.abs(two).max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normalize", [None, "signed"])
@pytest.mark.parametrize("place", [0, 40, 66])
def test_a_nan_reaches_what_comes_after_it_alone(place, form, normalize):
    clean = qkv()
    params = {"form": form, "normalize": normalize, "return_state": True}
    expected = retention(**clean, **params)
    for name in "qkv":
        arrays = clean | {name: clean[name].copy()}
        arrays[name][1, 2, place, 1] = np.nan
        o, state, *_ = retention(**arrays, **params)
        is_nan = np.isnan(o)
        assert not is_nan[0].any() and not is_nan[1, :2].any() and not is_nan[1, 2, :place].any()
        assert is_nan[1, 2, place].any()
        after = is_nan[1, 2, place + 1 :]
        # of v only its own column is; of q nothing
        assert not after.any() if name == "q" else after[:, 1].all()
        assert after.all() if name == "k" else not after[:, [0, 2, 3]].any()
        assert np.isnan(state[1, 2]).sum() == {"q": 0, "k": 4, "v": 5}[name]
        assert np.abs(np.where(is_nan, 0, o - expected[0])).max() < 1e-12


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normalize", [None, "signed"])
def test_without_tokens_the_state_is_the_first_one_and_a_copy(form, normalize):
    arrays = with_states(qkv(S=0), normalize)
    o, state, *norm = retention(**arrays, form=form, normalize=normalize, return_state=True)
    assert o.shape == (2, 3, 0, 4)
    assert np.array_equal(state, arrays["initial_state"]) and not np.shares_memory(state, arrays["initial_state"])
    assert not norm or np.array_equal(norm[0], arrays["initial_norm"])
    bare = {name: arrays[name] for name in "qkv"}
    _, state = retention(**bare, form=form, return_state=True)
    assert state.shape == (2, 3, 5, 4) and (state == 0).all()


def test_random_sequences_are_what_each_is_alone():
    for number, drawn in enumerate(random_problems("retention_varlen", 8, 60, max_elements=1500, dtypes=["float64"])):
        case = with_steps(drawn) if number % 3 == 0 else drawn
        arrays, params = values(VARLEN, case), {**case.params, "return_state": True, "return_row_sum": True}
        o, state, *more = call(retention_varlen, VARLEN.inputs, arrays, **params)
        single = {name: value for name, value in params.items() if name != "max_seqlen"}
        for b, (start, end) in enumerate(zip(arrays["cu_seqlens"], arrays["cu_seqlens"][1:])):
            tokens = [name for name in ("q", "k", "v", "log_decay") if name in arrays]
            one = {name: arrays[name][start:end].swapaxes(0, 1)[None] for name in tokens}
            one |= {name: arrays[name][b : b + 1] for name in ("initial_state", "initial_norm") if name in arrays}
            one |= {"gamma": arrays["gamma"]} if "gamma" in arrays else {}
            o_one, state_one, *more_one = call(retention, SPEC.inputs, one, **single)
            hold({"o": o[start:end]}, {"o": o_one[0].swapaxes(0, 1)})
            hold({"state": state[b]}, {"state": state_one[0]})
            if more:
                hold(
                    {"norm": more[0][b], "row_sum": more[1][:, start:end]},
                    {"norm": more_one[0][0], "row_sum": more_one[1][0]},
                )


def test_every_two_values_of_options_meet_in_some_row_where_they_may():
    """ "abs" is for the parallel form, and has no states."""
    columns = [set(column) for column in zip(*PAIRS, strict=True)]
    for one, two in combinations(range(6), 2):
        found = {(row[one], row[two]) for row in PAIRS}
        allowed = {(a, b) for a in columns[one] for b in columns[two]}
        allowed -= {("chunk", "abs"), ("recurrent", "abs")}
        if one == 1 and two in (3, 4):
            allowed -= {("abs", 1)}
        assert found == allowed, (one, two, allowed - found)


WRONG: dict[type[Exception], list[tuple[dict[str, Any], str]]] = {
    ValueError: [
        ({"q": normal(2, 3, 69, 5)}, "q has Sq=69, k has Sk=70, expected the same in form 'chunk'"),
        ({"q": normal(2, 3, 69, 5), "form": "parallel", "return_state": True},
         "q has Sq=69, k has Sk=70, expected the same with return_state"),
        ({"gamma": np.array([0.5, 1.0, 1.5])}, "gamma is 1.5 for head 2, expected above 0 and at most 1"),
        ({"gamma": np.array([0.5, 0.0, 1.0])}, "gamma is 0.0 for head 1, expected above 0 and at most 1"),
        ({"gamma": np.array([np.nan, 0.5, 1.0])}, "gamma is nan for head 0, expected above 0 and at most 1"),
        ({"log_decay": 0.1 - np.ones((2, 3, 69))}, "log_decay has Sk=69, k has Sk=70"),
        ({"log_decay": -np.ones((3, 70))}, "log_decay has 2 axes (3, 70), expected 3: [B, H, Sk]"),
        ({"log_decay": np.full((2, 3, 70), 0.25)}, "log_decay is 0.25 at (0, 0, 0), expected a finite number of"),
        ({"log_decay": np.full((2, 3, 70), np.nan)}, "log_decay is nan at (0, 0, 0), expected a finite number of"),
        ({"log_decay": np.full((2, 3, 70), -np.inf)}, "log_decay is -inf at (0, 0, 0), expected a finite number of"),
        ({"log_decay": np.zeros((2, 3, 70)), "gamma": np.ones(3)},
         "there is gamma and log_decay, expected one of them: each is the whole decay"),
        ({"log_decay": np.zeros((2, 3, 70)), "q": normal(2, 3, 69, 5), "form": "parallel"},
         "q has Sq=69, k has Sk=70, expected the same with log_decay"),
        ({"log_decay": np.zeros((2, 3, 70)), "mask": np.ones((3, 70, 70)), "form": "parallel"},
         "there is log_decay and a mask, expected one of them: a mask is in place of the decay"),
        ({"gamma": np.ones(2)}, "gamma has H=2, q has H=3"),
        ({"normalize": "abs"}, "normalize is 'abs' in form 'chunk', expected form 'parallel': the sum of"),
        ({"normalize": "abs", "form": "recurrent"}, "normalize is 'abs' in form 'recurrent', expected form"),
        ({"normalize": "square"}, "normalize is 'square', expected one of None, 'signed', 'abs'"),
        ({"form": "blocked"}, "form is 'blocked', expected one of 'parallel', 'chunk', 'recurrent'"),
        ({"mask": np.ones((3, 70, 70))}, "there is a mask in form 'chunk', expected form 'parallel'"),
        ({"mask": np.ones((3, 70, 70)), "gamma": np.ones(3), "form": "parallel"},
         "there is gamma and a mask, expected one of them"),
        ({"mask": np.ones((3, 70, 70)), "form": "parallel", "initial_state": np.ones((2, 3, 5, 4))},
         "there is a mask, expected none with initial_state"),
        ({"mask": np.ones((3, 70, 69)), "form": "parallel"}, "mask has Sk=69, k has Sk=70"),
        ({"initial_state": np.ones((2, 3, 5, 4)), "normalize": "signed"},
         "there is initial_state and no initial_norm, expected both with normalize='signed'"),
        ({"initial_norm": np.ones((2, 3, 5))},
         "there is initial_norm with normalize=None, expected normalize='signed'"),
        ({"initial_state": np.ones((2, 3, 5, 4)), "normalize": "abs", "form": "parallel"},
         "normalize is 'abs', expected None or 'signed' with initial_state"),
        ({"initial_state": np.ones((2, 3, 4, 4))}, "initial_state has D=4, q has D=5"),
        ({"q": normal(2, 3, 70, 257), "k": normal(2, 3, 70, 257)}, "q has D=257, expected 1 to 256"),
        ({"v": normal(2, 3, 70, 513)}, "v has Dv=513, expected 1 to 512"),
        ({"v": normal(2, 3, 70, 0)}, "v has Dv=0, expected 1 to 512"),
    ],
    TypeError: [
        ({"log_decay": np.zeros((2, 3, 70), np.float32)}, "log_decay has dtype float32, q has dtype float64"),
        ({"gamma": np.ones(3, np.float32)}, "gamma has dtype float32, q has dtype float64, expected float64"),
        ({"return_state": 1}, "return_state is 1, expected True or False"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "message"), [(kind, *row) for kind in WRONG for row in WRONG[kind]])
def test_errors_are_the_specs(kind, change, message):
    params = {name: x for name, x in change.items() if name not in {entry.name for entry in SPEC.inputs}}
    with pytest.raises(kind, match=f"^retention: {escape(message)}"):
        call(retention, SPEC.inputs, qkv() | change, **params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": np.array([1, 9], np.int32)}, "cu_seqlens starts at 1, expected 0"),
        (
            {"cu_seqlens": np.array([0, 5, 3, 9], np.int32)},
            "cu_seqlens falls from 5 to 3 at 2, expected it not to fall",
        ),
        ({"cu_seqlens": np.array([0, 10], np.int32)}, "cu_seqlens ends at 10, q has total=9, expected no more"),
        ({"max_seqlen": 4}, "max_seqlen is 4, expected 5 or more, the longest of cu_seqlens"),
        ({"max_seqlen": -1}, "max_seqlen is -1, expected 0 or more"),
        ({"cu_seqlens": np.zeros(0, np.int32)}, "cu_seqlens has no elements, expected B+1 of them"),
        ({"initial_state": np.ones((3, 2, 4, 4))}, "initial_state has B=3, expected 2: cu_seqlens has 3 elements"),
        ({"gamma": np.array([0.5, 2.0])}, "gamma is 2.0 for head 1, expected above 0 and at most 1"),
        ({"normalize": "abs"}, "normalize is 'abs', expected one of None, 'signed'"),
        ({"log_decay": -np.ones((8, 2))}, "log_decay has total=8, q has total=9"),
        ({"log_decay": np.full((9, 2), 1.0)}, "log_decay is 1.0 at (0, 0), expected a finite number of at most 0"),
    ],
)
def test_errors_of_sequences_are_the_specs(change, message):
    x = normal(9, 2, 4)
    given = {"q": x, "k": x, "v": x, "cu_seqlens": np.array([0, 5, 9], np.int32), "max_seqlen": 5} | change
    with pytest.raises(ValueError, match=f"^retention_varlen: {escape(message)}$"):
        retention_varlen(**given)
