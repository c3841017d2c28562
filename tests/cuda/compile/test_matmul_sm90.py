"""matmul's sm90 rung by each of its Configs: the COMPILE list has but a few of them."""

from __future__ import annotations

import pytest

from dualops.cuda.compile import compile_kernel
from dualops.cuda.matmul.product import Variant
from dualops.cuda.matmul.sm90 import Sm90Variant, build_product
from dualops.cuda.matmul.sm90_config import TILES

PLAIN = Sm90Variant(Variant("float16"), "mn", "k", others=3, out=0)
LINEAR = Sm90Variant(Variant("bfloat16", "float32", "gelu", preactivation=True), "k", "mn", others=1, out=1)


@pytest.mark.parametrize(
    ("config", "found"),
    [(config, (LINEAR, PLAIN)[number % 2]) for number, (config, _) in enumerate(TILES)],
    ids=[f"{config.block_m}x{config.block_n}" for config, _ in TILES],
)
def test_each_config(config, found):
    report = compile_kernel(build_product(config, found), "sm_90a", config.shared_bytes).report
    assert report.allowed and not report.complaints, report
    assert not report.stack_bytes and not report.spill_bytes, report
