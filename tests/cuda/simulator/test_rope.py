"""rope's kernels: every Config, positions outside the tables, writing over the inputs, and which kernel serves what."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda.launch import device as devices
from dualops.cuda.launch.step import Step, prepare
from dualops.cuda.rope import simt
from dualops.cuda.rope.simt import SimtConfig
from dualops.cuda.tile.numbers import cospi_f64, pow_f64, sinpi_f64
from dualops.spec import OPERATORS, ArrayMeta, Problem, compare
from dualops.spec.meta import numpy_dtype
from dualops.spec.rope_draws import SCALINGS
from dualops.testing.truth import widened
from tests.checks import call

SPEC = OPERATORS["rope"]


def arrays(
    B: int,
    H: int,
    Hkv: int,
    S: int,
    D: int,
    R: int,
    dtype: str = "float32",
    *,
    rows: int = 0,
    tokens_first: bool = False,
) -> dict[str, Any]:
    """Of a call: q, k, cos and sin."""
    rng = np.random.default_rng(B + H + S + D)
    made = {}
    for name, heads in (("q", H), ("k", Hkv)):
        x = rng.standard_normal((B, heads, S, D)).astype(numpy_dtype(dtype))
        made[name] = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) if tokens_first else x
    wide = "float64" if dtype == "float64" else "float32"
    cos, sin = reference.rope_tables(np.arange(3, 3 + (rows or S)), R, dtype=wide)
    return {**made, "cos": cos, "sin": sin}


def problem_of(given: dict[str, np.ndarray], **params: Any) -> Problem:
    return SPEC.bind({name: ArrayMeta.of_numpy(array) for name, array in given.items()}, params)


def launch(step: Step, given: dict[str, np.ndarray], results: dict[str, np.ndarray]) -> None:
    everything = {**given, **results}
    prepare(step, list(everything), devices.current())(list(everything.values()))


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("D", "R", "aligned"), [(32, 32, True), (48, 16, True), (9, 6, False), (32, 16, False)])
def test_every_blocking_gives_the_same(D, R, aligned, interleaved, tokens_first):
    given = arrays(1, 5, 2, 2, D, R, "bfloat16", tokens_first=tokens_first)
    expected = list(
        zip(
            *(call(reference.rope, SPEC.inputs, x, dim=R, interleaved=interleaved) for x in (widened(given), given)),
            strict=True,
        )
    )
    problem = problem_of(given, dim=R, interleaved=interleaved)
    for threads, heads, lanes in ((32, 1, 1), (64, 2, 3), (32, 8, 1), (96, 3, 7)):
        results = {f"{name}_rotated": np.empty_like(given[name]) for name in ("q", "k")}
        metas = {name: ArrayMeta.of_numpy(array) for name, array in results.items()}
        config = SimtConfig(threads, 1, heads, aligned, wide_tables=aligned, neighbours=tokens_first)
        (step,) = simt.steps(problem, metas, 1.0, config, lanes)
        launch(step, given, results)
        for one, two in zip(results.values(), expected, strict=True):
            found = compare(one, *two, dtype="bfloat16", floor=SPEC.floor)
            assert found.passed, (config, lanes, found.message)


def test_alignment_is_that_of_every_piece():
    def config(given: dict[str, np.ndarray], **params: Any) -> SimtConfig:
        problem = problem_of(given, **params)
        return simt.config_of(problem, problem.outputs())

    assert config(arrays(1, 2, 1, 3, 128, 128, "bfloat16")).aligned
    assert config(arrays(1, 2, 1, 3, 96, 32, "float16"), dim=32).aligned
    assert not config(arrays(1, 2, 1, 3, 96, 24, "bfloat16"), dim=24).aligned  # a half of 12 elements
    assert not config(arrays(1, 2, 1, 3, 20, 16, "bfloat16"), dim=16).aligned  # rows of 40 bytes
    wide = arrays(1, 2, 1, 3, 32, 16)
    assert config(wide, dim=16).wide_tables
    tables = {name: np.zeros((3, 9), np.float32)[:, :8] for name in ("cos", "sin")}
    assert not config(wide | tables, dim=16).wide_tables and config(wide | tables, dim=16).aligned


def test_lanes_follow_how_many_tokens_there_are():
    def lanes(B: int, S: int, *, tokens_first: bool) -> tuple[int, int]:
        """Threads that share the 40 heads of a token, and heads that each has at a time."""
        strides = {heads: (128, heads * 128) if tokens_first else (S * 128, 128) for heads in (32, 8)}
        metas = {
            name: ArrayMeta((B, heads, S, 128), "bfloat16", (heads * S * 128, *strides[heads], 1), "cuda:0", 0)
            for name, heads in (("q", 32), ("k", 8))
        }
        metas |= dict.fromkeys(("cos", "sin"), ArrayMeta((S, 64), "float32", (64, 1), "cuda:0", 0))
        problem = SPEC.bind(metas)
        config = simt.config_of(problem, problem.outputs())
        return simt.head_lanes(problem, config, devices.known("sm_90a")), config.heads

    for sizes, tokens_first in (((1, 100), True), ((1, 100), False), ((16, 1), False)):
        found, heads = lanes(*sizes, tokens_first=tokens_first)
        assert found == -(-40 // heads)  # one round for each, so that there are threads enough
    for sizes, tokens_first in (((4, 8192), True), ((4, 1 << 20), False)):
        found, heads = lanes(*sizes, tokens_first=tokens_first)
        assert 2 * found == -(-40 // heads)  # two rounds
    found, heads = lanes(4, 1024, tokens_first=False)
    assert -(-40 // heads) // 2 < found < -(-40 // heads)


@pytest.mark.parametrize("rung", SPEC.rungs)
@pytest.mark.parametrize(("D", "dtype"), [(32, np.int64), (9, np.int32)])
def test_a_token_without_a_row_becomes_nan_and_nothing_is_read_there(D, dtype, rung):
    """As on a GPU, where positions are not checked: the simulator's pointers refuse what lies outside."""
    R = D // 2 // 2 * 2
    given = arrays(2, 2, 1, 4, D, R, rows=7) | {"positions": np.array([[0, 6, 3, 1], [2, 2, 5, 0]], dtype)}
    four = (given[name] for name in ("q", "k", "cos", "sin"))
    plan = dualops.cuda.plan("rope", *four, positions=given["positions"], dim=R)
    clean = call(reference.rope, SPEC.inputs, given, dim=R)
    assert plan.choice.rung == "simt"
    plan = dualops.cuda.plan("rope", *given.values(), dim=R, kernel=rung)
    for wrong in (7, -1, 2**31 - 1, -(2**31)):
        given["positions"][1, 2] = wrong
        results = {f"{name}_rotated": np.zeros_like(given[name]) for name in ("q", "k")}
        (step,) = plan.steps
        launch(step, given, results)
        for y, x, right in zip(results.values(), (given["q"], given["k"]), clean, strict=True):
            assert np.isnan(y[1, :, 2, :R]).all()
            assert np.array_equal(y[1, :, 2, R:], x[1, :, 2, R:])
            y[1, :, 2] = right[1, :, 2]
            np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-6)


