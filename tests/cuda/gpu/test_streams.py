"""On whose stream a kernel runs: torch's current one, or the one that is named. And CUDA graphs."""

import gc
from typing import Any

import pytest
import torch

import dualops.cuda
from dualops.cuda.compiler.backend import cuda
from dualops.cuda.launch.operation import OPERATIONS
from tests.cuda.gpu.library import LATE, as_returned, inputs_of, same_bits, several
from tests.cuda.operators import every_direction


def copies(inputs: dict[str, Any]) -> dict[str, Any]:
    """For a call that overwrites some of them."""
    return {name: x.clone() for name, x in inputs.items()}


@every_direction
@pytest.mark.parametrize("named", ["current", "object", "handle", "numba"])
def test_a_kernel_waits_for_what_its_stream_did_before(direction, named):
    """The inputs are written late on a side stream: a kernel on any other stream reads zeros."""
    source, params = inputs_of(direction)
    expected = several(direction.function()(**copies(source), **params))
    torch.cuda.synchronize()
    inputs = {name: torch.zeros_like(x) for name, x in source.items()}
    out = tuple(torch.zeros_like(y) for y in expected)
    given = as_returned(out)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE)
        for name, x in source.items():
            inputs[name].copy_(x)
        if named == "current":
            direction.function()(**inputs, out=given, **params)
    if named != "current":
        handle = side.cuda_stream
        stream = {"object": side, "handle": handle, "numba": cuda.external_stream(handle)}[named]
        direction.function()(**inputs, out=given, stream=stream, **params)
    side.synchronize()
    assert all(map(same_bits, out, expected))


def test_the_race_is_real():
    """The test above would fail for a kernel on another stream."""
    x = torch.randn(64, 1000, device="cuda")
    late, y = torch.zeros_like(x), torch.zeros_like(x)
    dualops.cuda.softmax(late, out=y)
    torch.cuda.synchronize()
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE)
        late.copy_(x)
    dualops.cuda.softmax(late, out=y, stream=other)
    other.synchronize()
    assert torch.allclose(y, torch.full_like(y, 1e-3))
    side.synchronize()


@every_direction
def test_the_host_does_not_wait(direction):
    inputs, params = inputs_of(direction)
    direction.function()(**inputs, **params)
    torch.cuda.synchronize()
    torch.cuda._sleep(LATE)
    direction.function()(**inputs, **params)
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


@every_direction
def test_a_captured_call_is_replayed_after_its_plan_is_forgotten(direction):
    inputs, params = inputs_of(direction)
    expected = [several(direction.function()(**copies(inputs), **params))]
    out = tuple(torch.zeros_like(y) for y in expected[0])
    given = as_returned(out)
    direction.function()(**inputs, out=given, **params)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        direction.function()(**inputs, out=given, **params)
        updates = direction.spec.updates and not direction.backward  # nothing is allocated
        allocated = () if updates else several(direction.function()(**inputs, **params))
    # other numbers; where sequences end stays as it is
    other = {name: x.flip(0).contiguous() if x.is_floating_point() else x.clone() for name, x in inputs.items()}
    expected.append(several(direction.function()(**copies(other), **params)))
    for operation in OPERATIONS[direction.spec.name]:
        operation.forget()
    gc.collect()
    kept = {name: x.clone() for name, x in inputs.items()}
    for source, wanted in ((kept, expected[0]), (other, expected[1]), (kept, expected[0])):
        for name, x in inputs.items():
            x.copy_(source[name])
        for y in (*out, *allocated):
            y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(same_bits, out, wanted)) and all(map(same_bits, allocated, wanted[: len(allocated)]))
