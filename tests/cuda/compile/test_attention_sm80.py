"""attention's sm80 rung by each of its Configs, on the architectures in turns: the COMPILE list has but a few."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from dualops.cuda import device
from dualops.cuda.compile import compile_kernel
from dualops.cuda.flash_attention.arguments import Variant, variant
from dualops.cuda.flash_attention.sm80.config import configs
from dualops.cuda.flash_attention.sm80.forward import build_forward
from dualops.cuda.flash_attention.sm80.reading import Vectors
from dualops.cuda.offline import absent_problem
from dualops.spec import OPERATORS, Case
from dualops.spec.attention.cases import EVERYTHING, paired
from dualops.spec.meta import itemsize
from tests.cuda.compile.ptx import ptx_of
from tests.cuda.compile.test_attention_sm90 import found_for

WHOLE, SINGLE, MIXED = Vectors(8, 8, 8, 8), Vectors(1, 1, 1, 1), Vectors(4, 2, 1, 1)
FOURS = Vectors(4, 4, 4, 4)
HALF, SINGLES = "bfloat16", "float32"
CASES: list[Any] = [
    *((128, 128, option, "", HALF, WHOLE) for option in ("", "softcap", "bias")),
    (64, 64, "causal", "", HALF, MIXED),
    (192, 128, "causal", "", HALF, WHOLE),
    (256, 128, "bias", "", HALF, WHOLE),
    *((D, D, "causal", "_varlen", HALF, SINGLE) for D in (128, 256)),
    *((D, D, "causal", "_varlen", SINGLES, SINGLE) for D in (64, 128, 192)),
    *((D, 64, "bias", "", SINGLES, FOURS) for D in (64, 192)),
]
IN_TURNS = [(*case, arch) for case, arch in zip(CASES, cycle(device.ARCHITECTURES))]


def with_everything(D: int, Dv: int, dtype: str) -> Variant:
    """All options at once."""
    shapes, params = paired(EVERYTHING, (1, 2, 256, D), (1, 256), Dv)
    case = Case("everything", dtype, shapes, params, frozenset())
    return variant(absent_problem(OPERATORS["flash_attention"], case))


def compiled(found: Variant, vectors: Vectors, arch: str) -> None:
    options, each = [option.name for option, _ in found.having.variants], itemsize(found.dtype)
    tiles = [config for config, _ in configs(found.D, found.Dv, each, options)]
    assert tiles
    for config in tiles:
        made = build_forward(config, found, True, vectors)
        report = compile_kernel(made, arch, config.shared_bytes(found.D, found.Dv, each)).report
        assert not report.complaints and not report.stack_bytes and not report.spill_bytes, (config, report)
        assert report.registers <= 65536 // (config.threads * config.min_blocks), (config, report)


@pytest.mark.parametrize(("D", "Dv", "option", "form", "dtype", "vectors", "arch"), IN_TURNS)
def test_each_config(D, Dv, option, form, dtype, vectors, arch):
    compiled(replace(found_for(D, Dv, option, f"flash_attention{form}"), dtype=dtype), vectors, arch)


@pytest.mark.parametrize(
    ("D", "Dv", "dtype", "vectors", "arch"),
    [(64, 64, HALF, WHOLE, "sm_120"), (192, 128, HALF, WHOLE, "sm_80"), (128, 128, SINGLES, FOURS, "sm_86")],
)
def test_all_options_at_once(D, Dv, dtype, vectors, arch):
    compiled(with_everything(D, Dv, dtype), vectors, arch)


def test_what_registers_do_not_suffice_for_is_simts():
    assert not list(configs(256, 256, 2, ["softcap", "bias"]))
    assert not list(configs(192, 192, 4, ["bias"]))
    assert not list(configs(64, 256, 4, []))


def test_instructions():
    """A tile: products, each factor loaded once, V transposed; Q once."""
    ((config, _), *_) = configs(64, 64, 2, [])
    text = ptx_of(build_forward(config, found_for(64, 64, "", "flash_attention"), True, WHOLE), "sm_80")
    assert ".local" not in text and ".f64" not in text
    products = 2 * (64 // 16) * (config.block_kv // 8)
    assert text.count("mma.sync") == products
    assert text.count("ldmatrix.sync.aligned.m8n8.x4.trans") == products // 4
    assert text.count("ldmatrix.sync.aligned.m8n8.x4.shared") == products // 4 + 4
    each = 64 * 64 // 8 // config.threads  # of a tile: Q, and K and V twice
    assert text.count("cp.async.cg") == 5 * each
