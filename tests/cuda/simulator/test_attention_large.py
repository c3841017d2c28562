"""Large finite scores on every rung: `tests.cuda.large_scores`, and magnitudes over the whole range of exponents."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dualops.spec import OPERATORS
from tests.cuda.large_scores import CALLS, DTYPES, Shape, check, drawn, qkv

SHAPE = Shape(24, 7, 70)  # another scale than a power of two
SM80 = ("padded", "padded_rows", "by_1e5_causal", "sink_tiny_scale")
PLACES = [(call, "sm90") for call in CALLS] + [(call, "sm80") for call in CALLS if call.name in SM80]


@pytest.mark.parametrize(("call", "rung"), PLACES, ids=[f"{call.name}-{rung}" for call, rung in PLACES])
def test_large_scores(call, rung):
    check(*drawn(call, "bfloat16", SHAPE), rung, finite=call.finite)


LOG2_MAX = 126  # of scores that are finite in float32, with room for the sum of a product


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, int, dict[str, Any]]:
    """dtype, seed, and exponents of 2 by which q, k, v, scale, bias and sinks are drawn."""
    dtype = draw(st.sampled_from(["bfloat16", "float32"]))
    q = draw(st.integers(-60, 60))
    k = draw(st.integers(-60, min(60, LOG2_MAX - 10 - q)))
    # neither a score nor a gradient's number is too large or too small for a float32
    scale = draw(st.integers(max(-100, -90 - q, -90 - k), max(-90 - min(q, k), min(100, LOG2_MAX - 10 - q - k))))
    bias = draw(st.none() | st.integers(-100, LOG2_MAX - 10))
    sinks = draw(st.none() | st.integers(-100, LOG2_MAX - 10))
    by = {"q": q, "k": k, "scale": scale, "bias": bias, "sinks": sinks, "v": draw(st.integers(-60, 60))}
    return dtype, draw(st.integers(0, 2**16)), by


@pytest.mark.parametrize("rung", OPERATORS["flash_attention"].rungs)
@settings(max_examples=8, deadline=None)
@given(call=calls())
def test_any_magnitude(rung, call):
    dtype, seed, by = call
    if rung in ("sm80", "sm90"):  # which have none for float32, of a gradient or of few queries
        dtype = "bfloat16"
    rng = np.random.default_rng(seed)
    arrays = qkv(Shape(16, 5, 20), rng)
    for name in ("q", "k", "v"):
        arrays[name] = arrays[name] * 2.0 ** by[name]
    if by["bias"] is not None:  # all different in bfloat16: no ties
        arrays["bias"] = (rng.permuted(np.tile(np.arange(20.0) - 9, (5, 1)), axis=1)) * 2.0 ** by["bias"]
    if by["sinks"] is not None:
        arrays["sinks"] = rng.standard_normal(2) * 2.0 ** by["sinks"]
    params = {"scale": 1.37 * 2.0 ** by["scale"], "causal": bool(rng.integers(2))}
    check(
        {name: x.astype(np.float32 if name == "sinks" else DTYPES[dtype]) for name, x in arrays.items()}, params, rung
    )
