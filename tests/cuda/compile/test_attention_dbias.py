"""dbias of attention's sm90 rung by each kind of its Configs and of its biases, and beside each option."""

from __future__ import annotations

from typing import Any

import pytest

from dualops.cuda.flash_attention.sm90.bias_tile_scheduler import Broadcast
from dualops.cuda.flash_attention.sm90.config import MOST_BYTES, padded
from dualops.cuda.flash_attention.sm90.dbias import build_dbias, dbias_configs
from dualops.cuda.flash_attention.sm90.dbias_sums import build_dbias_sum
from dualops.spec.attention.cases import EVERYTHING
from tests.cuda.compile.attention import variant_of
from tests.cuda.compile.ptx import sound

ARCH = "sm_90a"
DENSE, ONE_ROW = Broadcast(row=False, column=False), Broadcast(row=True, column=False)
ONE_COLUMN, SCALAR = Broadcast(row=False, column=True), Broadcast(row=True, column=True)
# keys of a tile: beside many options dP takes its registers when these have given theirs back, and there are fewer keys
CASES: list[Any] = [
    (128, 64, 64, (), DENSE, "float16"),
    (128, 128, 128, (), DENSE, "bfloat16"),
    (128, 128, 128, ("softcap", "causal"), DENSE, "bfloat16"),
    (128, 128, 128, ("alibi_slopes", "sinks"), DENSE, "bfloat16"),
    (128, 128, 128, ("key_padding_mask", "causal"), ONE_ROW, "bfloat16"),
    (128, 128, 128, (), ONE_COLUMN, "bfloat16"),
    (128, 128, 128, ("causal",), SCALAR, "bfloat16"),
    (128, 128, 128, ("dropout_p",), DENSE, "bfloat16"),
    (128, 128, 128, ("score_mod", "mask_mod"), DENSE, "bfloat16"),
    (128, 128, 128, ("score_mod", "mask_mod", "dropout_p"), DENSE, "bfloat16"),
    (112, 96, 40, tuple(EVERYTHING), DENSE, "bfloat16"),
    (128, 192, 128, (), DENSE, "bfloat16"),
    (64, 256, 256, ("softcap", "causal"), DENSE, "bfloat16"),
]


@pytest.mark.parametrize(("keys", "D", "Dv", "options", "one", "dtype"), CASES)
def test_each_config(keys, D, Dv, options, one, dtype):
    found = variant_of(D, Dv, *{"bias": True, **dict.fromkeys(options)}, dtype=dtype)
    D, Dv = padded(D), padded(Dv)
    config, _ = next(dbias_configs(D, Dv, MOST_BYTES, [option.name for option, _ in found.having.variants]))
    assert config.block_kv == keys
    build = build_dbias(config, found, one, dtype if one == DENSE else "float32", one == DENSE)
    report = sound(build, ARCH, config.shared_bytes(D, Dv))
    assert report.static_shared + report.dynamic_shared <= 227 * 1024


def test_parts_of_a_dense_bias():
    found = variant_of(64, 64, "bias", dtype="float16")
    config, _ = next(dbias_configs(64, 64, MOST_BYTES, ["bias"]))
    sound(build_dbias(config, found, DENSE, "float32", True), ARCH, config.shared_bytes(64, 64))


@pytest.mark.parametrize("lanes", [1, 32])
def test_sums_of_parts(lanes):
    sound(build_dbias_sum("bfloat16", lanes), ARCH)
