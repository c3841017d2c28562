"""Arrays and options for attention on tensor cores, and its results compared with truth."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import dualops.cuda
from dualops import reference
from dualops.spec import OPERATORS, compare
from dualops.spec.attention.cases import bent, woven

BFLOAT16 = ml_dtypes.bfloat16
FLOOR = OPERATORS["flash_attention"].floor


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(BFLOAT16)


def widened(value: Any) -> Any:
    """An array of floats as float64."""
    return value.astype(np.float64) if getattr(value, "dtype", None) in (BFLOAT16, np.float16, np.float32) else value


def checked(found: Any, function: Callable[..., Any], *arrays: np.ndarray, **params: Any) -> None:
    """o, or o and lse, by the spec's rule of accuracy; NaN and infinities where truth has them.

    function: of `dualops.reference`.
    """
    named = dict(zip(("o", "lse"), found if isinstance(found, tuple) else (found,)))
    wide = {name: widened(value) for name, value in params.items()}
    truths = function(*map(widened, arrays), **wide, return_lse=True)
    baselines = function(*arrays, **params, return_lse=True)
    for (name, actual), truth, baseline in zip(named.items(), truths, baselines):
        result = compare(actual, truth, baseline, dtype=str(arrays[0].dtype), floor=FLOOR, name=name)
        assert result.passed, result.message


def an_infinite_key_is_capped(D: int, rung: str) -> None:
    """Products of -inf that no mask made have scores of -softcap, and a share of dv."""
    q, k, v, do = (numbers(1, 1, 40, D, seed=seed) for seed in range(4))
    k[0, 0, 30, 3], q[..., 3] = -np.inf, np.abs(q[..., 3])
    o, lse = reference.flash_attention(q, k, v, return_lse=True, softcap=2.0)
    arrays = (q, k, v, o, lse, do)
    found = dualops.cuda.flash_attention_backward(*arrays, softcap=2.0, kernel=rung)
    baselines = reference.flash_attention_backward(*arrays, softcap=2.0)
    truths = reference.flash_attention_backward(*map(widened, arrays), softcap=2.0)
    assert np.isfinite(truths[2]).all() and truths[2][0, 0, 30].any()
    for name, actual, truth, baseline in zip(("dq", "dk", "dv"), found, truths, baselines):
        result = compare(actual, truth, baseline, dtype="bfloat16", floor=FLOOR, name=name)
        assert result.passed, result.message


def options_for(H: int, Sq: int, Sk: int) -> list[dict[str, Any]]:
    """Calls that together have each of the options, for this number of heads, queries and keys."""
    sinks, slopes = np.linspace(-1, 4, H, dtype=np.float32), np.linspace(0.01, 0.04, H, dtype=np.float32)
    return [
        {"alibi_slopes": slopes, "softcap": 2.0, "dropout_p": 0.3, "seed": 7},
        {"sinks": sinks, "window": (40, None), "causal": True},
        {"bias": numbers(H, Sq, Sk, seed=3), "key_padding_mask": np.arange(Sk)[None] % 3 != 1},
        {"score_mod": bent, "mask_mod": woven},
    ]


def named(params: dict[str, Any]) -> str:
    """The id of a test with these options."""
    return "-".join(params) or "plain"
