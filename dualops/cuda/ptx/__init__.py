"""PTX instructions for kernels: each file has one kind, and each instruction has a twin that the simulator runs.

Importing this package imports all files. `asm.RECORDS` lists all imported instructions, including the members of
families (`asm.FAMILIES`) that were made so far.
"""

from . import (
    arithmetic,
    asm,
    async_copy,
    convert,
    cp_async,
    fences,
    grid,
    ldmatrix,
    mbarrier,
    memory,
    mma,
    registers,
    stmatrix,
    tma,
    warp,
    wgmma,
)

__all__ = [
    "arithmetic",
    "asm",
    "async_copy",
    "convert",
    "cp_async",
    "fences",
    "grid",
    "ldmatrix",
    "mbarrier",
    "memory",
    "mma",
    "registers",
    "stmatrix",
    "tma",
    "warp",
    "wgmma",
]
