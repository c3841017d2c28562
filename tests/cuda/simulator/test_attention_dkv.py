"""dk and dv of attention's sm90 rung."""

from __future__ import annotations

from typing import Any

import pytest

from dualops.cuda.flash_attention.sm90.dkv_config import DkvConfig
from dualops.spec.attention.cases import bent, woven
from tests.cuda.simulator.attention import an_infinite_key_is_capped
from tests.cuda.simulator.dkv import checked, checked_varlen, served

SMALL = DkvConfig(1, 16, 2)


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (96, 40), (16, 120)])
def test_widths(D, Dv):
    checked((1, 1, 150, D), (1, 140), Dv)


def test_float16():
    checked((1, 1, 70, 64), (1, 70), 64, dtype="float16", causal=True)


CONFIGS = [SMALL, DkvConfig(2, 48, 2), DkvConfig(2, 64, 4, overlap=False), DkvConfig(3, 32, 2)]


@pytest.mark.parametrize("config", CONFIGS)
def test_configs(config):
    checked((1, 1, 100, 64), (1, 200), 64, config, causal=True)


@pytest.mark.parametrize(
    "params",
    [
        {"causal": True},
        {"causal": "top_left"},
        {"window": (20, 5)},
        {"window": (30, None), "causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(("Sq", "Sk"), [(40, 150), (150, 40)])
def test_masks(Sq, Sk, params):
    checked((1, 1, Sq, 64), (1, Sk), 64, SMALL, **params)


def test_heads_of_a_group():
    checked((1, 4, 40, 64), (2, 70), 64, SMALL, causal=True)


@pytest.mark.parametrize(
    "params",
    [
        {"alibi_slopes": True, "bias": "full", "causal": True},
        {"sinks": True, "window": (20, 5), "key_padding_mask": True, "softcap": 2.0},
        {"score_mod": bent, "mask_mod": woven},
        {"dropout_p": 0.3, "softcap": 2.0, "causal": True},
    ],
    ids=lambda params: "-".join(params),
)
def test_options(params):
    """With a group of two heads, and ragged tiles."""
    checked((1, 2, 75, 40), (1, 69), 64, **params)


def test_what_a_mask_hides_stays_where_it_is():
    """NaN and infinities among the values."""
    params: dict[str, Any] = {"causal": True, "mask_mod": woven, "score_mod": bent}
    checked((1, 1, 18, 24), (1, 70), 40, SMALL, special=True, **params)


def test_minus_infinity_that_is_capped_is_none():
    with served(SMALL):
        an_infinite_key_is_capped(64, "sm90")


@pytest.mark.parametrize("causal", [False, True])
def test_sequences(causal):
    checked_varlen(64, 40, SMALL, causal=causal)
