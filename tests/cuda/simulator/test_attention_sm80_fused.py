"""Attention's whole gradient by one kernel of the sm80 rung."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda import simulator
from dualops.cuda.flash_attention.sm80 import backward as sm80_backward, fused_launch
from dualops.cuda.flash_attention.sm80.fused_config import Sm80FusedConfig
from dualops.cuda.tile.ordered_sums import pass_on
from dualops.spec import OPERATORS, Case
from dualops.spec.attention.cases import paired
from tests.checks import check
from tests.cuda.configs import Change, changed
from tests.cuda.simulator.attention import numbers
from tests.wrong.turns import in_turns

gradient: Any = partial(dualops.cuda.flash_attention_backward, kernel="sm80")


def fused(config: Sm80FusedConfig | None = None, *others: Change) -> AbstractContextManager[None]:
    """Inside the with statement problems as small as a test's are done so, by this Config if one is given."""
    instead: dict[str, Any] = {"LEAST_TILES": 1}
    if config is not None:
        instead["fused_configs"] = lambda *_: iter([(config, "alone")])
    alone = {"dq_configs": lambda *_: iter(())}
    return changed("flash_attention", (fused_launch, instead), (sm80_backward, alone), *others)


@pytest.mark.parametrize(
    ("q", "k", "config", "dtype", "params"),
    [
        ((1, 1, 70, 128), (1, 130), None, "float16", {"causal": True}),
        ((1, 1, 40, 128), (1, 40), Sm80FusedConfig(stages=2, ascends=True), "bfloat16", {}),
        ((1, 2, 20, 64), (1, 40), None, "bfloat16", {"sinks": True}),
        ((1, 1, 300, 64), (1, 70), None, "bfloat16", {"causal": True}),
    ],
    ids=str,
)
def test_against_truth(q, k, config, dtype, params):
    """Ragged ends, heads of a group, queries that see nothing, tiles that nobody adds to."""
    shapes, params = paired(params, q, k, q[-1])
    with fused(config):
        case = Case("fused", dtype, shapes, params)
        check(OPERATORS["flash_attention"], case, gradient, backward=True, ways=("given",))


def test_what_a_mask_hides_stays_where_it_is():
    """NaN and infinities among the values."""
    shapes, params = paired({"causal": True}, (1, 1, 20, 64), (1, 50), 64)
    with fused():
        case = Case("fused", "bfloat16", shapes, params)
        check(OPERATORS["flash_attention"], case, gradient, backward=True, ways=("given",), special=True)


def arrays_for(B: int, H: int, Sq: int, Sk: int) -> list[np.ndarray]:
    """q, k, v, o, lse and do of heads of 64."""
    q, do = (numbers(B, H, Sq, 64, seed=seed) for seed in (0, 3))
    k, v = (numbers(B, H, Sk, 64, seed=seed) for seed in (1, 2))
    o, lse = reference.flash_attention(q, k, v, return_lse=True, causal=True)
    return [q, k, v, o, lse, do]


def test_the_order_of_threads_changes_nothing():
    """Blocks draw their work, so that none waits for one that has not begun; and add in turns."""
    arrays = arrays_for(1, 1, 40, 140)
    with fused(None, *in_turns()):
        first = gradient(*arrays, causal=True)
        with simulator.order("shuffled"):
            again = gradient(*arrays, causal=True)
    assert all(np.array_equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize(
    ("verb", "instead", "told"),
    [
        ("pass_on", lambda flags, flag, count: None, r"wait for 1 in flags\[1\], which is 0"),
        ("pass_on", lambda flags, flag, count: pass_on(flags, flag, count + 1), "which is 2"),
        ("all_added", lambda flags, flag, count: None, "when it is not its block's turn"),
    ],
    ids=["missing", "another count", "nobody waits"],
)
def test_who_does_not_keep_the_order(verb, instead, told):
    with fused(None, *in_turns(**{verb: instead})), pytest.raises(RuntimeError, match=told):
        gradient(*arrays_for(1, 1, 20, 140), causal=True)


@pytest.mark.parametrize(
    ("D", "Sq", "Sk", "params", "whole"),
    [
        (128, 2048, 2048, {}, True),
        (64, 2048, 2048, {"causal": True}, True),
        (128, 2048, 2048, {"causal": True, "window": (100, None)}, False),
        (128, 2048, 2048, {"softcap": 20.0}, False),
        (96, 2048, 2048, {}, False),
        (128, 192, 4096, {}, False),
        (64, 384, 4096, {}, False),
    ],
)
def test_who_is_served(D, Sq, Sk, params, whole):
    """Few queries would be waited for by one block after another."""
    q, k = (np.empty((1, 2, S, D), np.float16) for S in (Sq, Sk))
    lse = np.empty((1, 2, Sq), np.float32)
    arrays = {"q": q, "k": k, "v": k, "o": q, "lse": lse, "do": q}
    plan = dualops.cuda.plan("flash_attention", **arrays, backward=True, kernel="sm80", **params)
    assert isinstance(plan.choice.config, fused_launch.FusedConfigs) == whole
    assert ("sums" in plan.choice.workspace) == whole
