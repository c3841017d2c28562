"""Calls on the GPU: the same bits every time, wrong kinds of arrays, other libraries, the ordinary launch of Numba."""

from math import prod

import numpy as np
import pytest
import torch

import dualops.cuda
from dualops import reference
from dualops.spec import Tag
from tests.checks import gradient_inputs
from tests.cuda.gpu.library import Foreign, as_returned, numpy, same_bits, several, tensor
from tests.cuda.operators import cases_on_rungs
from tests.problems import values

REPEATS = 1000


@pytest.mark.parametrize(
    ("direction", "rung", "case"),
    [
        param
        for param in cases_on_rungs(Tag.EDGE)
        if param.values[1] != "naive" and all(map(prod, param.values[2].shapes.values()))
    ],
)
def test_a_thousand_calls_give_the_same_bits(direction, rung, case):
    function = direction.function(rung)
    arrays = gradient_inputs(direction.spec, case) if direction.backward else values(direction.spec, case)
    inputs = {name: tensor(array) for name, array in arrays.items()}
    own = {name: x.clone() for name, x in inputs.items()}  # some are overwritten
    first = several(function(**own, **case.params))
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    out = tuple(torch.empty_like(y) for y in first)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    graph = torch.cuda.CUDAGraph()  # a replay takes a tenth of a call's time on the host
    with torch.cuda.graph(graph):
        for y in out:
            y.fill_(float("nan"))
        function(**inputs, out=as_returned(out), **case.params)
        for y, z in zip(out, first, strict=True):
            differing += (y.view(bits[y.element_size()]) != z.view(bits[z.element_size()])).sum()
    for _ in range(REPEATS):
        graph.replay()
    assert int(differing) == 0


@pytest.mark.parametrize("wrong", [np.zeros((2, 3), np.float32), torch.zeros(2, 3), [[0.0, 1.0]], 1.0, None])
def test_arrays_that_are_not_on_a_gpu(wrong):
    with pytest.raises(TypeError, match=r"softmax: x is .*, expected an array"):
        dualops.cuda.softmax(wrong)
    right = torch.zeros(2, 3, device="cuda")
    with pytest.raises((TypeError, ValueError), match=r"softmax: out y is"):
        dualops.cuda.softmax(right, out=wrong if wrong is not None else 1)
    with pytest.raises((TypeError, ValueError), match=r"softmax_backward: dy is"):
        dualops.cuda.softmax_backward(right, wrong)


def test_two_libraries_in_one_call():
    x = torch.zeros(2, 3, device="cuda")
    with pytest.raises(TypeError, match="dy is a Foreign, y a Tensor, expected arrays of one library"):
        dualops.cuda.softmax_backward(x, Foreign(x))


def test_rows_do_not_depend_on_their_neighbours():
    x = torch.randn(300, 1000, device="cuda", dtype=torch.bfloat16)
    together = dualops.cuda.softmax(x)
    for row in (0, 1, 150, 299):
        assert same_bits(dualops.cuda.softmax(x[row : row + 1].clone()), together[row : row + 1])


def test_a_gradient_is_not_recorded_and_not_in_the_way():
    x = torch.randn(3, 40, device="cuda", requires_grad=True)
    y = dualops.cuda.softmax(x)
    assert not y.requires_grad
    assert np.allclose(numpy(y), reference.softmax(numpy(x)), atol=1e-6)
