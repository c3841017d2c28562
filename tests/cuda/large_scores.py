"""Attention whose scores are finite in float32 and large: every row has a softmax, and every gradient is finite."""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import dualops.cuda
from dualops import testing

Arrays = dict[str, np.ndarray]
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
FLOAT_MAX = float(np.finfo(np.float32).max)


def lowest(dtype: str) -> float:
    """What users write in a mask for a key that is not seen."""
    return float(ml_dtypes.finfo(DTYPES[dtype]).min)


class Shape(NamedTuple):
    """Of one batch of two heads."""

    D: int
    Sq: int
    Sk: int


class Large(NamedTuple):
    """A call. finite: of gradients no more is asked, since rows have several greatest scores, whose probabilities a
    float32 lse cannot hold, or nothing but rounding is left of a gradient.
    """

    name: str
    make: Callable[[str, Shape, np.random.Generator], tuple[Arrays, dict[str, Any]]]
    finite: bool = False


def qkv(shape: Shape, rng: np.random.Generator, by: float = 1.0) -> Arrays:
    q, k, v = (rng.standard_normal((1, 2, S, shape.D)) for S in (shape.Sq, shape.Sk, shape.Sk))
    return {"q": q * by, "k": k * by, "v": v}


def ones(dtype: str, shape: Shape, rng: np.random.Generator) -> tuple[Arrays, dict[str, Any]]:
    """Equal scores, the last tiles of keys wholly masked by a bias; dq is what rounding leaves of 0."""
    bias = np.zeros((1, 300))
    bias[:, 100:] = lowest(dtype)
    all_ones = np.ones((1, 1, 300, 16))
    return {"q": all_ones[:, :, :1], "k": all_ones, "v": rng.standard_normal(all_ones.shape), "bias": bias}, {}


def padded(dtype: str, shape: Shape, rng: np.random.Generator) -> tuple[Arrays, dict[str, Any]]:
    """Ordinary right padding: the last tiles of keys are wholly masked by a bias."""
    bias = np.zeros((1, 300))
    bias[:, 100:] = lowest(dtype)
    return {**qkv(Shape(16, shape.Sq, 300), rng), "bias": bias}, {}


def padded_rows(dtype: str, shape: Shape, rng: np.random.Generator) -> tuple[Arrays, dict[str, Any]]:
    """Left padding: the first rows are wholly masked by a bias, so that their o is the mean of v."""
    bias = rng.standard_normal((shape.Sq, shape.Sk))
    bias[:, shape.Sk // 2 :] = bias[:3] = lowest(dtype)
    return {**qkv(shape, rng), "bias": bias}, {}


def few_queries(dtype: str, shape: Shape, rng: np.random.Generator) -> tuple[Arrays, dict[str, Any]]:
    """Keys that are split; of one row all are masked by a bias, in splits of unequal length."""
    bias = rng.standard_normal((3, 600))
    bias[:, 300:] = bias[1] = lowest(dtype)
    return {**qkv(Shape(shape.D, 3, 600), rng), "bias": bias}, {}


def magnitude(by: float, **params: Any) -> Callable[..., tuple[Arrays, dict[str, Any]]]:
    return lambda dtype, shape, rng: (qkv(shape, rng, by), params)


def one_bias(value: Callable[[str], float]) -> Callable[..., tuple[Arrays, dict[str, Any]]]:
    """A key of each row has this bias."""

    def make(dtype: str, shape: Shape, rng: np.random.Generator) -> tuple[Arrays, dict[str, Any]]:
        bias = rng.standard_normal((shape.Sq, shape.Sk))
        bias[np.arange(shape.Sq), rng.integers(shape.Sk, size=shape.Sq)] = value(dtype)
        return {**qkv(shape, rng), "bias": bias}, {}

    return make


def sinks(values: tuple[float, float], by: float = 1.0, **params: Any) -> Callable[..., tuple[Arrays, dict[str, Any]]]:
    return lambda dtype, shape, rng: ({**qkv(shape, rng, by), "sinks": np.array(values)}, params)


def far(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * 1e30


CALLS = (
    Large("ones", ones, finite=True),
    Large("padded", padded),
    Large("padded_rows", padded_rows, finite=True),
    Large("few_queries", few_queries, finite=True),
    Large("by_30_causal", magnitude(30.0, causal=True)),
    Large("by_1e3", magnitude(1e3)),
    Large("by_2e4", magnitude(2e4)),
    Large("by_1e5_causal", magnitude(1e5, causal=True)),
    Large("by_1e15_window", magnitude(1e15, window=(30, 10))),
    Large("tiny_scale", magnitude(1e15, scale=1e-33)),
    Large("bias_max", one_bias(lambda dtype: -lowest(dtype))),
    Large("sink_max", sinks((FLOAT_MAX, -FLOAT_MAX))),
    Large("sink_beside_large", sinks((1e30, -1e9), by=1e5)),
    Large("sink_tiny_scale", sinks((0.5, 1.0), scale=1e-38)),
    Large("score_mod", magnitude(1.0, score_mod=far, causal=True)),
    Large("softcap_1e10", magnitude(1e5, softcap=1e10)),
)


def drawn(call: Large, dtype: str, shape: Shape) -> tuple[Arrays, dict[str, Any]]:
    wide, params = call.make(dtype, shape, np.random.default_rng(len(call.name)))
    return {name: x.astype(np.float32 if name == "sinks" else DTYPES[dtype]) for name, x in wide.items()}, params


def check(
    arrays: Arrays,
    params: dict[str, Any],
    rung: str | None,
    *,
    finite: bool = False,
    put: Callable[[np.ndarray], Any] = np.asarray,
) -> None:
    """o and lse by the rule of accuracy, and the gradients; finite ones where `finite`. put: to a device's array."""
    given, seen = {name: put(x) for name, x in arrays.items()}, {**params, "return_lse": True}
    o, lse = dualops.cuda.flash_attention(**given, **seen, kernel=rung)
    testing.check("flash_attention", (o, lse), arrays, seen)
    do = np.random.default_rng(1).standard_normal(o.shape).astype(arrays["q"].dtype)
    saved = {**given, "o": o, "lse": lse, "do": put(do)}
    found = dualops.cuda.flash_attention_backward(**saved, **seen, kernel=rung)
    if finite:
        for gradient in found:
            assert np.isfinite(testing.arrays.to_numpy(gradient).astype(np.float64)).all()
        return
    testing.check("flash_attention", found, {**arrays, "do": do}, seen, backward=True)
