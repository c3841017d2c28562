"""Any thread may be the first to work on a GPU, and many may at once: the bits are those of one."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dualops.cuda
from dualops import torch_bridge
from dualops.cuda.compiler.backend import cuda
from dualops.spec import OPERATORS
from dualops.torch_bridge.optim import Lion
from tests.cuda.forget import forget
from tests.cuda.gpu.first_work import elsewhere
from tests.cuda.gpu.library import LATE, inputs_of, several
from tests.cuda.operators import DIRECTIONS, Direction
from tests.torch_bridge.operators import DIFFERENTIABLE, Tensors, bits, bridge_call, incoming_gradient, same_bits

ROOT = Path(__file__).parents[3]
THREADS, CALLS = 8, 1000

Work = Callable[[], Tensors]


@pytest.mark.parametrize(
    ("way", "operator"),
    [
        *(("gradient", name) for name in DIFFERENTIABLE),
        *(("thread", name) for name in OPERATORS),
        *(("numba", name) for name in OPERATORS),
    ],
)
def test_the_first_work_of_a_process_is_in_another_thread(way, operator):
    command = [sys.executable, "-m", "tests.cuda.gpu.first_work", operator, way]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def plain_call(direction: Direction) -> Work:
    """A call of `dualops.cuda`, over copies of its inputs if they are written."""
    inputs, params = inputs_of(direction)
    written = () if direction.backward else tuple(direction.spec.updates.values())

    def work() -> Tensors:
        own = {name: x.clone() if name in written else x for name, x in inputs.items()}
        return several(direction.function()(**own, **params))

    return work


def every_work() -> list[Work]:
    """Each direction of each operator in bfloat16, and gradients in float32 through the bridge."""
    return [*map(plain_call, DIRECTIONS)] + [bridge_call(name, "cuda").gradient for name in DIFFERENTIABLE]


def differing(work: Work, expected: Tensors) -> torch.Tensor:
    """In how many elements the bits differ, computed without waiting."""
    pairs = zip(map(bits, work()), map(bits, expected), strict=True)
    return torch.stack([(one != two).sum() for one, two in pairs]).sum()


def mixed(works: Sequence[Work], expected: Sequence[Tensors], seed: int, start: threading.Barrier) -> int:
    """Elements that differ in CALLS calls in a random order, of every other thread on a stream of its own."""
    order = np.random.default_rng(seed).integers(len(works), size=CALLS)
    start.wait()
    with torch.cuda.stream(torch.cuda.Stream()) if seed % 2 else nullcontext():
        total = torch.zeros((), dtype=torch.int64, device="cuda")
        for number in order:
            total += differing(works[number], expected[number])
        return int(total)


def test_many_threads_at_once():
    works = every_work()
    results = [work() for work in works]
    torch.cuda.synchronize()
    forget()
    start = threading.Barrier(THREADS)
    found: dict[int, Any] = {}

    def run(seed: int) -> None:
        try:
            found[seed] = mixed(works, results, seed, start)
        except Exception as error:
            start.abort()
            found[seed] = repr(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(THREADS), 0)


def test_a_pool_of_threads_with_numba_arrays():
    x = np.random.default_rng(0).standard_normal((60, 300)).astype(np.float32)
    on_device = cuda.to_device(x)
    expected = dualops.cuda.softmax(on_device).copy_to_host()
    forget()
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda _: dualops.cuda.softmax(on_device).copy_to_host(), range(100)))
    assert all(one.tobytes() == expected.tobytes() for one in found)


def trained(batches: Any, steps: int) -> Tensors:
    """The parameters of a small model after this number of steps of Lion, one for each batch."""
    generator = torch.Generator("cuda").manual_seed(0)
    linear = torch.nn.Parameter(torch.randn(32, 64, device="cuda", generator=generator))
    norm = torch_bridge.nn.RMSNorm(32, device="cuda")
    params = [linear, norm.weight]
    optimizer = Lion(params, 1e-3)
    done = 0
    for (x,) in batches:
        optimizer.zero_grad()
        probabilities = torch_bridge.softmax(torch_bridge.matmul(norm(x.to("cuda", non_blocking=True)), linear))
        probabilities.square().sum().backward()
        optimizer.step()
        done += 1
    assert done == steps
    return tuple(param.detach() for param in params)


def test_a_loader_that_pins_memory():
    data = TensorDataset(torch.randn(200, 32, generator=torch.Generator().manual_seed(1)))
    expected = trained(DataLoader(data, batch_size=10), 20)
    found = trained(DataLoader(data, batch_size=10, pin_memory=True, num_workers=2), 20)
    assert same_bits(found, expected)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward_on_a_side_stream(name):
    """Forward ran on it, and so does backward, in torch's thread: it must wait for what comes late there."""
    made = bridge_call(name, "cuda")
    expected = made.gradient()
    late = {key: torch.zeros_like(x) for key, x in made.leaves.items()}
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE)
        for key, x in late.items():
            x.copy_(made.tensors[key].detach())
            x.requires_grad_()
        results = [y for y in made._replace(tensors=made.tensors | late)() if y.requires_grad]
        incoming = [incoming_gradient(y) for y in results]
    found = torch.autograd.grad(results, list(late.values()), incoming)
    torch.cuda.synchronize()
    assert same_bits(found, expected)


@pytest.fixture
def complaints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What destructors raised."""
    messages: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: messages.append(repr(unraisable.exc_value)))
    return messages


def test_what_is_kept_is_given_up_in_a_thread_without_a_context(complaints):
    works = every_work()
    expected = [work() for work in works]
    lists = [[torch.ones(77, device="cuda") for _ in range(40)] for _ in range(3)]
    dualops.cuda.lion(*lists, lr=0.1)
    torch.cuda.synchronize()
    elsewhere(forget)
    elsewhere(gc.collect)
    assert complaints == []
    assert all(same_bits(work(), results) for work, results in zip(works, expected, strict=True))
    dualops.cuda.lion(*lists, lr=0.1)
    torch.cuda.synchronize()


def gradients_on(device: str) -> list[Work]:
    return [bridge_call(name, device).gradient for name in DIFFERENTIABLE]


@pytest.mark.cuda(2)
def test_two_devices_from_one_thread():
    first, second = map(gradients_on, ("cuda:0", "cuda:1"))
    for current in (0, 1):
        with torch.cuda.device(current):
            for one, two in zip(first, second, strict=True):
                results, others = one(), two()
                assert {x.device.index for x in results} == {0} and {x.device.index for x in others} == {1}
                assert same_bits(tuple(x.cpu() for x in results), tuple(x.cpu() for x in others))
            assert torch.cuda.current_device() == current


@pytest.mark.cuda(2)
@pytest.mark.parametrize(
    ("one", "two"), [(["cuda:1"], ["cuda:1"]), (["cuda:0"], ["cuda:1"]), (["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"])]
)
def test_two_threads_and_two_devices(one, two):
    works = {device: gradients_on(device) for device in ("cuda:0", "cuda:1")}
    expected = {device: [work() for work in each] for device, each in works.items()}
    for device in works:
        torch.cuda.synchronize(device)
    forget()

    def wrong(devices: Sequence[str]) -> list[tuple[str, int]]:
        return [
            (device, number)
            for _ in range(20)
            for device in devices
            for number, work in enumerate(works[device])
            if not same_bits(work(), expected[device][number])
        ]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wrong, (one, two))) == [[], []]
    assert torch.cuda.current_device() == 0
