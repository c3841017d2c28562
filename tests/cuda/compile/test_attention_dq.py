"""dq of attention's sm90 rung by each kind of its Configs and with each option."""

from __future__ import annotations

from typing import Any

import pytest

from dualops.cuda.flash_attention.sm90.config import dq_configs, padded
from dualops.cuda.flash_attention.sm90.dq import build_dq
from dualops.spec.attention.cases import EVERYTHING, documents, woven
from tests.cuda.compile.attention import names, variant_of
from tests.cuda.compile.ptx import ptx_of, sound

ARCH = "sm_90a"
# keys of a tile, which are as many as registers are left for beside the options
CASES: list[Any] = [
    (128, 64, 64, ("causal",), "elements"),
    (128, 128, 128, (), "boxes"),
    (128, 128, 128, ("causal",), "boxes"),
    (128, 128, 128, ("causal",), "vectors"),
    (128, 96, 40, ("window", "sinks"), "vectors"),
    (128, 128, 128, ("softcap", "causal"), "boxes"),
    (112, 128, 128, ("softcap",), "vectors"),
    (128, 128, 128, ("alibi_slopes",), "boxes"),
    (128, 128, 128, ("score_mod",), "vectors"),
    (128, 128, 128, ("mask_mod",), "boxes"),
    (128, 128, 128, ("key_padding_mask",), "boxes"),
    (112, 128, 128, ("bias",), "boxes"),
    (96, 128, 128, ("bias", "softcap", "causal"), "boxes"),
    (96, 128, 128, ("alibi_slopes", "key_padding_mask", "sinks"), "boxes"),
    (96, 128, 128, ("score_mod", "mask_mod"), "vectors"),
    (80, 128, 128, ("dropout_p",), "boxes"),
    (64, 128, 128, ("dropout_p", "softcap", "causal"), "vectors"),
    (48, 128, 128, tuple(EVERYTHING), "boxes"),
]


@pytest.mark.parametrize(("keys", "D", "Dv", "options", "stored"), CASES)
def test_each_config(keys, D, Dv, options, stored):
    """As boxes, and of varlen as vectors or elements."""
    found = variant_of(D, Dv, *options, varlen=stored != "boxes")
    D, Dv = padded(D), padded(Dv)
    ((config, _),) = dq_configs(D, Dv, names(found), varlen=found.varlen)
    assert config.block_kv == keys
    sound(build_dq(config, found, stored), ARCH, config.shared_bytes(D, Dv))


@pytest.mark.parametrize(
    ("keys", "width", "options"),
    [
        (128, 64, ("bias",)),
        (128, 128, ("bias",)),
        (80, 128, ("bias", "softcap", "causal")),
    ],
)
def test_a_bias_in_boxes(keys, width, options):
    """Read from shared memory by matrices, with no registers of its own."""
    found = variant_of(width, width, *options)
    (config, _), _ = dq_configs(width, width, names(found), True)
    assert (config.block_kv, config.bias_stages) == (keys, 1)
    kernel = build_dq(config, found, "boxes")
    sound(kernel, ARCH, config.shared_bytes(width, width))
    assert "ldmatrix" in ptx_of(kernel, ARCH)


@pytest.mark.parametrize(
    ("keys", "options", "mask_mod"), [(128, (), woven), (64, ("score_mod",), documents), (64, ("bias",), documents)]
)
def test_block_masks(keys, options, mask_mod):
    found = variant_of(128, 128, *options, blocks_of=mask_mod)
    ((config, _),) = dq_configs(128, 128, names(found))
    assert config.block_kv == keys
    sound(build_dq(config, found, "boxes"), ARCH, config.shared_bytes(128, 128))
