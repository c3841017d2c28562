"""The kernels of the COMPILE list, and their PTX."""

from __future__ import annotations

from functools import cache

from numba import types

from dualops.cuda import device
from dualops.cuda.backend import Kernel, cuda
from dualops.cuda.launch import OPERATIONS
from dualops.cuda.step import Step
from dualops.spec import OPERATORS, Tag


@cache
def compile_list(operator: str, arch: str) -> dict[str, tuple[Step, str]]:
    """Every launch of every way to do the operator's COMPILE cases, with its dtype, by the kernel's identity."""
    steps = {}
    for case in OPERATORS[operator].tagged(Tag.COMPILE):
        for operation in OPERATIONS[operator]:
            for step in operation.every_step(case, device.known(arch)):
                steps.setdefault(step.kernel.identity, (step, case.dtype))
    return steps


def ptx_of(kernel: Kernel, arch: str) -> str:
    """What Numba makes of a kernel, before it is linked."""
    text, _ = cuda.compile(
        kernel.function,
        types.void(*kernel.argtypes),
        cc=device.compute_capability(arch),
        device=False,
        abi="numba",
        output="ptx",
        launch_bounds=(kernel.threads, kernel.min_blocks),
    )
    return text
