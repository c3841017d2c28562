"""The checker rejects every broken kernel, for the reason that is its mistake, and no other kernel."""

import re
from typing import Any

import pytest

from dualops.cuda import simulator
from dualops.cuda.compiler.backend import Kernel
from dualops.cuda.launch.step import flat
from tests.wrong.broken import BROKEN, RIGHT
from tests.wrong.rejection import rejections


def launch(kernel: Kernel, blocks: int, arrays: dict[str, Any], columns: int, strides: list[int]) -> None:
    if blocks:
        kernel[blocks, kernel.threads](*[flat(array, name) for name, array in arrays.items()], columns, *strides)


@pytest.mark.parametrize("name", BROKEN)
def test_rejected(name):
    kernel, reasons = BROKEN[name], []
    for order in ("forward", "reversed"):
        with simulator.order(order):
            for reason in rejections(kernel.build, launch, backward=kernel.backward, blocks=kernel.blocks):
                if re.search(kernel.reason, reason):
                    return
                reasons.append(reason)
    pytest.fail(f"{name} was not rejected for {kernel.reason!r}, but {len(reasons)} times otherwise: {reasons[:3]}")


@pytest.mark.parametrize(("build", "backward"), RIGHT.values(), ids=RIGHT)
def test_what_is_right_passes(build, backward, order):
    dtypes = ("float32", "float16") if order == "forward" else ("float64", "bfloat16")
    assert list(rejections(build, launch, backward=backward, dtypes=dtypes)) == []


def test_there_are_enough():
    assert len(BROKEN) >= 20
