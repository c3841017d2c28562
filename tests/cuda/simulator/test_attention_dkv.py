"""dk and dv of attention's sm90 rung."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import dualops.cuda
from dualops.spec import OPERATORS, Case
from dualops.spec.attention.cases import paired
from tests.checks import check
from tests.cuda.simulator.dkv import served


def checked(
    q: tuple[int, ...], k: tuple[int, int], Dv: int, config: Any = None, dtype: str = "bfloat16", **params: Any
) -> None:
    """The gradient of a call against truth. q: B, H, Sq, D; k: heads and tokens; params as `paired` takes them."""
    shapes, params = paired(params, q, k, Dv)
    spec = OPERATORS["flash_attention"]
    with served(config):
        run: Any = partial(dualops.cuda.flash_attention_backward, kernel="sm90")
        check(spec, Case("dkv", dtype, shapes, params), run, backward=True, ways=("given",))


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (128, 128), (96, 40)])
def test_widths(D, Dv):
    checked((1, 1, 150, D), (1, 140), Dv)
