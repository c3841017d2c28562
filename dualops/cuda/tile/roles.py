"""Warpgroup specialization: the last warpgroup of a block loads and gives up registers, the others multiply.

With one consumer warpgroup, both verbs do nothing.
"""

from __future__ import annotations

from ..compiler.backend import Members, kept_noun, members, verb
from ..ptx.registers import setmaxnreg_dec, setmaxnreg_inc

# number of consumer warpgroups -> registers per thread of the producer and of a consumer; an SM has 65536. A block of
# 256 threads needs no entry: its threads already have the most registers that a thread can have
REGISTERS = {2: (40, 232), 3: (32, 160)}
MOST_REGISTERS = {2: (24, 240), 3: (32, 160)}


@kept_noun
def roles(consumers: int, *, most: bool = False) -> Members:
    """The verbs of both roles, in a block with 1 to 3 consumer warpgroups. All threads of a warpgroup call one of them,
    once. most: consumers get the most registers possible.
    """
    few, many = (MOST_REGISTERS if most else REGISTERS).get(consumers, (0, 0))

    @verb
    def produce():
        """Take the producer's number of registers."""
        if few:
            setmaxnreg_dec(few)

    @verb
    def consume():
        """Take a consumer's number of registers."""
        if many:
            setmaxnreg_inc(many)

    return members(locals(), threads=128 * (consumers + 1))
