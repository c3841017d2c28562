"""Arrays and calls of retention's kernels that several tests have, and the table of calls on Hopper's tensor cores."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import dualops.cuda
from dualops import reference
from dualops.cuda.retention import sm80, sm90
from dualops.cuda.retention.sm80.config import Sm80Config, Sm80Rows, Sm80States
from dualops.spec import Case, compare, retention as SPEC
from dualops.spec.meta import numpy_dtype
from dualops.spec.retention_cases import options_of
from tests.cuda.configs import Change, alone

# as few tokens of a chunk as fill a block's rows, so that small problems have several
SMALL = alone(sm80, Sm80Config(64, Sm80Rows(block_kv=32), Sm80States()))


def numbers(*shape: int, seed: int, dtype: str = "bfloat16") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(dtype))


def calls_of(rung: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """retention and its gradient on a rung."""
    return partial(dualops.cuda.retention, kernel=rung), partial(dualops.cuda.retention_backward, kernel=rung)


def expected(arrays: Sequence[np.ndarray], **named: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Truth and baseline of each result, or where there are four arrays of each gradient."""
    function = reference.retention_backward if len(arrays) == 4 else reference.retention
    wide = {name: x.astype(np.float64) for name, x in named.items()}
    found = function(*(x.astype(np.float64) for x in arrays), **wide), function(*arrays, **named)
    return zip(*(each if isinstance(each, tuple) else (each,) for each in found), strict=True)


def held(found: np.ndarray, truth: np.ndarray, baseline: np.ndarray, *, dtype: str = "bfloat16") -> None:
    """By the spec's rule of accuracy; what is not finite in truth is not here: by other chunks an infinity is a NaN."""
    there = np.isfinite(truth)
    assert np.array_equal(np.isfinite(found.astype(np.float64)), there) and there.any()
    result = compare(found[there], truth[there], baseline[there], dtype=dtype, floor=SPEC.floor)
    assert result.passed, result.message


# --- Hopper's tensor cores: each row runs in the simulator; its kernels are compiled for the widest heads

STATES: dict[str, Any] = {"states": 1, "return_state": True}


class Row(NamedTuple):
    """A call in bfloat16. segments: how many a sequence has, instead of what the rung chooses."""

    q: tuple[int, int, int, int]
    Dv: int
    options: Mapping[str, Any]
    backward: bool = False
    segments: int = 0

    @property
    def case(self) -> Case:
        shapes, params = options_of(self.q, self.Dv, **self.options)
        return Case("row", "bfloat16", shapes, params)

    @property
    def widest(self) -> Case:
        """The same for the widest heads of its kernel, which need the most registers."""
        D, Dv = (256, 512) if max(self.q[-1], self.Dv) > sm90.WIDEST else (sm90.WIDEST, sm90.WIDEST)
        return self._replace(q=(*self.q[:-1], D), Dv=Dv).case

    @property
    def changes(self) -> tuple[Change, ...]:
        return ((sm90, {"segments_of": lambda *_: self.segments}),) if self.segments else ()


ROWS = (
    # whole and ragged chunks, with an initial state, a final one, both and neither; heads with a gamma have 1 and 0.01
    Row((1, 2, 300, 16), 72, {**STATES, "gamma": 1}),
    Row((2, 1, 128, 128), 128, STATES),
    Row((1, 2, 129, 64), 64, {"return_state": True, "gamma": 1}),
    Row((1, 1, 40, 8), 8, {"scale": -0.7}),
    Row((1, 1, 128, 128), 128, {}),
    Row((1, 2, 130, 16), 72, {**STATES, "gamma": 1}, True),
    Row((1, 1, 257, 72), 8, {"states": 1}, True),
    Row((2, 1, 40, 64), 64, {"return_state": True, "scale": -0.7}, True),
    Row((1, 1, 128, 128), 128, {}, True),
    # a decay of each step, and its own gradient
    Row((1, 1, 130, 8), 16, {"steps": 1}),
    Row((1, 2, 300, 16), 72, {**STATES, "steps": 1}),
    Row((1, 1, 129, 64), 64, {"return_state": True, "steps": 1}),
    Row((1, 1, 257, 72), 8, {"states": 1, "steps": 1}, True),
    Row((2, 1, 40, 64), 64, {"return_state": True, "scale": -0.7, "steps": 1}, True),
    Row((1, 1, 1, 8), 8, {"steps": 1}, True),
    Row((1, 1, 1, 8), 8, {**STATES, "steps": 1}, True),
    Row((1, 1, 128, 128), 128, {**STATES, "steps": 1}, True),
    Row((1, 2, 300, 16), 72, {"steps": 1}, True),
    Row((2, 1, 129, 72), 8, {**STATES, "steps": 1}, True),
    Row((1, 1, 256, 64), 128, {"steps": 1}, True),
    # segments of a chunk or two, of which the last one has a few tokens, or none
    Row((1, 1, 270, 32), 24, {**STATES, "gamma": 1}, False, 2),
    Row((1, 1, 270, 32), 24, {**STATES, "gamma": 1}, True, 2),
    Row((1, 1, 390, 32), 24, {}, False, 3),
    Row((1, 1, 270, 32), 24, {**STATES, "steps": 1}, False, 2),
    Row((1, 1, 270, 32), 24, {**STATES, "steps": 1}, True, 2),
    Row((1, 1, 390, 16), 24, {"steps": 1}, True, 3),
    Row((1, 1, 140, 16), 24, {**STATES, "steps": 1}, True, 3),
)
WIDE_ROWS = (
    # one slice of columns, or two, of which the second has a few; with Dv above 256 warpgroups split the keys of dq
    Row((1, 1, 70, 16), 136, {**STATES, "gamma": 1}),
    Row((1, 2, 130, 200), 72, {}),
    Row((1, 1, 64, 256), 8, {"return_state": True, "scale": -0.7}),
    Row((1, 1, 70, 136), 40, STATES, True),
    Row((1, 1, 66, 8), 264, {"states": 1, "gamma": 1}, True),
    Row((1, 1, 10, 136), 264, {}, True),
    Row((1, 1, 142, 8), 136, {**STATES, "gamma": 1}, False, 2),
    Row((1, 1, 142, 8), 264, {**STATES, "gamma": 1}, True, 2),
)
