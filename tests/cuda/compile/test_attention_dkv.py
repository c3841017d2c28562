"""dk and dv of attention's sm90 rung by each kind of its Configs and with each option."""

from __future__ import annotations

from typing import Any

import pytest

from dualops.cuda.flash_attention.sm90.config import padded
from dualops.cuda.flash_attention.sm90.dkv import build_dkv
from dualops.cuda.flash_attention.sm90.dkv_config import DkvConfig, dkv_configs
from dualops.spec.attention.cases import EVERYTHING, documents, woven
from tests.cuda.compile.attention import names, variant_of
from tests.cuda.compile.ptx import sound

ARCH = "sm_90a"
# queries of a tile, which are as many as registers are left for
CASES: list[Any] = [
    (64, 128, 128, (), "boxes"),
    (64, 128, 128, ("causal",), "vectors"),
    (64, 96, 72, ("causal", "window", "sinks"), "elements"),
    (96, 64, 64, ("causal",), "boxes"),
    (32, 128, 128, ("softcap",), "boxes"),
    (32, 128, 128, ("bias",), "boxes"),
    (48, 128, 128, ("score_mod",), "boxes"),
    (48, 128, 128, ("dropout_p",), "boxes"),
    (64, 128, 128, ("alibi_slopes",), "vectors"),
    (64, 128, 128, ("key_padding_mask",), "boxes"),
    (64, 128, 128, ("mask_mod",), "boxes"),
    (64, 64, 64, ("softcap",), "boxes"),
    (64, 64, 64, ("bias",), "boxes"),
    (64, 64, 64, ("dropout_p",), "boxes"),
    (32, 128, 128, ("alibi_slopes", "key_padding_mask"), "boxes"),
    (32, 128, 128, ("score_mod", "mask_mod"), "boxes"),
    (32, 128, 128, ("bias", "dropout_p"), "boxes"),
    (16, 128, 128, tuple(EVERYTHING), "boxes"),
]


@pytest.mark.parametrize(("queries", "D", "Dv", "options", "stored"), CASES)
def test_each_config(queries, D, Dv, options, stored):
    """As boxes, and of varlen as vectors or elements."""
    found = variant_of(D, Dv, *options, varlen=stored != "boxes")
    ((config, _),) = dkv_configs(padded(D), padded(Dv), names(found))
    assert config.block_q == queries
    for packed in {False, found.varlen}:
        kernel = build_dkv(config, found, stored, stored, packed)
        sound(kernel, ARCH, config.shared_bytes(padded(D), padded(Dv)))


@pytest.mark.parametrize(
    ("queries", "D", "options"),
    [
        (64, 128, ("causal", "bias")),
        (64, 64, ("bias",)),
        (32, 128, ("bias", "dropout_p")),
        (32, 128, ("bias", "softcap")),
        (16, 128, tuple(EVERYTHING)),
    ],
)
def test_a_bias_in_boxes(queries, D, options):
    found = variant_of(D, D, *options)
    ((config, _),) = dkv_configs(D, D, names(found), True)
    assert config.block_q == queries
    assert isinstance(config, DkvConfig) and config.bias_in_boxes
    sound(build_dkv(config, found, "boxes", "boxes"), ARCH, config.shared_bytes(D, D))


@pytest.mark.parametrize(
    ("queries", "D", "options", "mask_mod"),
    [(64, 128, ("causal",), documents), (32, 64, ("score_mod",), woven)],
)
def test_block_masks(queries, D, options, mask_mod):
    found = variant_of(D, D, *options, blocks_of=mask_mod)
    ((config, _),) = dkv_configs(D, D, names(found))
    assert config.block_q == queries
    sound(build_dkv(config, found, "boxes", "boxes"), ARCH, config.shared_bytes(D, D))


@pytest.mark.parametrize(
    ("config", "D"), [(DkvConfig(2, 48, 3), 128), (DkvConfig(2, 64, 4, overlap=False), 128), (DkvConfig(2, 64, 4), 64)]
)
def test_others_that_may_be_measured(config, D):
    found = variant_of(D, D, "causal")
    sound(build_dkv(config, found, "boxes", "boxes"), ARCH, config.shared_bytes(D, D))
