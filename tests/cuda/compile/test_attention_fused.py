"""Attention's whole gradient in one kernel of the sm90 rung, and what makes rows of its dq."""

from __future__ import annotations

from typing import Any

import pytest

from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.flash_attention.arguments import variant
from dualops.cuda.flash_attention.sm90.config import padded
from dualops.cuda.flash_attention.sm90.dkv_config import FusedConfig, fused_configs
from dualops.cuda.flash_attention.sm90.dq_sums import build_dq_convert
from dualops.cuda.flash_attention.sm90.fused import build_fused
from dualops.cuda.tile.warpgroup import ROWS
from dualops.spec import OPERATORS, Case
from dualops.spec.attention.cases import tanh_softcap
from tests.cuda.compile.attention import names, variant_of
from tests.cuda.compile.ptx import sound

ARCH = "sm_90a"
MOST_BYTES = 227 * 1024  # of Hopper's shared memory
CASES: list[Any] = [
    (128, 128, (), "boxes"),
    (128, 128, ("causal",), "boxes"),
    (96, 72, ("causal", "sinks"), "boxes"),
    (100, 60, ("causal",), "elements"),
    (64, 64, ("causal",), "boxes"),
    (48, 60, ("causal", "sinks"), "elements"),
    *(
        (128, 128, ("causal", option), "boxes")
        for option in ("alibi_slopes", "softcap", "dropout_p", "key_padding_mask")
    ),
    (100, 128, ("sinks", "softcap"), "elements"),
    (64, 64, ("causal", "softcap"), "boxes"),
    (64, 64, ("causal", "sinks", "dropout_p"), "boxes"),
    (128, 128, ("mask_mod",), "boxes"),
    (64, 64, ("causal", "mask_mod"), "boxes"),
    (64, 64, ("score_mod",), "boxes"),
]


@pytest.mark.parametrize(("D", "Dv", "options", "stored"), CASES)
def test_each_variant(D, Dv, options, stored):
    found = variant_of(D, Dv, *options)
    ((config, _),) = fused_configs(padded(D), padded(Dv), names(found))
    room = config.shared_bytes(padded(D), padded(Dv))
    report = sound(build_fused(config, found, stored, stored), ARCH, room)
    assert report.static_shared <= config.slack and room + config.slack <= MOST_BYTES
    sound(build_dq_convert(config, found, stored), ARCH, 2 * ROWS * padded(D))


def test_sequences_one_after_another():
    found = variant_of(128, 128, "causal", "sinks", varlen=True)
    ((config, _),) = fused_configs(128, 128, names(found), varlen=True)
    sound(build_fused(config, found, "vectors", "vectors"), ARCH, config.shared_bytes(128, 128))
    assert not [*fused_configs(128, 128, ["score_mod"], varlen=True)]


@pytest.mark.parametrize(("Dv", "options"), [(128, ("bias",)), (72, ("causal", "sinks", "bias"))])
def test_a_bias_in_boxes(Dv, options):
    found = variant_of(128, Dv, *options)
    ((config, _),) = fused_configs(128, padded(Dv), names(found), True)
    room = config.shared_bytes(128, padded(Dv))
    report = sound(build_fused(config, found, "boxes", "boxes"), ARCH, room)
    assert report.static_shared <= config.slack and room + config.slack <= MOST_BYTES


@pytest.mark.parametrize("params", [{"score_mod": tanh_softcap}, {"score_mod": tanh_softcap, "causal": True}], ids=str)
def test_a_score_mod(params):
    """Of the score alone: `bent`, which the other cases have, needs more registers beside heads of 128."""
    shapes = {"q": (1, 2, 256, 128), "k": (1, 2, 256, 128), "v": (1, 2, 256, 128)}
    found = variant(absent_problem(OPERATORS["flash_attention"], Case("compiled", "bfloat16", shapes, params)))
    ((config, _),) = fused_configs(128, 128, names(found))
    sound(build_fused(config, found, "boxes", "boxes"), ARCH, config.shared_bytes(128, 128))


def test_another_that_may_be_measured():
    config = FusedConfig(dq_places=1)
    sound(build_fused(config, variant_of(128, 128), "boxes", "boxes"), ARCH, config.shared_bytes(128, 128))
