"""Asynchronous copies from global to shared memory, in groups per thread (sm_80 and later).

The twins delay a copy on purpose. Its destination becomes NaN when the copy is issued. When its thread waits for the
group, the copy reads the source and writes the destination. Other threads see the data after a barrier.
"""

from __future__ import annotations

from ..simulator import current
from .asm import family, instruction


@family(nbytes=(4, 8, 16), zfill=(False, True))
def cp_async(nbytes, zfill=False):
    """Start copying `nbytes` bytes, beginning at x[index], to to[to_index]. Both are aligned to `nbytes`.

    Copies of 16 bytes bypass L1. zfill: only the first `size` bytes are read, and the rest becomes zeros.
    """
    level = "cg" if nbytes == 16 else "ca"
    text, section = f"cp.async.{level}.shared.global [{{to}}], [{{x}}], " + str(nbytes), "9.7.9.25.3.1"

    if not zfill:

        @instruction("(shared[i32], global[i64]) -> void", text + ";", section=section, name=f"cp_async_{nbytes}")
        def whole(to, to_index, x, index):
            """Copy all bytes."""
            _start(to, to_index, x, index, nbytes, nbytes)

        return whole

    @instruction(
        "(shared[i32], global[i64], u32) -> void", text + ", {size};", section=section, name=f"cp_async_{nbytes}_zfill"
    )
    def filled(to, to_index, x, index, size):
        """Copy the first `size` bytes, then write zeros."""
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
    """Put this thread's copies that are in no group yet into a new group, which may be empty."""
    current().copies.append([])


@instruction("(imm[0..63]) -> void", "cp.async.wait_group {pending};", section="9.7.9.25.3.3")
def cp_async_wait_group(pending):
    """Wait for all groups of this thread except the latest `pending`. Copies in no group are not waited for."""
    copies = current().copies
    while len(copies) - 1 > pending:
        for land in copies.pop(0):
            land()