def test_where_positions_can_be_seen_they_are_looked_at():
    given = arrays(1, 2, 1, 3, 8, 8)
    positions = np.array([0, 1, 2])
    dualops.cuda.rope(**given, positions=positions)
    positions[1] = 3  # the plan is there already
    with pytest.raises(ValueError, match=r"^rope: positions has 3 at \(1,\), cos has Smax=3, expected 0 to 2$"):
        dualops.cuda.rope(**given, positions=positions)


@pytest.mark.parametrize("rung", SPEC.rungs)
@pytest.mark.parametrize(("D", "R"), [(16, 16), (7, 4)])
def test_in_place_gives_the_same_bits_and_the_same_arrays(D, R, rung, order):
    given = arrays(2, 3, 1, 2, D, R, "float16", tokens_first=True)
    tables = given["cos"], given["sin"]
    for function in (dualops.cuda.rope, dualops.cuda.rope_backward):
        q, k = given["q"].copy(order="K"), given["k"].copy(order="K")
        expected = function(q, k, *tables, dim=R, kernel=rung)
        found = function(q, k, *tables, dim=R, inplace=True, kernel=rung)
        assert found[0] is q and found[1] is k
        assert [x.tobytes() for x in found] == [x.tobytes() for x in expected]


@pytest.mark.parametrize("rung", SPEC.rungs)
def test_parts_of_one_projection_in_place(rung):
    projected = np.random.default_rng(0).standard_normal((2, 5, (3 + 1 + 1) * 8)).astype(np.float32)
    q, k, v = (part.reshape(2, 5, -1, 8).swapaxes(1, 2) for part in np.split(projected, [24, 32], axis=-1))
    cos, sin = reference.rope_tables(np.arange(5), 8)
    expected, untouched = dualops.cuda.rope(q, k, cos, sin, kernel=rung), v.copy()
    dualops.cuda.rope(q, k, cos, sin, inplace=True, kernel=rung)
    assert np.array_equal(q, expected[0]) and np.array_equal(k, expected[1]) and np.array_equal(v, untouched)


