"""Asynchronous copies of 16- and 32-bit elements from global to shared memory (sm_80 and later)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..compiler.backend import Namespace, i32, u32, verb
from ..ptx.cp_async import cp_async, cp_async_commit as cp_async_commit, cp_async_wait_group as cp_async_wait_group
from ..ptx.memory import st_shared_b32


class Copies(Namespace):
    """The verbs of copies of `vector` neighbours. Neighbours after the end of a row become zeros.

    The verb `there` computes how many neighbours exist, a u32, from the number of elements that are left in the row.
    """

    vector: int
    asynchronous: bool
    there: Callable[..., Any]  # (left): below 1 for none
    start: Callable[..., Any]  # (smem, at, x, index, apart, there): neighbours are `apart` in x. Returns end's word
    end: Callable[..., None]  # (smem, at, word)


@cache
def copies(vector: int, itemsize: int = 2) -> Copies:
    """Return the verbs for copies of 16, 8 or 4 aligned bytes, asynchronous, with `apart` 1.

    Copies of one element of 16 bits go through registers, two elements at a time.
    """
    return _asynchronous(vector, itemsize) if vector * itemsize > 2 else _through_registers()


def _asynchronous(vector: int, itemsize: int) -> Copies:
    copy, NOTHING = cp_async(itemsize * vector, True), u32(0)

    @verb
    def there(left):
        return u32(i32(min(max(i32(left), i32(0)), i32(vector))) * itemsize)

    @verb
    def start(smem, at, x, index, apart, there):
        copy(smem, at, x, index, there)
        return NOTHING

    @verb
    def end(smem, at, word):
        pass

    return Copies.from_locals(locals(), asynchronous=True)


def _through_registers() -> Copies:
    NOTHING = u32(0)

    @verb
    def there(left):
        return u32(max(i32(left), i32(0)))

    @verb
    def start(smem, at, x, index, apart, there):
        low, high = NOTHING, NOTHING
        if there > NOTHING:
            low = u32(x[index])
        if there > u32(1):
            high = u32(x[index + apart])
        return low | high << u32(16)

    @verb
    def end(smem, at, word):
        st_shared_b32(smem, at, word)

    return Copies.from_locals(locals(), vector=2, asynchronous=False)
