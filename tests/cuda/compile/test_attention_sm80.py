"""attention's sm80 rung by each of its Configs, on the architectures in turns: the COMPILE list has but a few."""

from __future__ import annotations

from typing import Any

import pytest

from dualops.cuda.flash_attention.sm80.config import configs
from dualops.cuda.flash_attention.sm80.forward import build_forward
from dualops.cuda.flash_attention.sm80.rows import Vectors
from dualops.cuda.launch import device
from dualops.spec.attention.cases import EVERYTHING
from dualops.spec.meta import itemsize
from tests.cuda.compile.attention import names, variant_of
from tests.cuda.compile.ptx import ptx_of, sound

WHOLE, SINGLE, MIXED, FOURS = Vectors(8, 8, 8, 8), Vectors(1, 1, 1, 1), Vectors(4, 2, 1, 1), Vectors(4, 4, 4, 4)
HALF, SINGLES = {"dtype": "bfloat16"}, {"dtype": "float32"}
VARLEN = {"varlen": True}
# of each Config the widest heads that it is for, with and without options; each way to read and to write
CASES: list[Any] = [
    ("sm_80", 128, 128, tuple(EVERYTHING), HALF, WHOLE),
    ("sm_86", 128, 128, tuple(EVERYTHING), SINGLES, FOURS),
    ("sm_89", 128, 128, ("bias",), HALF, WHOLE),
    ("sm_90a", 64, 64, ("causal",), HALF, MIXED),
    ("sm_100a", 192, 192, ("causal",), SINGLES | VARLEN, SINGLE),
    ("sm_120", 256, 128, tuple(EVERYTHING), HALF, WHOLE),
    ("sm_86", 256, 256, ("causal",), HALF | VARLEN, SINGLE),
]


@pytest.mark.parametrize(("arch", "D", "Dv", "options", "form", "vectors"), CASES)
def test_each_config(arch, D, Dv, options, form, vectors):
    found = variant_of(D, Dv, *options, **form)
    each = itemsize(found.dtype)
    tiles = [config for config, _ in configs(D, Dv, each, names(found))]
    assert tiles
    for config in tiles:
        report = sound(build_forward(config, found, True, vectors), arch, config.shared_bytes(D, Dv, each))
        assert report.registers <= 65536 // (config.threads * config.min_blocks), (config, report)


@pytest.mark.parametrize(
    ("D", "Dv", "options", "dtype"),
    [
        (128, 128, (), "bfloat16"),
        (128, 128, ("causal",), "bfloat16"),
        (128, 128, ("window",), "float16"),
        (104, 72, ("causal",), "bfloat16"),
    ],
)
def test_two_strips_a_warp_on_hopper(D, Dv, options, dtype):
    found = variant_of(D, Dv, *options, dtype=dtype)
    config, _ = next(configs(D, Dv, 2, names(found), many=True))
    assert config.strips == 2 and config.block_q == 128
    sound(build_forward(config, found, True, WHOLE), "sm_90a", config.shared_bytes(D, Dv, 2))


def test_every_architecture_is_built_for():
    assert {arch for arch, *_ in CASES} == set(device.ARCHITECTURES)


def test_what_registers_do_not_suffice_for_is_simts():
    assert not list(configs(256, 256, 2, ["softcap", "bias"]))
    assert not list(configs(192, 192, 4, ["bias"]))
    assert not list(configs(64, 256, 4, []))


def test_instructions():
    """A tile: products, each factor loaded once, V transposed; Q once."""
    ((config, _), *_) = configs(64, 64, 2, [])
    text = ptx_of(build_forward(config, variant_of(64, 64), True, WHOLE), "sm_80")
    assert ".local" not in text and ".f64" not in text
    products = 2 * (64 // 16) * (config.block_kv // 8)
    assert text.count("mma.sync") == products
    assert text.count("ldmatrix.sync.aligned.m8n8.x4.trans") == products // 4
    assert text.count("ldmatrix.sync.aligned.m8n8.x4.shared") == products // 4 + 4
    each = 64 * 64 // 8 // config.threads  # of a tile: Q, and K and V twice
    assert text.count("cp.async.cg") == 5 * each
