"""matmul's ladder, step by step, in small tiles: ragged products, special values, what a step does not do.

In the tiles that a GPU gets, tests/test_pages.py runs all steps.
"""

from collections.abc import Iterator
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from dualops import cuda
from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.launch.device import known
from dualops.spec import OPERATORS, Case
from examples.ladder.matmul import STEPS, forward, run_step
from tests.checks import check
from tests.wrong.mutants import judged
from tests.wrong.problems import LADDER, small_steps

SPEC = OPERATORS["matmul"]
every_step = pytest.mark.parametrize("name", STEPS)
whole_vectors = pytest.mark.parametrize("name", [name for name in STEPS if name != "thread_an_element"])
# more than one tile along each axis, the last ones ragged, and a stage filled more than twice
SIZES = dict.fromkeys(STEPS, (72, 136, 264)) | {
    **dict.fromkeys(("thread_an_element", "shared_tiles", "register_tiles"), (19, 72, 24)),
    **dict.fromkeys(("tensor_cores", "copies_ahead"), (40, 72, 136)),
}


@pytest.fixture
def small() -> Iterator[None]:
    with small_steps():
        yield


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, ml_dtypes.bfloat16)


def hold(name: str, M: int, N: int, K: int, special: bool = False) -> None:
    case = Case("ladder", "bfloat16", {"a": (M, K), "b": (K, N)})
    check(SPEC, case, partial(run_step, name), ways=("given",), special=special)


@every_step
def test_step(name, order, small):
    """In one order of threads; in the reverse special values among the others."""
    hold(name, *SIZES[name], special=order == "reversed")


@every_step
def test_small_products_and_none(name, small):
    hold(name, 1, 8, 8)
    assert run_step(name, ones(0, 8), ones(8, 16)).shape == (0, 16)


@pytest.mark.parametrize("problem", [problem for problem in LADDER if problem.kernel != "matmul_boxes"], ids=str)
def test_mutants(problem):
    """`make mutants` runs all, also of a kernel whose verbs are those of roles."""
    assert not judged(problem, sample=1).wrong


@whole_vectors
def test_vectors_must_be_whole_and_aligned(name):
    flat = np.zeros(200, ml_dtypes.bfloat16)
    start = -(flat.ctypes.data // 2) % 8
    a, offset = (flat[at : at + 64].reshape(8, 8) for at in (start, start + 1))
    assert cuda.plan("matmul_ladder", a, ones(8, 8), kernel=name).steps
    for wrong in ((offset, ones(8, 8)), (ones(8, 4), ones(4, 8)), (ones(8, 8), ones(8, 4)), (ones(8, 0), ones(0, 8))):
        with pytest.raises(NotImplementedError, match=f"matmul_ladder: rung {name} does not do"):
            run_step(name, *wrong)


@pytest.mark.parametrize(("arch", "count"), [("sm_80", 5), ("sm_90a", 9), ("sm_100a", 5)])
def test_what_an_architecture_does(arch, count):
    problem = absent_problem(SPEC, Case("ladder", "bfloat16", {"a": (64, 64), "b": (64, 64)}), False)
    found = [choice.rung for choice in forward.choices(problem, problem.outputs(), known(arch))]
    assert found == [*STEPS][:count]
