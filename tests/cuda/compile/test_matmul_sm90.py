"""matmul's sm90 rung by each of its Configs: the COMPILE list has but a few of them."""

from __future__ import annotations

import pytest

from dualops.cuda.compile import compile_kernel
from dualops.cuda.matmul.product import Variant
from dualops.cuda.matmul.sm90 import build_product
from dualops.cuda.matmul.sm90_arguments import Sm90Variant
from dualops.cuda.matmul.sm90_config import TILES, Sm90Config
from dualops.cuda.matmul.sm90_split import build_split_product

PLAIN = Sm90Variant(Variant("float16"), "mn", "k", others=3, out=0)
LINEAR = Sm90Variant(Variant("bfloat16", "float32", "gelu", preactivation=True), "k", "mn", others=1, out=1)
IN_BOXES, SILU = LINEAR._replace(out=0), PLAIN._replace(product=Variant("float16", None, "silu"))


@pytest.mark.parametrize(
    ("config", "found"),
    [(config, (LINEAR, PLAIN)[number % 2]) for number, (config, _) in enumerate(TILES)]
    + [(TILES[0][0], IN_BOXES), (TILES[0][0], SILU)],
    ids=lambda value: f"{value.block_m}x{value.block_n}x{value.splits}" if isinstance(value, Sm90Config) else "",
)
def test_each_config(config, found):
    if config.splits > 1:
        made = build_split_product(config, found._replace(out=found.out or 8))
    else:
        made = build_product(config, found)
    report = compile_kernel(made, "sm_90a", config.shared_bytes).report
    assert report.allowed and not report.complaints, report
    assert not report.stack_bytes and not report.spill_bytes, report
