"""Users' functions in the simulator: the kernel's type all the way, and the reference's numbers."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from dualops import cuda as ops, reference
from dualops.cuda import simulator
from dualops.cuda.compiler.backend import cuda, f32, f64, i32, i64
from dualops.cuda.flash_attention import backward, forward
from dualops.cuda.simulator import Pointer
from dualops.cuda.user_functions import typed
from dualops.reference._functions import elementwise
from dualops.spec import compare
from dualops.spec.attention.function import UserFunction
from tests.user_functions import MASK, MASK_MODS, SCORE, SCORE_MODS

FLOOR = 16.0  # attention's
THREADS, QUERIES, B, H = 30, 6, 1, 1
USERS = {name: UserFunction(function, SCORE) for name, function in SCORE_MODS.items()}
USERS |= {f"{name}_slope": user.derivative for name, user in USERS.items()}
RNG = np.random.default_rng(0)
PLACES = (np.full(THREADS, B), np.full(THREADS, H), np.arange(THREADS) % QUERIES, np.arange(THREADS) // QUERIES)


@pytest.mark.parametrize(("number", "dtype"), [(f32, "float32"), (f64, "float64")])
@pytest.mark.parametrize("name", USERS)
def test_scores(name, number, dtype):
    mod = typed(USERS[name], number)
    types = set()

    def kernel(y, x, b, h):
        tid = cuda.threadIdx.x
        result = mod(x[tid], b, i32(h), tid % QUERIES, i64(tid // QUERIES))
        types.add(type(result))
        y[tid] = result

    x = RNG.uniform(0.1, 0.9, THREADS).astype(dtype)
    y = np.full(THREADS, np.nan, dtype)
    simulator.launch(kernel, (1,), (THREADS,), (Pointer(y, "y"), Pointer(x, "x"), B, H))
    assert types == {np.dtype(dtype).type}
    truth, baseline = (
        elementwise(USERS[name], partial(np.asarray, dtype=kind))(x.astype(kind), *PLACES)
        for kind in ("float64", dtype)
    )
    found = compare(y, truth, baseline, dtype=dtype, floor=FLOOR, name=name)
    assert found.passed, found.message


@pytest.mark.parametrize("name", MASK_MODS)
def test_masks(name):
    user = UserFunction(MASK_MODS[name], MASK)
    mod = typed(user, f32)
    results = []

    def kernel(b, h):
        tid = cuda.threadIdx.x
        results.append(mod(b, i32(h), tid % QUERIES, i64(tid // QUERIES)))

    simulator.launch(kernel, (1,), (THREADS,), (B, H))
    assert {type(result) for result in results} <= {bool, np.bool_}
    np.testing.assert_array_equal(results, elementwise(user, np.asarray)(*PLACES))


def test_overflow_and_what_is_outside_a_domain_are_numbers_as_on_a_gpu():
    user = UserFunction(SCORE_MODS["functions_of_math"], SCORE)
    with np.errstate(all="ignore"):
        assert np.isnan(typed(user, f32)(np.float32(-1e3), 0, 0, 0, 0))


def test_a_function_without_source_gives_the_kernels_type_too():
    scope: dict[str, object] = {}
    exec("def unknown(score, b, h, i, j): return float(score) + 0.1 * (i - j)", scope)
    result = typed(UserFunction(scope["unknown"], SCORE), f32)(np.float32(2), 0, 0, 3, 1)  # type: ignore[arg-type]
    assert type(result) is np.float32 and result == np.float32(2.2)


@pytest.mark.parametrize("kind", ["cell", "global", "array"])
def test_a_plan_is_for_the_variables_of_its_call(kind):
    """Plans are found by the functions: one that reads other values now must not get the plan of then."""
    slope, table, scope = 0.5, np.array([0.5]), {"slope": 0.5}
    exec("def of_global(score, b, h, i, j): return score * slope", scope)

    def change(value):
        nonlocal slope
        slope = scope["slope"] = table[0] = value

    functions = {
        "cell": lambda score, b, h, i, j: score * slope,
        "global": scope["of_global"],
        "array": lambda score, b, h, i, j: score * table[0],
    }
    mods = {
        "score_mod": (functions[kind], lambda score, b, h, i, j: slope),
        "mask_mod": lambda b, h, i, j: (i >= j) | (table[0] > 1),
    }
    arrays = RNG.standard_normal((4, 1, 1, 3, 4))
    q, k, v, do = arrays
    plans, seen = [], []
    for value in (0.5, 2.0, 0.5, 2.0, 2.0):
        change(value)
        o, lse = ops.flash_attention(q, k, v, **mods, return_lse=True)
        gradients = ops.flash_attention_backward(q, k, v, o, lse, do, **mods, return_lse=True)
        expected: Any = reference.flash_attention(q, k, v, scale=value / 2, causal=value < 1, return_lse=True)
        options = {"scale": value / 2, "causal": value < 1, "return_lse": True}
        slopes = reference.flash_attention_backward(q, k, v, expected[0], expected[1], do, **options)
        for found, wanted in zip((o, lse, *gradients), (*expected, *slopes), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
        plans.append((len(forward.plans), len(backward.plans)))
        seen.append(float(o.sum()))
    assert seen[0] == seen[2] != seen[1] == seen[3] == seen[4]
    assert plans[2] == plans[3] == plans[4]  # one for each value
