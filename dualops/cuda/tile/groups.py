"""Loads and stores of a given number of neighbours: for arrays of several dtypes that are walked together.

A thread has the same number of elements of each array: 16 bytes of the widest dtype, and fewer of the others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ..compiler.backend import f32, i32, verb
from ..ptx.addresses import array_at, store_words as store_words
from ..ptx.convert import pack_bf16x2, pack_f16x2, unpack_bf16x2, unpack_f16x2
from ..ptx.memory import ld_global_once_v2_b32, st_global_v2_b32
from .storage import Access, access, storage


@cache
def group(dtype: str, count: int) -> Access:
    """The verbs for `count` neighbours of a dtype: 1, as many as 16 bytes hold, or four of 16 bits.

    Loads of more than one element bypass L1. Addresses must be multiples of the group's size. Raises ValueError for
    another count.
    """
    if count == 1:
        return access(dtype, False)
    if count == storage(dtype).vector:
        return access(dtype, True, once=True)
    if count == 4 and dtype in ("float16", "bfloat16"):
        return _four(unpack_f16x2, pack_f16x2) if dtype == "float16" else _four(unpack_bf16x2, pack_bf16x2)
    raise ValueError(f"{count} elements of {dtype} are loaded together, expected 1 or {storage(dtype).vector}")


def _four(unpack: Any, pack: Any) -> Access:
    @verb
    def load(frag, at, x, index, keep, fill):
        a, b = ld_global_once_v2_b32(x, index, i32(keep), pack(f32(fill), f32(fill)))
        frag[at], frag[at + 1] = unpack(a)
        frag[at + 2], frag[at + 3] = unpack(b)

    @verb
    def store(y, index, keep, frag, at):
        st_global_v2_b32(y, index, i32(keep), pack(frag[at], frag[at + 1]), pack(frag[at + 2], frag[at + 3]))

    return Access(vector=4, load=load, store=store)


@cache
def array_in(dtype: str) -> Any:
    """Return the verb (table, index) -> the array of a dtype whose address is in a table, an array of int64."""
    place = array_at(storage(dtype).element)

    @verb
    def array(table, index):
        return place(table[index])

    return array
