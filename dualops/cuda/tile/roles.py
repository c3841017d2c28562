"""Warpgroup specialization: the last warpgroup of a block loads and gives up registers, the others multiply."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..compiler.backend import Namespace, verb
from ..ptx.registers import setmaxnreg_dec, setmaxnreg_inc

# number of consumer warpgroups -> registers per thread of the producer and of a consumer; an SM has 65536. A block of
# 256 threads needs no entry: its threads already have the most registers that a thread can have
REGISTERS = {2: (40, 232), 3: (32, 160)}
MOST_REGISTERS = {2: (24, 240), 3: (32, 160)}


class Roles(Namespace):
    """The verbs of both roles. All threads of a warpgroup call one of them, once."""

    threads: int  # threads per block
    produce: Callable[..., None]  # (): take the producer's number of registers
    consume: Callable[..., None]  # (): take a consumer's number of registers


@cache
def roles(consumers: int, *, most: bool = False) -> Roles:
    """Return the roles of a block with 1 to 3 consumer warpgroups. most: consumers get the most registers possible."""
    threads, registers = 128 * (consumers + 1), MOST_REGISTERS if most else REGISTERS

    @verb
    def nothing():
        pass

    if consumers not in registers:
        return Roles(threads=threads, produce=nothing, consume=nothing)
    FEW, MANY = registers[consumers]

    @verb
    def produce():
        setmaxnreg_dec(FEW)

    @verb
    def consume():
        setmaxnreg_inc(MANY)

    return Roles.from_locals(locals())
