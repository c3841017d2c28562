"""attention of float32 on the sm90 rung, forward and gradient, by each kind of its Configs and with each option."""

from __future__ import annotations

from typing import Any

import pytest

from dualops.cuda.flash_attention.sm90.config import padded
from dualops.cuda.flash_attention.sm90.dkv import build_dkv
from dualops.cuda.flash_attention.sm90.dkv_split import build_dkv_split_f32
from dualops.cuda.flash_attention.sm90.dq import build_dq, build_dq_split_f32
from dualops.cuda.flash_attention.sm90.float32 import build_thirds, gradient_configs, thirds_configs
from dualops.cuda.flash_attention.sm90.forward import build_forward
from dualops.spec.attention.cases import EVERYTHING, documents
from tests.cuda.compile.attention import names, variant_of
from tests.cuda.compile.ptx import sound

ARCH = "sm_90a"
# keys of a tile, which are as many as registers are left for beside the options
CASES: list[Any] = [
    (64, 64, 64, ("causal",)),
    (32, 64, 64, ("bias",)),
    (32, 128, 64, ("window", "sinks")),
    (16, 128, 128, ("score_mod",)),
    (16, 128, 128, ("bias", "dropout_p", "softcap", "alibi_slopes")),
    (16, 64, 64, tuple(EVERYTHING)),
]


@pytest.mark.parametrize(("keys", "D", "Dv", "options"), CASES)
def test_each_config(keys, D, Dv, options):
    found = variant_of(D, Dv, *options, dtype="float32", varlen="sinks" in options and "bias" not in options)
    ((config, _),) = thirds_configs(padded(D), padded(Dv), names(found))
    assert config.block_kv == keys
    sound(build_forward(config, found, True, ""), ARCH, config.shared_bytes(padded(D), padded(Dv)))


def test_options_that_registers_do_not_do_for():
    assert not list(thirds_configs(128, 128, names(variant_of(128, 128, *EVERYTHING, dtype="float32"))))


def test_a_block_mask():
    found = variant_of(64, 64, dtype="float32", blocks_of=documents)
    ((config, _),) = thirds_configs(64, 64, names(found))
    sound(build_forward(config, found, True, ""), ARCH, config.shared_bytes(64, 64))


@pytest.mark.parametrize(
    ("keys", "queries", "options"),
    [
        (64, 64, ("causal",)),
        (32, 32, ("bias", "score_mod", "sinks")),
        (32, 16, tuple(EVERYTHING)),
    ],
)
def test_each_config_of_the_gradient(keys, queries, options):
    found = variant_of(64, 64, *options, dtype="float32")
    (dq, dkv), _ = gradient_configs(64, 64, names(found))
    assert (dq.block_kv, dkv.block_q) == (keys, queries)
    sound(build_dq(dq, found, ""), ARCH, dq.shared_bytes(64, 64))
    sound(build_dkv(dkv, found, "", ""), ARCH, dkv.shared_bytes(64, 64))


@pytest.mark.parametrize(
    ("tiles", "D", "Dv", "options"),
    [
        (48, 128, 128, ("causal",)),
        (48, 64, 128, ("bias", "softcap", "dropout_p")),
        (48, 128, 64, tuple(EVERYTHING)),
        (48, 128, 128, ("causal", "softcap", "varlen")),
        (32, 128, 128, ("blocks",)),
    ],
)
def test_the_gradient_of_wide_heads(tiles, D, Dv, options):
    given = [name for name in options if name not in ("varlen", "blocks")]
    blocks_of = documents if "blocks" in options else None
    found = variant_of(D, Dv, *given, dtype="float32", varlen="varlen" in options, blocks_of=blocks_of)
    (dq, dkv), _ = gradient_configs(D, Dv, names(found))
    assert (dq.block_kv, dkv.block_q) == (tiles, tiles)
    sound(build_dq_split_f32(dq, found), ARCH, dq.shared_bytes(D, Dv))
    sound(build_dkv_split_f32(dkv, found), ARCH, dkv.shared_bytes(D, Dv))


@pytest.mark.parametrize("aligned", [True, False])
def test_copies(aligned):
    assert sound(build_thirds(100, aligned), ARCH).registers <= 128
