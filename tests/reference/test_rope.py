"""rope and its tables in NumPy: against loops over numbers, NaN, in place."""

import math
from typing import Any

import numpy as np
import pytest

from dualops import reference
from dualops.spec import OPERATORS
from dualops.spec.meta import FLOATS, numpy_dtype
from tests.checks import call, gradient_inputs
from tests.problems import random_problems, values

SPEC, SPEC_TABLES = OPERATORS["rope"], OPERATORS["rope_tables"]
LLAMA3 = ("llama3", 8.0, 1.0, 4.0, 8192.0)
RNG = np.random.default_rng(0)


def tables(positions: Any, dim: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    return reference.rope_tables(np.asarray(positions, np.int64), dim, dtype="float64", **options)


def problems(seed: int, count: int = 40, **options: Any) -> Any:
    return random_problems("rope", seed, count, max_elements=500, **options)


def rotary(arrays: dict[str, np.ndarray], params: dict[str, Any]) -> int:
    """R of a call."""
    return params.get("dim", next(iter(arrays.values())).shape[-1])


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, positions: np.ndarray | None, params: Any, turn: int):
    """x rotated number by number, by complex multiplication."""
    y = x.copy()
    B, heads, S, _ = x.shape
    half, interleaved = rotary({"x": x}, params) // 2, params["interleaved"]
    for b, h, s, i in np.ndindex(B, heads, S, half):
        row = s if positions is None else positions[s] if positions.ndim == 1 else positions[b, s]
        at = (row, i) if cos.ndim == 2 else (b % cos.shape[0], row, i)
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        pair = complex(x[b, h, s, first], x[b, h, s, second]) * complex(cos[at], turn * sin[at])
        y[b, h, s, first], y[b, h, s, second] = pair.real, pair.imag
    return y


def test_rotation_and_gradient_number_by_number():
    forms = set()
    for case in problems(1, 120, dtypes=("float64",)):
        for backward in (False, True):
            arrays = gradient_inputs(SPEC, case) if backward else values(SPEC, case)
            one, two, cos, sin, *positions = arrays.values()
            function = reference.rope_backward if backward else reference.rope
            found = call(function, SPEC.gradient_inputs if backward else SPEC.inputs, arrays, **case.params)
            for x, y in zip((one, two), found, strict=True):
                rows = positions[0] if positions else None
                expected = turned(x, cos, sin, rows, case.params, -1 if backward else 1)
                np.testing.assert_allclose(y, expected, rtol=1e-14, atol=1e-14)
            wide = 0 < rotary(arrays, case.params) == cos.shape[-1]
            forms.add((cos.ndim, positions[0].ndim if positions else 0, case.params["interleaved"], wide))
    assert len(forms) == 12


@pytest.mark.parametrize("dtype", FLOATS)
def test_arithmetic_is_float32_and_rounds_once(dtype):
    for case in problems(2, 30, dtypes=(dtype,)):
        arrays = values(SPEC, case)
        found = call(reference.rope, SPEC.inputs, arrays, **case.params)
        wide = np.float64 if dtype == "float64" else np.float32
        arrays |= {name: x.astype(wide) for name, x in arrays.items() if name != "positions"}
        exact = call(reference.rope, SPEC.inputs, arrays, **case.params)
        for one, two in zip(found, exact, strict=True):
            assert one.dtype == numpy_dtype(dtype) and one.tobytes() == two.astype(one.dtype).tobytes()


def test_a_nan_poisons_its_pair_and_a_row_of_the_tables_its_token():
    q, k = RNG.standard_normal((2, 2, 3, 5, 8))
    cos, sin = tables(np.arange(5), 6)
    clean = reference.rope(q, k, cos, sin, dim=6)[0]
    q[1, 2, 3, 4] = np.nan
    struck = np.isnan(reference.rope(q, k, cos, sin, dim=6)[0])
    assert np.argwhere(struck).tolist() == [[1, 2, 3, 1], [1, 2, 3, 4]]
    q[1, 2, 3, 4], cos[2] = 1, np.nan
    poisoned = reference.rope(q, k, cos, sin, dim=6)[0]
    assert np.isnan(poisoned[:, :, 2, :6]).all()
    kept = np.delete(poisoned, 2, 2)
    assert np.isfinite(kept).all() and np.array_equal(kept[0], np.delete(clean, 2, 2)[0])


@pytest.mark.parametrize("dtype", FLOATS)
def test_in_place_is_the_same_in_the_same_arrays(dtype):
    for case in problems(6, 20, dtypes=(dtype,)):
        for function, backward in ((reference.rope, False), (reference.rope_backward, True)):
            arrays = gradient_inputs(SPEC, case) if backward else values(SPEC, case)
            inputs = SPEC.gradient_inputs if backward else SPEC.inputs
            expected = [x.tobytes() for x in call(function, inputs, arrays, **case.params)]
            found = call(function, inputs, arrays, **case.params, inplace=True)
            first, second, *_ = arrays.values()
            assert found[0] is first and found[1] is second
            assert [x.tobytes() for x in found] == expected


