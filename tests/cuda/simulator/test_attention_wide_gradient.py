"""The gradient of wide heads on attention's sm90 rung: dk and dv a warpgroup each, dq with its sums zeroed."""

from __future__ import annotations

import pytest

from dualops.cuda import simulator
from dualops.cuda.flash_attention.sm90.config import dq_configs
from dualops.cuda.flash_attention.sm90.dkv_config import DkvApartConfig, DkvConfig, dkv_configs
from dualops.spec.attention.cases import bent, woven
from tests.cuda.simulator.dkv import checked, checked_varlen

SMALL = DkvApartConfig(16, 3)


@pytest.mark.parametrize(("D", "Dv"), [(256, 256), (192, 128), (136, 184), (72, 256)])
def test_widths(D, Dv):
    """With the tiles that are chosen."""
    checked((1, 1, 110, D), (1, 140), Dv, causal=True)


def test_float16():
    checked((1, 1, 70, 192), (1, 70), 192, SMALL, dtype="float16", causal=True)


@pytest.mark.parametrize(
    ("config", "order"),
    [
        (DkvApartConfig(16, 2, 1), "reversed"),
        (DkvApartConfig(64, 2, exact=True), "forward"),
        (DkvApartConfig(32, 4), "reversed"),
    ],
)
def test_configs(config, order):
    with simulator.order(order):
        checked((1, 1, 140, 64), (1, 100), 64, config)


@pytest.mark.parametrize("params", [{"causal": "top_left"}, {"window": (20, 5)}], ids=str)
@pytest.mark.parametrize(("Sq", "Sk"), [(40, 150), (150, 40)])
def test_masks(Sq, Sk, params):
    """Some keys are seen by nobody."""
    checked((1, 1, Sq, 64), (1, Sk), 136, SMALL, **params)


def test_heads_of_a_group():
    checked((1, 4, 20, 136), (2, 70), 40, SMALL, causal=True)


@pytest.mark.parametrize(
    "params",
    [
        {"alibi_slopes": True, "causal": True},
        {"bias": "full"},
        {"sinks": True, "window": (20, 5), "key_padding_mask": True},
        {"score_mod": bent, "mask_mod": woven},
        {"dropout_p": 0.3, "softcap": 2.0, "causal": True},
    ],
    ids=lambda params: "-".join(params),
)
def test_options(params):
    """With a group of two heads, ragged tiles, and the tiles that are chosen."""
    checked((1, 2, 75, 136), (1, 69), 64, **params)


@pytest.mark.parametrize("params", [{}, {"mask_mod": woven, "score_mod": bent}], ids="-".join)
def test_what_a_mask_hides_stays_where_it_is(params):
    """NaN and infinities among the values."""
    checked((1, 1, 18, 136), (1, 24), 64, DkvApartConfig(16, 3, exact=True), special=True, **params)


def test_sequences():
    checked_varlen(64, 136, SMALL, causal=True)


@pytest.mark.parametrize(
    "options", [[], ["softcap"], ["dropout"], ["bias", "softcap"], ["mask_mod", "block_mask"]], ids="-".join
)
@pytest.mark.parametrize(("D", "Dv"), [(64, 192), (192, 64), (192, 128), (128, 256), (192, 192), (256, 256)])
def test_tiles_fit_into_shared_memory(D, Dv, options):
    room = 227 * 1024
    ((dkv, _),) = dkv_configs(D, Dv, options)
    ((dq, _),) = dq_configs(D, Dv, options)
    assert isinstance(dkv, DkvApartConfig | DkvConfig)
    assert dkv.shared_bytes(D, Dv) + dkv.slack <= room and dq.shared_bytes(D, Dv) + 1024 <= room
