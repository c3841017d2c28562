"""The simulator rejects mutants of every kernel that waits: a sample here, `make mutants` runs them all."""

from collections import defaultdict
from functools import cache

import pytest

from dualops.cuda.compiler.offline import every_step
from dualops.cuda.launch import device
from dualops.cuda.launch.operation import OPERATIONS
from dualops.spec import OPERATORS, Tag
from tests.wrong.harmless import HARMLESS, NEVER
from tests.wrong.mutants import judged
from tests.wrong.problems import PROBLEMS
from tests.wrong.sites import Watch, steps

RINGS = [problem for problem in PROBLEMS if "_ring" in problem.kernel]
SECONDS = ("flash_attention", "matmul_sm", "matmul_k_major")  # each takes some
SECONDS += ("retention_rows_sm80", "retention_states_sm80", "retention_decay_grad")
SECONDS += ("retention_sm90", "retention_wide", "retention_state_terms", "retention_step_gradient")
OTHERS = [problem for problem in PROBLEMS if problem not in RINGS and not problem.special]
OTHERS = [problem for problem in OTHERS if not problem.kernel.startswith(SECONDS)]


@cache
def kernels() -> dict[str, set[tuple[str, str]]]:
    """The steps of every kernel that a case is simulated or compiled with, on the simulator's GPU and on Hopper."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for name, spec in OPERATORS.items():
        for case in {case.id: case for tag in (Tag.SIM, Tag.COMPILE) for case in spec.tagged(tag)}.values():
            for operation in OPERATIONS[name]:
                if case.backward or not operation.backward:
                    for gpu in (device.current(), device.known("sm_90a")):
                        for step in every_step(operation, case, gpu):
                            found[step.kernel.name] |= steps(step.kernel.function)
    return found


def test_every_kernel_that_waits_has_mutants():
    waiting = {name for name, reached in kernels().items() if reached}
    assert waiting == {problem.kernel for problem in PROBLEMS}
    assert len(waiting) >= 25 and waiting >= NEVER.keys()


def test_every_verb_that_waits_is_run():
    reached = kernels()
    came = defaultdict(set)
    for problem in RINGS:
        with problem.prepared():
            watch = Watch({problem.kernel})
            with watch.launches():
                problem.run()
        came[problem.kernel] |= {site.calls[-1][0].co_name for site in watch.seen or {}}
    for kernel, functions in came.items():
        assert {function.rpartition(".")[2] for function, _ in reached[kernel]} <= functions, kernel


@pytest.mark.parametrize("problem", RINGS, ids=str)
def test_ring(problem):
    result = judged(problem, sample=2)
    assert result.killed + result.harmless and not result.wrong


@pytest.mark.parametrize("problem", OTHERS, ids=str)
def test_others(problem):
    assert not judged(problem, sample=1).wrong


def test_reasons_are_few():
    assert len(HARMLESS) <= 16
