"""matmul's sm90 rung by each of its Configs, and the copies it needs: the COMPILE list has but a few of them."""

from __future__ import annotations

from itertools import product

import pytest

from dualops.cuda.compile import compile_kernel
from dualops.cuda.matmul.loading import Reading
from dualops.cuda.matmul.parts import CopyVariant, build_copy
from dualops.cuda.matmul.product import Variant
from dualops.cuda.matmul.sm90 import Sm90Variant, build_product
from dualops.cuda.matmul.sm90_config import SPLIT_TILES, TF32_TILES, TILES

PLAIN = Sm90Variant(Variant("float16"), "mn", "k", others=3, out=0)
LINEAR = Sm90Variant(Variant("bfloat16", "float32", "gelu", preactivation=True), "k", "mn", others=1, out=1)
TF32 = Sm90Variant(Variant("float32"), "k", "k", others=3, out=0)
TF32_LINEAR = Sm90Variant(Variant("float32", "float32", "gelu", preactivation=True), "k", "k", others=1, out=4)
KINDS = ((TILES, (LINEAR, PLAIN)), (TF32_TILES, (TF32, TF32_LINEAR)))
KINDS += ((SPLIT_TILES, tuple(found._replace(split=True) for found in (TF32, TF32_LINEAR))),)


@pytest.mark.parametrize(
    ("config", "found"),
    [(config, founds[number % 2]) for tiles, founds in KINDS for number, (config, _) in enumerate(tiles)],
    ids=[
        f"{('16-bit', 'tf32', '3xtf32')[kind]}-{config.block_m}x{config.block_n}"
        for kind, (tiles, _) in enumerate(KINDS)
        for config, _ in tiles
    ],
)
def test_each_config(config, found):
    report = compile_kernel(build_product(config, found), "sm_90a", config.shared_bytes).report
    assert report.allowed and not report.complaints, report
    assert not report.stack_bytes and not report.spill_bytes, report


@pytest.mark.parametrize(("along", "vector", "split"), list(product(("depth", "row"), (4, 1), (False, True))))
def test_copies(along, vector, split):
    report = compile_kernel(build_copy(CopyVariant(2, Reading(along, vector), split)), "sm_90a", 0).report
    assert report.allowed and not report.stack_bytes and not report.spill_bytes, report
    assert report.registers <= 64  # four blocks of 256 threads wait for memory on an SM
