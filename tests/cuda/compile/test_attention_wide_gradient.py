"""The gradient of wide heads on attention's sm90 rung by each kind of its Configs."""

from __future__ import annotations

from typing import Any

import pytest

from dualops.cuda.flash_attention.sm90.config import dq_configs, padded
from dualops.cuda.flash_attention.sm90.dkv_config import DkvApartConfig, dkv_configs
from dualops.cuda.flash_attention.sm90.dkv_split import build_dkv_split
from dualops.cuda.flash_attention.sm90.dq import build_dq
from dualops.spec.attention.cases import EVERYTHING, documents, woven
from tests.cuda.compile.attention import names, variant_of
from tests.cuda.compile.ptx import sound

ARCH = "sm_90a"
# queries of a tile, which are as many as shared memory has room for, or registers beside the options
CASES: list[Any] = [
    (48, 256, 256, ("causal",), "boxes"),
    (48, 256, 256, ("causal",), "vectors"),
    (80, 256, 64, (), "boxes"),
    (80, 40, 256, ("causal", "sinks"), "elements"),
    (48, 256, 256, ("alibi_slopes",), "boxes"),
    (48, 256, 256, ("dropout_p",), "boxes"),
    (48, 256, 256, ("bias",), "boxes"),
    (32, 256, 256, ("softcap", "causal"), "boxes"),
    (32, 256, 256, ("score_mod", "mask_mod"), "boxes"),
    (32, 256, 256, ("bias", "dropout_p", "softcap", "alibi_slopes"), "boxes"),
]


@pytest.mark.parametrize(("queries", "D", "Dv", "options", "stored"), CASES)
def test_each_config_of_dk_and_dv(queries, D, Dv, options, stored):
    """As boxes, and of varlen as vectors or elements."""
    found = variant_of(D, Dv, *options, varlen=stored != "boxes")
    ((config, _),) = dkv_configs(padded(D), padded(Dv), names(found))
    assert isinstance(config, DkvApartConfig) and config.block_q == queries
    for packed in {False, found.varlen}:
        kernel = build_dkv_split(config, found, stored, stored, packed)
        sound(kernel, ARCH, config.shared_bytes(padded(D), padded(Dv)))


@pytest.mark.parametrize(
    ("queries", "D", "Dv", "options", "mask_mod"),
    [(64, 192, 128, ("causal",), woven), (32, 256, 256, ("dropout_p",), documents)],
)
def test_block_masks(queries, D, Dv, options, mask_mod):
    found = variant_of(D, Dv, *options, blocks_of=mask_mod)
    ((config, _),) = dkv_configs(D, Dv, names(found))
    assert config.block_q == queries
    sound(build_dkv_split(config, found, "boxes", "boxes"), ARCH, config.shared_bytes(D, Dv))


def test_options_that_registers_do_not_do_for():
    assert not list(dkv_configs(256, 256, names(variant_of(256, 256, *EVERYTHING))))
    found = variant_of(256, 256, "softcap")
    with pytest.raises(ValueError, match="options with slopes, expected an exact one"):
        build_dkv_split(DkvApartConfig(48, 3), found, "boxes", "boxes")


@pytest.mark.parametrize(
    ("keys", "D", "Dv", "options", "stored"),
    [
        (48, 256, 256, ("causal",), "boxes"),
        (48, 256, 256, ("causal",), "vectors"),
        (80, 192, 192, (), "boxes"),
        (96, 192, 128, ("causal",), "boxes"),
        (64, 128, 256, (), "boxes"),
        (48, 256, 256, ("bias", "softcap", "causal"), "boxes"),
        (32, 256, 256, ("bias", "dropout_p", "softcap", "alibi_slopes"), "boxes"),
    ],
)
def test_each_config_of_dq(keys, D, Dv, options, stored):
    found = variant_of(D, Dv, *options, varlen=stored != "boxes")
    ((config, _),) = dq_configs(D, Dv, names(found))
    assert config.block_kv == keys
    sound(build_dq(config, found, stored), ARCH, config.shared_bytes(D, Dv))
