"""From a kernel to a cubin: Numba -> LTO-IR -> nvJitLink, without a GPU.

LTO-IR and not PTX is linked: from PTX, ptxas would make relocatable code, ignore `setmaxnreg` and serialise `wgmma`.
`binaries` caches compiled kernels, and compiles many in parallel.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..launch.device import compute_capability, known
from .backend import SIMULATED, Kernel, compiler_lock

REGISTERS_PER_SM = 65536
# setmaxnreg ignored, wgmma serialised (for one of ten reasons): a kernel that is right and several times too slow
FATAL_COMPLAINTS = ("C7504", "C7509", "C7510", "C7514", "wgmma.mma_async instructions are serialized")


@dataclass(frozen=True)
class Report:
    """The assembler's report on a kernel."""

    name: str
    arch: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    static_shared: int
    dynamic_shared: int
    cubin_bytes: int
    complaints: tuple[str, ...]
    allowed: bool
    seconds: float


@dataclass(frozen=True)
class Binary:
    """A compiled kernel."""

    entry: str
    cubin: bytes
    report: Report


def compile_kernel(kernel: Kernel, arch: str, shared_bytes: int = 0, ltoir: bytes | None = None) -> Binary:
    """Compile, whatever the disk holds; `ltoir`: what `lto_ir` made, if it did so already.

    Raises RuntimeError in the simulator, or without numba-cuda.
    """
    began = time.perf_counter()
    with compiler_lock:
        cubin, log = link(lto_ir(kernel, arch) if ltoir is None else ltoir, arch)
    report = _report(kernel, arch, shared_bytes, cubin, log, time.perf_counter() - began)
    return Binary(_entry(cubin), cubin, report)


@contextmanager
def without_collections() -> Iterator[None]:
    """Automatic collections of garbage wait until it is over, in all threads."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_collections()  # what Numba's modules and passes make lives until the kernel is done
def lto_ir(kernel: Kernel, arch: str) -> bytes:
    """Compile a kernel with Numba to LTO-IR for the linker: most of the work.

    Raises RuntimeError in the simulator, or without numba-cuda.
    """
    if SIMULATED:
        raise RuntimeError("dualops.cuda: nothing can be compiled in the simulator, unset NUMBA_ENABLE_CUDASIM")
    try:
        from .frontend import ltoir
    except ImportError as error:
        raise RuntimeError(f"dualops.cuda: compiling needs numba-cuda, pip install dualops[cu13] ({error})") from error
    return ltoir(kernel.function, kernel.argtypes, compute_capability(arch), (kernel.threads, kernel.min_blocks))


def link(ltoir: bytes, arch: str, *, ptx: bool = False) -> tuple[bytes, str]:
    """The cubin, or the PTX, of LTO-IR, and the assembler's report. Nothing else in dualops calls nvJitLink.

    A linker that is destroyed in another thread than its own crashes the process, then or in a later link. The garbage
    collector could do so: exceptions that Numba keeps hold frames alive, and the collector runs in any thread.
    The driver's cache of what was linked before, which nvJitLink uses where there is a GPU, keeps no log.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode

    verbose = None if ptx else "-v"
    options = LinkerOptions(arch=arch, ptxas_options=verbose, link_time_optimization=True, ptx=ptx, no_cache=True)
    linker = Linker(ObjectCode.from_ltoir(ltoir), options=options)
    try:
        code = bytes(linker.link("ptx" if ptx else "cubin").code)
        return code, linker.get_info_log() + linker.get_error_log()
    finally:
        linker.close()


def _entry(cubin: bytes) -> str:
    """The kernel's name in a cubin: its code lies in the section .text.<name>."""
    found = re.search(rb"\0\.text\.([^\0]+)\0", cubin)
    if not found:
        raise RuntimeError("dualops.cuda: the linker built a cubin without a kernel")
    return found[1].decode()


def _report(kernel: Kernel, arch: str, dynamic: int, cubin: bytes, log: str, seconds: float) -> Report:
    def number(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, log))

    registers, static = number(r"Used (\d+) registers"), number(r"(\d+) bytes smem")
    stack, spills = number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes spill stores")
    complaints = tuple(line.strip() for line in log.splitlines() if re.search(r"(?i:warning)|C7\d\d\d", line))
    fits = (
        registers * kernel.threads * kernel.min_blocks <= REGISTERS_PER_SM
        and static + dynamic <= known(arch).shared_memory_per_block
    )
    sound = not any(code in line for code in FATAL_COMPLAINTS for line in complaints)
    return Report(
        name=kernel.identity.removeprefix("dualops.cuda."),
        arch=arch,
        registers=registers,
        stack_bytes=stack,
        spill_bytes=spills,
        static_shared=static,
        dynamic_shared=dynamic,
        cubin_bytes=len(cubin),
        complaints=complaints,
        allowed=registers > 0 and fits and sound and stack == 0 and spills == 0,
        seconds=round(seconds, 3),
    )
