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
    matrices,
    mbarrier,
    memory,
    mma,
    registers,
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
    "matrices",
    "mbarrier",
    "memory",
    "mma",
    "registers",
    "tma",
    "warp",
    "wgmma",
]
