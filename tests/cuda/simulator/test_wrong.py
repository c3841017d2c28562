"""The checker rejects every broken kernel, for the reason that is its mistake, and no other kernel."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from dualops.cuda import simulator
from dualops.cuda.backend import Kernel
from dualops.cuda.step import flat
from tests.wrong.broken import BROKEN, control
from tests.wrong.kernels import build_backward, build_through_shared
from tests.wrong.rejection import rejections


def launch(kernel: Kernel, blocks: int, arrays: dict[str, Any], columns: int, strides: list[int]) -> None:
    if blocks:
        kernel[blocks, kernel.threads](*[flat(array, name) for name, array in arrays.items()], columns, *strides)


@pytest.mark.parametrize("name", BROKEN)
def test_rejected(name):
    kernel, told = BROKEN[name], []
    for order in ("forward", "reversed"):
        with simulator.order(order):
            for reason in rejections(kernel.build, launch, backward=kernel.backward, blocks=kernel.blocks):
                if re.search(kernel.reason, reason):
                    return
                told.append(reason)
    pytest.fail(f"{name} was not rejected for {kernel.reason!r}, but {len(told)} times otherwise: {told[:3]}")


@pytest.mark.parametrize(
    ("build", "backward", "count"),
    [
        (control, False, 2),
        (partial(build_through_shared, barrier_between=True), False, 1),
        (partial(build_backward, sees_all_lanes=True), True, 2),
    ],
    ids=["control", "through_shared", "backward"],
)
def test_what_is_right_passes(build, backward, count, order):
    """In `count` dtypes in the one order, and in as many others in the other."""
    dtypes = ("float32", "float16") if order == "forward" else ("bfloat16", "float64")
    assert list(rejections(build, launch, backward=backward, dtypes=dtypes[:count])) == []


def test_there_are_enough():
    assert len(BROKEN) >= 20