def test_in_place_needs_memory_for_each_element():
    cos, sin = tables(np.arange(5), 8)
    q = RNG.standard_normal((2, 3, 5, 8))
    one = np.broadcast_to(q[:1], q.shape)
    with pytest.raises(ValueError, match=r"^rope: out q_rotated has strides .*: its elements overlap one another$"):
        reference.rope(one, q, cos, sin, inplace=True)
    with pytest.raises(ValueError, match=r"^rope_backward: out dq overlaps dk_rotated in memory"):
        reference.rope_backward(q, q[:, 1:], cos, sin, inplace=True)
    with pytest.raises(TypeError, match=r"^rope: inplace is 1, expected True or False$"):
        reference.rope(q, q.copy(), cos, sin, inplace=1)  # pyright: ignore[reportArgumentType]


def frequency(i: int, dim: int, base: float, scaling: tuple[Any, ...] | None) -> float:
    """What Hugging Face's functions of rope_type compute, with wavelengths and branches."""
    plain = 1.0 / base ** (2 * i / dim)
    if scaling is None:
        return plain
    name, factor, *rest = scaling
    if name == "linear":
        return plain / factor
    if name == "dynamic":
        original, length = rest
        longer = base * (factor * max(length, original) / original - (factor - 1)) ** (dim / (dim - 2))
        return 1.0 / longer ** (2 * i / dim)
    if name == "yarn":
        original, fast, slow, *_, truncate = rest
        ends = [dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow)]
        first, last = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
        first, last = max(first, 0), min(last, dim - 1)
        ramp = min(max((i - first) / (last - first or 0.001), 0), 1)
        return plain / factor * ramp + plain * (1 - ramp)
    low, high, original = rest
    wavelength = 2 * math.pi / plain
    if wavelength < original / high:
        return plain
    if wavelength > original / low:
        return plain / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * plain / factor + smooth * plain


SCALINGS = [
    None,
    ("linear", 4.0),
    LLAMA3,
    ("llama3", 32.0, 0.5, 3.0, 64.0),
    ("yarn", 40.0, 4096, 32.0, 1.0, 1.3, True),
    ("yarn", 4.0, 64, 8.0, 0.5, 0.7, False),
    ("dynamic", 2.0, 2048, 5000),
    ("dynamic", 2.0, 2048, 100),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("dim", "base"), [(128, 500000.0), (6, 10000.0), (4, 100.0)])
def test_tables_number_by_number(dim, base, scaling, dtype):
    magnitude = scaling[5] if scaling and scaling[0] == "yarn" else 1.0
    positions = np.array([[0, 1, 2, 17, 4095], [131071, -3, 999_999, 65536, 100_000]])
    found = reference.rope_tables(positions, dim, base=base, scaling=scaling, dtype=dtype)
    for table, function in zip(found, (math.cos, math.sin), strict=True):
        assert table.shape == (2, 5, dim // 2) and table.dtype == numpy_dtype(dtype)
        for *at, i in np.ndindex(table.shape):
            exact = magnitude * function(int(positions[tuple(at)]) * frequency(i, dim, base, scaling))
            eps = 2.0 ** {"float32": -23, "float64": -32, "float16": -10, "bfloat16": -7}[dtype]
            assert abs(float(table[(*at, i)]) - exact) < 1e-9 + 0.5 * max(magnitude, 1.0) * eps


def test_dicts_in_hugging_faces_words():
    positions = np.arange(50)
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    same = [
        ({"rope_type": "llama3", **dict(zip(names, LLAMA3[1:]))}, LLAMA3),
        ({"type": "linear", "factor": 4}, ("linear", 4.0)),
        ({"rope_type": "default"}, None),
        ({"rope_type": "default", "rope_theta": 10000.0, "factor": None}, None),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 512}, ("yarn", 4, 512)),
        (
            {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 64, "seq_len": 99},
            ("dynamic", 2.0, 64, 99),
        ),
        (next(param.domain for param in SPEC_TABLES.params if param.name == "scaling")(LLAMA3), LLAMA3),
    ]
    for given, meant in same:
        one, two = (reference.rope_tables(positions, 16, scaling=scaling) for scaling in (given, meant))
        assert one[0].tobytes() == two[0].tobytes() and one[1].tobytes() == two[1].tobytes()


def test_what_else_such_a_dict_says():
    positions = np.arange(50)
    theta = reference.rope_tables(positions, 16, scaling={"rope_type": "default", "rope_theta": 500.0})
    assert theta[0].tobytes() == reference.rope_tables(positions, 16, base=500.0)[0].tobytes()
    partial = reference.rope_tables(positions, 64, scaling={"rope_type": "default", "partial_rotary_factor": 0.25})
    assert partial[0].tobytes() == reference.rope_tables(positions, 16)[0].tobytes()
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    for more, expected in (
        ({}, 0.1 * math.log(40) + 1),
        ({"factor": 0.5}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
        ({"mscale": 0.707, "mscale_all_dim": 1.0, "attention_factor": 2.5}, 2.5),
    ):
        cos, sin = reference.rope_tables(positions, 16, scaling={**yarn, **more}, dtype="float64")
        np.testing.assert_allclose(np.hypot(cos, sin), expected, rtol=1e-14)