def test_in_place_refuses_what_it_would_spoil():
    given = arrays(2, 3, 3, 4, 8, 8)
    q, k, *tables = given.values()
    with pytest.raises(TypeError, match=r"^rope: inplace is True and out is given, expected one of them$"):
        dualops.cuda.rope(q, k, *tables, inplace=True, out=(q, k))
    with pytest.raises(TypeError, match=r"^rope: inplace is 1, expected True or False$"):
        dualops.cuda.rope(q, k, *tables, inplace=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^rope: out q_rotated overlaps k in memory"):
        dualops.cuda.rope(q, k, *tables, out=(k, q))
    with pytest.raises(ValueError, match=r"^rope: out q_rotated overlaps k in memory"):
        dualops.cuda.rope(q, q[:, 1:], *tables, inplace=True)
    with pytest.raises(ValueError, match=r"^rope: out q_rotated has strides .*overlap one another$"):
        dualops.cuda.rope(np.broadcast_to(q[:1], q.shape), k, *tables, inplace=True)


def test_a_plan_in_place_serves_no_other_call():
    """In place nothing is copied from R on; elsewhere it is."""
    given = arrays(1, 2, 1, 3, 16, 8)
    q, k, *tables = given.values()
    expected = reference.rope(**given, dim=8)
    one, two = q.copy(), k.copy()
    truth: Any = np.True_
    dualops.cuda.rope(one, two, *tables, dim=8, inplace=truth)
    out = np.zeros_like(q), np.zeros_like(k)
    dualops.cuda.rope(q, k, *tables, dim=8, out=out)
    for found in ((one, two), out):
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_functions_of_half_turns_leave_whole_turns_out_exactly():
    numbers = [0.0, 0.5, 1.0, 1.5, 1e-9, -0.25, 12345.625, 2.0**40 + 0.5, -(2.0**40) - 0.125]
    numbers += np.random.default_rng(0).uniform(-1e6, 1e6, 200).tolist()
    for x in numbers:
        rest = float(Fraction(x) % 2)  # exact but for the last rounding
        assert abs(cospi_f64(np.float64(x)) - math.cos(math.pi * rest)) < 2e-15, x
        assert abs(sinpi_f64(np.float64(x)) - math.sin(math.pi * rest)) < 2e-15, x
    assert pow_f64(np.float64(10000.0), np.float64(-0.75)) == pytest.approx(1e-3, rel=1e-15)


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_tables_of_large_positions_are_exact(dtype):
    positions = np.array([[100_003, 999_983, 5], [-77_777, 2_000_003, 131_071]], dtype)
    for scaling in SCALINGS:
        found = dualops.cuda.rope_tables(positions, 64, base=500000.0, scaling=scaling)
        exact = reference.rope_tables(positions, 64, base=500000.0, scaling=scaling, dtype="float64")
        for one, two in zip(found, exact, strict=True):
            half_a_bit = 2.0**-25 * 2.0 ** max(0.0, np.ceil(np.log2(np.abs(two).max())))
            assert one.dtype == np.float32 and np.abs(one - two).max() <= half_a_bit * 1.001
