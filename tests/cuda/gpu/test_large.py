"""More than 2**31 elements: sampled rows, among them the first, those around the 2**31st element, and the last."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dualops.cuda
from dualops import reference
from dualops.spec import OPERATORS, compare
from tests.cuda.gpu.library import numpy

COLUMNS = 1024
ROWS = 2**31 // COLUMNS + 5
NEAR = [0, 1, *range(2**31 // COLUMNS - 2, 2**31 // COLUMNS + 2), 2**30 // COLUMNS, ROWS - 2, ROWS - 1]
SAMPLE = sorted({*NEAR, *np.random.default_rng(0).integers(0, ROWS, 200).tolist()})


pytestmark = pytest.mark.xdist_group("large")  # tens of gigabytes: one after another


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)


def hold(actual: np.ndarray, function: Callable[..., Any], arrays: list[np.ndarray], floor: float) -> None:
    truth = function(*[array.astype(np.float64) for array in arrays])
    found = compare(actual, truth, function(*arrays), dtype="bfloat16", floor=floor)
    assert found.passed, found.message


@pytest.mark.parametrize("rung", OPERATORS["softmax"].rungs)
def test_softmax_and_its_gradient(rung):
    floor = OPERATORS["softmax"].floor
    x = normal(ROWS, COLUMNS)
    y = dualops.cuda.softmax(x, kernel=rung)
    rows = torch.tensor(SAMPLE, device="cuda")
    hold(numpy(y[rows]), reference.softmax, [numpy(x[rows])], floor)
    assert not torch.isnan(y).any()  # torch's allocator filled it with NaN: every element was written
    dy = x.normal_()
    dx = dualops.cuda.softmax_backward(y, dy, kernel=rung)
    hold(numpy(dx[rows]), reference.softmax_backward, [numpy(y[rows]), numpy(dy[rows])], floor)
    assert not torch.isnan(dx).any()


def test_softmax_along_the_first_axis():
    x = normal(COLUMNS, ROWS)
    y = dualops.cuda.softmax(x, 0, kernel="simt")
    columns = torch.tensor(SAMPLE, device="cuda")
    taken = [numpy(array[:, columns].t()) for array in (y, x)]
    hold(taken[0], reference.softmax, [taken[1]], OPERATORS["softmax"].floor)
    assert not torch.isnan(y).any()


def test_softmax_of_a_million_along_the_first_axis():
    generator = torch.Generator("cuda").manual_seed(0)
    x, dy = (torch.empty(2**20 + 3, 33, device="cuda").normal_(generator=generator) for _ in range(2))
    y = dualops.cuda.softmax(x, 0, kernel="simt")
    dx = dualops.cuda.softmax_backward(y, dy, 0, kernel="simt")
    of_reference = reference.softmax(numpy(x), 0), reference.softmax_backward(numpy(y), numpy(dy), 0)
    true = [array.astype(np.float64) for array in map(numpy, (x, y, dy))]
    of_truth = reference.softmax(true[0], 0), reference.softmax_backward(true[1], true[2], 0)
    for actual, truth, baseline in zip((y, dx), of_truth, of_reference, strict=True):
        found = compare(numpy(actual), truth, baseline, dtype="float32", floor=OPERATORS["softmax"].floor)
        assert found.passed, found.message


def test_softmax_in_place_beyond_the_first_4_gigabytes():
    x = normal(ROWS, COLUMNS)
    rows = torch.tensor(SAMPLE, device="cuda")
    before = numpy(x[rows])
    dualops.cuda.softmax(x, out=x)
    hold(numpy(x[rows]), reference.softmax, [before], OPERATORS["softmax"].floor)


def test_attention_of_many_queries_to_few_keys():
    D = 64
    queries = 2**31 // (2 * D) + 5
    q, k, v = normal(1, 2, queries, D), normal(1, 2, 16, D, seed=1), normal(1, 2, 16, D, seed=2)
    o = dualops.cuda.flash_attention(q, k, v)
    near = [0, 1, 2**30 // D - 1, 2**30 // D, queries - 2, queries - 1]
    taken = torch.tensor(sorted({*near, *np.random.default_rng(0).integers(0, queries, 50).tolist()}), device="cuda")
    arrays = [numpy(q[:, :, taken]), numpy(k), numpy(v)]
    hold(numpy(o[:, :, taken]), reference.flash_attention, arrays, OPERATORS["flash_attention"].floor)
    assert not torch.isnan(o).any()
