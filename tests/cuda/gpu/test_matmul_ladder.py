"""matmul's ladder on a GPU: every step that it does, on whole tiles and ragged ones."""

from functools import partial

import pytest

from dualops.cuda.launch import device
from dualops.spec import OPERATORS, Case
from examples.ladder.matmul import STEPS, run_step
from tests.checks import check
from tests.cuda.gpu.library import TORCH, same_bits, tensor
from tests.problems import values

SPEC = OPERATORS["matmul"]
SIZES = ((1, 8, 8), (256, 512, 256), (1000, 264, 72), (129, 1032, 2056), (2500, 2048, 64), (64, 4104, 4096))


@pytest.fixture(params=STEPS)
def name(request: pytest.FixtureRequest) -> str:
    """A step that this GPU does."""
    if not STEPS[request.param].served(device.current()):
        pytest.skip(f"{device.current().name} has no {request.param}")
    return request.param


def case_of(M: int, N: int, K: int) -> Case:
    return Case("ladder", "bfloat16", {"a": (M, K), "b": (K, N)})


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_step(name, sizes):
    check(SPEC, case_of(*sizes), partial(run_step, name), library=TORCH)
    check(SPEC, case_of(*sizes), partial(run_step, name), library=TORCH, ways=("given",), special=True)


def test_what_the_first_step_does_in_addition():
    check(SPEC, case_of(33, 17, 70), partial(run_step, "thread_an_element"), library=TORCH)


def test_a_hundred_runs_give_the_same_bits(name):
    a, b = (tensor(array) for array in values(SPEC, case_of(1000, 1024, 1024)).values())
    first = run_step(name, a, b)
    assert all(same_bits(run_step(name, a, b), first) for _ in range(100))
