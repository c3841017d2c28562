"""Retention's sm80 rung in each of its variants."""

import pytest

from dualops.cuda.retention.arguments import Variant
from dualops.cuda.retention.sm80 import configs
from dualops.cuda.retention.sm80.config import Shape, Sm80Rows, Sm80States, boxes_of, columns_of
from dualops.cuda.retention.sm80.rows import build_rows
from dualops.cuda.retention.sm80.states import build_states
from tests.cuda.compile.ptx import sound

VARIANTS = (
    {},
    {"normalized": True},
    {"stepwise": True},
    {"normalized": True, "stepwise": True},
    {"normalized": True, "mask": "float32"},
)


def shape(D: int, Dv: int, vector: int = 8) -> Shape:
    return Shape(boxes_of(D), columns_of(Dv), vector, vector == 8, vector == 8)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (256, 128)])
@pytest.mark.parametrize(("dtype", "arch"), [("bfloat16", "sm_80"), ("float16", "sm_90a")])
def test_each_variant_of_rows(dtype, D, Dv, options, arch):
    config = next(configs(dtype, D, Dv, "stepwise" in options or "mask" in options))[0].rows
    made = shape(D, Dv)
    sound(build_rows(config, Variant(dtype, **options), made), arch, config.shared_bytes(made))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_that_lie_anywhere(dtype):
    config, made = Sm80Rows(min_blocks=2), shape(64, 64, 1)
    sound(build_rows(config, Variant(dtype, normalized=True, stepwise=True), made), "sm_90a", config.shared_bytes(made))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("dtype", "vector", "arch"),
    [("bfloat16", 8, "sm_90a"), ("bfloat16", 8, "sm_80"), ("bfloat16", 1, "sm_80"), ("float16", 8, "sm_90a")],
)
def test_each_variant_of_states(dtype, vector, arch, exact):
    config, made = Sm80States(exact), shape(0, 128, vector)
    sound(build_states(config, Variant(dtype, stepwise=True), made, False), arch, config.shared_bytes(128))
