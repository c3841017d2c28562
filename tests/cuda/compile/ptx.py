"""The kernels of the COMPILE list, the PTX of a kernel, and the report of its build."""

from functools import cache

from dualops.cuda.compiler import compile as compiler
from dualops.cuda.compiler.backend import Kernel
from dualops.cuda.compiler.offline import every_step
from dualops.cuda.launch import device
from dualops.cuda.launch.operation import OPERATIONS
from dualops.cuda.launch.step import Step
from dualops.spec import OPERATORS, Tag


@cache
def compile_list(operator: str, arch: str) -> dict[str, tuple[Step, str]]:
    """Every launch of every way to do the operator's COMPILE cases, with its dtype, by the kernel's identity."""
    steps = {}
    for case in OPERATORS[operator].tagged(Tag.COMPILE):
        for operation in OPERATIONS[operator]:
            wanted = case.backward or not operation.backward
            for step in every_step(operation, case, device.known(arch)) if wanted else ():
                steps.setdefault(step.kernel.identity, (step, case.dtype))
    return steps


@cache
def lto_ir(kernel: Kernel, arch: str) -> bytes:
    """Numba's LTO IR of a kernel, compiled once for all tests: most of the work."""
    return compiler.lto_ir(kernel, arch)


def ptx_of(kernel: Kernel, arch: str) -> str:
    """The linker's PTX of that, before it is assembled."""
    return compiler.link(lto_ir(kernel, arch), arch, ptx=True)[0].decode().rstrip("\0")


def sound(kernel: Kernel, arch: str, shared_bytes: int = 0) -> compiler.Report:
    """The report of a build whose values are all in registers."""
    report = compiler.compile_kernel(kernel, arch, shared_bytes).report
    assert report.allowed and not report.complaints, report
    assert not report.stack_bytes and not report.spill_bytes, report
    return report
