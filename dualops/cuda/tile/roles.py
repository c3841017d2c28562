"""Warpgroup specialization: the last warpgroup of a block loads and gives up registers, the others multiply."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..compiler.backend import Namespace, verb
from ..ptx.registers import setmaxnreg_dec, setmaxnreg_inc

# by the number of multiplying warpgroups, registers of a thread that loads and of one that multiplies; an SM has 65536,
# and a block of 256 threads has all that a thread can have
REGISTERS = {2: (40, 232), 3: (32, 160)}
MOST_REGISTERS = {2: (24, 240), 3: (32, 160)}


class Roles(Namespace):
    """The verbs, each by all threads of a warpgroup, once."""

    threads: int  # of a block
    produce: Callable[..., None]  # (): this warpgroup loads
    consume: Callable[..., None]  # (): this one multiplies


@cache
def roles(consumers: int, *, most: bool = False) -> Roles:
    """The roles of a block with 1 to 3 consumer warpgroups. most: the producer warpgroup uses fewer registers."""
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
