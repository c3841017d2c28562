"""PTX instructions for kernels, a file a chapter, each with the twin that the simulator runs.

`asm.RECORDS` lists those of the chapters that were imported, with the members of families (`asm.FAMILIES`) that were
made; importing this package imports all chapters.
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
