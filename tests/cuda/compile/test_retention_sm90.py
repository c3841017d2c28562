"""Each kernel of retention's sm90 rung that a row of the table launches, for the widest heads."""

import pytest

from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.launch import device
from dualops.cuda.launch.operation import OPERATIONS
from dualops.cuda.launch.step import Step
from dualops.cuda.retention.sm90.config import SLACK
from tests.cuda.compile.ptx import sound
from tests.cuda.configs import changed
from tests.cuda.retention import ROWS, WIDE_ROWS

ARCH = "sm_90a"
MOST_BYTES = 227 * 1024  # of Hopper's shared memory


def kernels() -> dict[str, Step]:
    """A launch of each kernel, by its identity."""
    found: dict[str, Step] = {}
    for row in (*ROWS, *WIDE_ROWS):
        operation = OPERATIONS["retention"][row.backward]
        problem = absent_problem(operation.spec, row.widest, row.backward)
        with changed("retention", *row.changes):
            choices = operation.choices(problem, problem.outputs(operation.outputs), device.known(ARCH))
            steps = next(choice.steps() for choice in choices if choice.rung == "sm90")
        found |= {step.kernel.identity: step for step in steps if ".sm90." in step.kernel.identity}
    return found


@pytest.mark.parametrize("step", [pytest.param(step, id=name) for name, step in kernels().items()])
def test_each_kernel(step):
    report = sound(step.kernel, ARCH, step.shared_bytes)
    assert report.static_shared <= SLACK and step.shared_bytes + SLACK <= MOST_BYTES


def test_the_table_reaches_every_kernel_in_every_way():
    """Those with and without log_decay and states, in both directions, with segments."""
    names = list(kernels())
    for kernel, count in (("build_chunks(", 34), ("build_wide(", 18), ("decay_grad=True", 6)):
        assert sum(kernel in name for name in names) == count, kernel
