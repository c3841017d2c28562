"""Attention's whole gradient by one kernel of the sm90 rung."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda import simulator
from dualops.cuda.flash_attention.sm90 import backward as sm90_backward, fused_launch
from dualops.cuda.flash_attention.sm90.dkv_config import FusedConfig
from dualops.cuda.tile.warpgroup import ROWS
from dualops.spec import OPERATORS, Case
from dualops.spec.attention.cases import paired
from tests.checks import check
from tests.cuda.configs import changed
from tests.cuda.simulator.attention import an_infinite_key_is_capped, numbers

gradient: Any = partial(dualops.cuda.flash_attention_backward, kernel="sm90")


def fused(config: FusedConfig | None = None, operator: str = "flash_attention") -> AbstractContextManager[None]:
    """Inside the with statement problems as small as a test's are done so, by this Config if one is given."""
    instead: dict[str, Any] = {"LEAST_TILES": 1}
    if config is not None:
        instead["fused_configs"] = lambda *_: iter([(config, "alone")])
    alone = {"dq_configs": lambda *_: iter(())}
    return changed(operator, (fused_launch, instead), (sm90_backward, alone))


def checked(
    q: tuple[int, ...],
    k: tuple[int, int],
    Dv: int,
    config: FusedConfig | None = None,
    dtype: str = "bfloat16",
    special: bool = False,
    **params: Any,
) -> None:
    """The gradient of a call against truth. q: B, H, Sq, D; k: heads and tokens; params as `paired` takes them."""
    shapes, params = paired(params, q, k, Dv)
    with fused(config):
        case = Case("fused", dtype, shapes, params)
        check(OPERATORS["flash_attention"], case, gradient, backward=True, ways=("given",), special=special)


def arrays_for(D: int, B: int, H: int, Sq: int, Sk: int, **params: Any) -> list[np.ndarray]:
    """q, k, v, o, lse and do of heads of this width."""
    q, do = (numbers(B, H, Sq, D, seed=seed) for seed in (0, 3))
    k, v = (numbers(B, H, Sk, D, seed=seed) for seed in (1, 2))
    o, lse = reference.flash_attention(q, k, v, return_lse=True, **params)
    return [q, k, v, o, lse, do]


# heads of 128 in tiles of 64 queries, and heads of 64 in tiles of two parts
both_widths = pytest.mark.parametrize("D", [128, 64])


@pytest.mark.parametrize(("D", "Dv"), [(128, 128), (96, 40), (72, 120), (64, 64), (40, 24)])
def test_widths(D, Dv):
    checked((1, 1, 150, D), (1, 140), Dv)


def test_float16():
    checked((1, 1, 70, 128), (1, 130), 128, dtype="float16", causal=True)


@both_widths
def test_a_single_place_for_dq(D):
    config = FusedConfig(ROWS * 128 // D, dq_places=1)
    checked((1, 1, 130 * 128 // D, D), (1, 200), 64, config, causal=True)


@pytest.mark.parametrize(
    ("D", "params"),
    [(128, {"causal": True}), (128, {"causal": "top_left"}), (128, {"sinks": True}), (64, {"causal": True})],
    ids=str,
)
@pytest.mark.parametrize(("Sq", "Sk"), [(100, 300), (300, 100)])
def test_masks_and_sinks(Sq, Sk, D, params):
    """Some queries see nothing, where there are more of them than keys."""
    checked((1, 1, Sq, D), (1, Sk), 64, **params)


@both_widths
@pytest.mark.parametrize(
    "params",
    [
        {"alibi_slopes": True, "causal": True},
        {"softcap": 2.0, "causal": True},  # some scores are near, of tiles that are not cut, and some are not
        {"softcap": 50.0},
        {"dropout_p": 0.3, "sinks": True},
        {"key_padding_mask": True},
        {"mask_mod": True},
        {"score_mod": True, "causal": True},
    ],
    ids=str,
)
def test_options(D, params):
    checked((1, 2, 90, D), (1, 140), 64, **params)


@pytest.mark.parametrize(("over", "causal"), [("full", False), ("heads", True)])
def test_a_bias_in_boxes(over, causal):
    """With its gradient."""
    checked((2, 2, 90, 128), (1, 136), 64, bias=over, causal=causal)


@both_widths
def test_heads_of_a_group(D):
    checked((1, 4, 70, D), (2, 140), 64, causal=True)


@both_widths
@pytest.mark.parametrize("params", [{"causal": True}, {"mask_mod": True}], ids=str)
def test_what_a_mask_hides_stays_where_it_is(D, params):
    """NaN and infinities among the values."""
    checked((1, 1, 20, D), (1, 135), 64, special=True, **params)


@both_widths
def test_minus_infinity_that_is_capped_is_none(D):
    with fused():
        an_infinite_key_is_capped(D, "sm90")


@pytest.mark.parametrize(("D", "Sq", "order"), [(128, 80, "reversed"), (64, 160, "shuffled")])
def test_the_order_of_blocks_changes_nothing(D, Sq, order):
    """They draw their work, so that none waits for one that has not begun."""
    arrays = arrays_for(D, 1, 1, Sq, 300, causal=True)
    with fused():
        first = gradient(*arrays, causal=True)
        with simulator.order(order):
            again = gradient(*arrays, causal=True)
    assert all(np.array_equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize(("D", "Sq"), [(128, 70), (64, 140)])
def test_a_sequence_alone_and_in_a_batch(D, Sq):
    """The same bits."""
    arrays = arrays_for(D, 2, 2, Sq, 200)
    with fused():
        together = gradient(*arrays)
        alone = gradient(*(x[1:2, 1:] for x in arrays))
    assert all(np.array_equal(a[1:2, 1:], b) for a, b in zip(together, alone))


@pytest.mark.parametrize(
    ("Sq", "Sk", "params", "whole"),
    [
        (2048, 2048, {}, True),
        (2048, 2048, {"causal": True}, True),
        (2048, 2048, {"causal": True, "window": (100, None)}, False),
        (2048, 2048, {"softcap": 20.0, "causal": True}, True),
        (2048, 2048, {"dropout_p": 0.1, "seed": 3}, True),
        (2048, 2048, {"softcap": 20.0, "dropout_p": 0.1, "seed": 3}, False),
        (64, 4096, {}, False),
    ],
)
def test_who_is_served(Sq, Sk, params, whole):
    """Few queries would be waited for by one block after another."""
    q, k = (np.empty((1, 2, S, 128), np.float16) for S in (Sq, Sk))
    lse = np.empty((1, 2, Sq), np.float32)
    plan = dualops.cuda.plan("flash_attention", q, k, k, o=q, lse=lse, do=q, backward=True, **params)
    assert isinstance(plan.choice.config, fused_launch.FusedConfigs) == whole
