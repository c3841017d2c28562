"""Asynchronous copies from global to shared memory, in groups of the thread that starts them (sm_80 and later).

The twins are late on purpose: a copy lands when its thread waits for its group, not before, and reads what is there
then; its destination is NaN from the moment it is issued. What a thread has waited for, others see after a barrier.
"""

from __future__ import annotations

from ..simulator import current
from .asm import family, instruction


@family(nbytes=(4, 8, 16), zfill=(False, True))
def cp_async(nbytes, zfill=False):
    """Start copying `nbytes` bytes from x[index] on to to[to_index] and following, both at multiples of as many.

    16 bytes go past L1. zfill: only the first `size` of them are read, the rest becomes zeros; 0 reads nothing.
    """
    level = "cg" if nbytes == 16 else "ca"
    text, section = f"cp.async.{level}.shared.global [{{to}}], [{{x}}], " + str(nbytes), "9.7.9.25.3.1"

    if not zfill:

        @instruction("(shared[i32], global[i64]) -> void", text + ";", section=section, name=f"cp_async_{nbytes}")
        def whole(to, to_index, x, index):
            """All of them."""
            _start(to, to_index, x, index, nbytes, nbytes)

        return whole

    @instruction(
        "(shared[i32], global[i64], u32) -> void",
        text + ", {size};",
        section=section,
        name=f"cp_async_{nbytes}_zfill",
    )
    def filled(to, to_index, x, index, size):
        """The first `size` bytes, then zeros."""
        _start(to, to_index, x, index, nbytes, int(size))

    return filled


def _start(to, to_index, x, index, nbytes, size):
    if not 0 <= size <= nbytes or size % x.itemsize:
        raise ValueError(f"cp.async of {nbytes} bytes: size is {size}, expected whole elements of {x.name} in them")
    index, count = int(index), size // x.itemsize
    if (x.address + index * x.itemsize) % nbytes:
        raise IndexError(f"{x.name}[{index}] is not aligned to {nbytes} bytes")
    if count and not 0 <= index <= x.size - count:
        x.astray(f"copied as {count} elements", index)
    target = to.vector(to_index, nbytes // to.itemsize).view("u1")
    target[:] = 0xFF

    def land():
        target[size:] = 0
        target[:size] = x.data[index : index + count].view("u1")

    current().copies[-1].append(land)


@instruction("() -> void", "cp.async.commit_group;", section="9.7.9.25.3.2")
def cp_async_commit():
    """Make a group of this thread's copies that are in none yet; it may be empty."""
    current().copies.append([])


@instruction("(imm[0..63]) -> void", "cp.async.wait_group {pending};", section="9.7.9.25.3.3")
def cp_async_wait_group(pending):
    """Wait for all groups of this thread but the latest `pending` ones. What is in no group is not waited for."""
    copies = current().copies
    while len(copies) - 1 > pending:
        for land in copies.pop(0):
            land()
