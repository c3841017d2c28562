"""Lion's lists on the GPU: bits, tables under streams and CUDA graphs, and the optimizer in a graph."""

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import dualops.cuda
from dualops import reference
from dualops.cuda.lion import lists as lists_module, of_lists
from dualops.torch_bridge.optim import Lion
from tests.cuda.gpu.library import LATE, numpy

Tensors = list[torch.Tensor]


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """Kernels are loaded, and nothing is kept from test to test."""
    dualops.cuda.lion(*lists(2), lr=0.1)
    torch.cuda.synchronize()
    of_lists.ready.clear()
    of_lists.bounds.clear()


def lists(count: int = 40, size: int = 1003, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Params, grads and momenta, to be handed on as three arguments."""
    return [[torch.randn(size, device="cuda").to(dtype) for _ in range(count)] for _ in range(3)]


def stepped(given: Sequence[Tensors], lr: Any, **options: Any) -> tuple[Any, ...]:
    arrays: Any = [[numpy(x) for x in each] for each in given]
    return reference.lion(*arrays, lr=lr, **options)


def same(tensors: Tensors, arrays: Sequence[np.ndarray]) -> bool:
    return all(numpy(x).tobytes() == y.tobytes() for x, y in zip(tensors, arrays, strict=True))


def test_a_mixture_of_tensors():
    """Every dtype, momenta of their own, odd addresses, no elements, no axes, an order of axes that does not fit."""
    params, momenta = [], []
    for i, shape in enumerate([(100,), (33, 70), (), (0, 4), (5000,), (1,), (64, 66)]):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            params.append(torch.randn(shape, device="cuda").to(dtype))
            momenta.append(
                torch.randn(shape, device="cuda").to(torch.float32 if i % 2 and dtype.itemsize < 4 else dtype)
            )
    flat = [torch.randn(5000, device="cuda").bfloat16() for _ in range(2)]
    params += [flat[0][3:4099], torch.randn(20, 30, device="cuda").t()]
    momenta += [flat[1][3:4099], torch.randn(30, 20, device="cuda")]
    grads = [torch.randn(p.shape, device="cuda").to(p.dtype) for p in params]
    for _ in range(3):
        wanted = stepped([params, grads, momenta], 0.01, weight_decay=0.1)
        dualops.cuda.lion(params, grads, momenta, 0.01, weight_decay=0.1)
        assert same(params, wanted[0]) and same(momenta, wanted[1])
    assert len(of_lists.ready) == 1


def test_the_host_does_not_wait_and_the_stream_is_the_current_one():
    given = lists()
    wanted = stepped(given, 0.01)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE)
        dualops.cuda.lion(*given, lr=0.01)  # makes a table, too
    assert not side.query()
    side.synchronize()
    assert same(given[0], wanted[0])


@pytest.mark.parametrize("moved", [False, True], ids=["the same addresses", "other gradients"])
def test_a_table_that_is_not_yet_written_is_not_used_on_another_stream(moved):
    given = lists()
    before = [[x.clone() for x in each] for each in given]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE)
        dualops.cuda.lion(*given, lr=0.01)
    # this stream has nothing to wait for: its step comes first
    grads = [x.clone() for x in given[1]] if moved else given[1]
    dualops.cuda.lion(given[0], grads, given[2], lr=0.01)
    torch.cuda.current_stream().synchronize()
    once = stepped(before, 0.01)
    assert not side.query() and same(given[0], once[0])
    side.synchronize()
    twice = reference.lion(once[0], [numpy(x) for x in before[1]], once[1], 0.01)
    assert same(given[0], twice[0]) and same(given[2], twice[1])


def test_a_stream_that_is_named():
    given, side = lists(), torch.cuda.Stream()
    for stream in (side, side.cuda_stream):
        wanted = stepped(given, 0.01)  # waits for what was drawn
        dualops.cuda.lion(*given, lr=0.01, stream=stream)
        side.synchronize()
        assert same(given[0], wanted[0]) and same(given[2], wanted[1])


@pytest.mark.parametrize("count", [40, 300])
def test_new_gradients_at_each_step(count):
    """As training makes them; the host runs ahead, and tables of all steps but some are given to others again."""
    given = lists(count, 77)
    gradients = [lists(count, 77)[1] for _ in range(100)]
    dualops.cuda.lion(*given, lr=0.01)
    wanted = [[numpy(x) for x in each] for each in (given[0], given[2])]
    for grads in gradients:
        wanted = reference.lion(wanted[0], [numpy(x) for x in grads], wanted[1], 0.01)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE)
        dualops.cuda.lion(given[0], gradients[0], given[2], lr=0.01)
    assert not side.query()
    with torch.cuda.stream(side):
        for grads in gradients[1:]:
            dualops.cuda.lion(given[0], grads, given[2], lr=0.01)
    side.synchronize()
    assert same(given[0], wanted[0]) and same(given[2], wanted[1])
    assert len(of_lists.bounds) == 1


@pytest.mark.parametrize("table", ["from before", "made in the capture", "copied in the capture"])
def test_a_graph_is_replayed_after_its_tables_were_forgotten(table, monkeypatch):
    monkeypatch.setattr(lists_module, "MOST_KEPT", 4)
    given, lr = lists(), torch.tensor(1e-3, device="cuda")
    before = [[x.clone() for x in each] for each in given]
    dualops.cuda.lion(*given, lr=lr, weight_decay=0.1)
    torch.cuda.synchronize()
    if table == "made in the capture":
        of_lists.ready.clear()
    if table == "copied in the capture":
        given[1] = [x.clone() for x in given[1]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dualops.cuda.lion(*given, lr=lr, weight_decay=0.1)
    for _ in range(20):
        dualops.cuda.lion(*lists(2, 11), lr=0.1)
    assert len(of_lists.ready) <= 4
    of_lists.ready.clear()
    of_lists.bounds.clear()
    gc.collect()
    junk = [torch.full((4096,), -1, dtype=torch.int64, device="cuda") for _ in range(50)]
    for value in (1e-3, 0.25):
        for each, own in zip(given, before, strict=True):
            for x, y in zip(each, own, strict=True):
                x.copy_(y)
        lr.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        wanted = stepped(before, np.float32(value), weight_decay=0.1)
        assert same(given[0], wanted[0]) and same(given[2], wanted[1])
    del junk


@pytest.mark.xdist_group("large")
def test_more_elements_than_an_int_counts():
    numel = 2**31 + 2**16
    p, g, m = (torch.zeros(numel, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    g[-1] = g[2**31] = 1
    for kernel in ("simt", "table"):
        p.zero_()
        dualops.cuda.lion(p, g, m, 0.5, kernel=kernel)
        assert int((p != 0).sum()) == 2 and p[-1].item() == p[2**31].item() == -0.5


def test_an_optimizer_in_a_graph():
    """A whole training step, whose gradients are the graph's; a scheduler changes lr between replays."""
    start = [torch.randn(shape, device="cuda") for shape in ((16, 16), (77,))]
    models = [[torch.nn.Parameter(x.clone()) for x in start] for _ in range(2)]
    optimizers = [Lion(params, 0.5, weight_decay=0.1, capturable=True) for params in models]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]

    def train(which: int) -> None:
        optimizers[which].zero_grad(set_to_none=True)
        torch.stack([(param * param - param).sum() for param in models[which]]).sum().backward()
        optimizers[which].step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            train(0)
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(2):
        train(1)
    graph = torch.cuda.CUDAGraph()
    optimizers[0].zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        train(0)
    for _ in range(4):
        graph.replay()
        train(1)
        for one, two in zip(*models, strict=True):
            assert torch.equal(one, two)
        for scheduler in schedulers:
            scheduler.step()
