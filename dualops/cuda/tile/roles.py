"""Warpgroups with different work: the last of a block loads, the others multiply, with registers that it gives up."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..backend import Namespace, verb
from ..ptx.registers import setmaxnreg_dec, setmaxnreg_inc

# by the number of multiplying warpgroups and the registers of a thread that loads, those of one that multiplies; an SM
# has 65536, and a block of 256 threads has all that a thread can have
REGISTERS = {2: {40: 232, 24: 240}, 3: {32: 160}}


class Roles(Namespace):
    """The verbs, each by all threads of a warpgroup, once."""

    threads: int  # of a block
    produce: Callable[..., None]  # (): this warpgroup loads
    consume: Callable[..., None]  # (): this one multiplies


@cache
def roles(consumers: int, few: int = 0) -> Roles:
    """For so many warpgroups that multiply, 1 to 3. few: registers of one that loads, where that is a choice."""
    threads = 128 * (consumers + 1)

    @verb
    def nothing():
        pass

    if consumers not in REGISTERS:
        return Roles(threads=threads, produce=nothing, consume=nothing)
    FEW = few if few in REGISTERS[consumers] else max(REGISTERS[consumers])
    MANY = REGISTERS[consumers][FEW]

    @verb
    def produce():
        setmaxnreg_dec(FEW)

    @verb
    def consume():
        setmaxnreg_inc(MANY)

    return Roles(threads=threads, produce=produce, consume=consume)
