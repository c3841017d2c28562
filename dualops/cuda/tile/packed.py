"""Keep 16-byte vectors in registers in their storage dtype: 16-bit elements take half the registers of float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..compiler.backend import Namespace, f32, i32, u32, verb
from ..ptx.arithmetic import recomputed_i32 as recomputed_i32
from ..ptx.convert import pack_bf16x2, pack_f16x2, unpack_bf16x2, unpack_f16x2
from ..ptx.memory import ld_global_v4_b32
from .storage import storage


class Packed(Namespace):
    """The verbs of one dtype; `held` is an array of registers, `v` the number of a vector in it."""

    element: Any  # Numba type of a register
    size: int  # registers per vector
    load: Callable[..., None]  # (held, v, x, index, keep, fill)
    unpack: Callable[..., None]  # (frag, at, held, v): convert to numbers
    pack: Callable[..., None]  # (held, v, frag, at): round to the dtype
    unpack_again: Callable[..., None]  # (held): make the compiler unpack again after this, so that it keeps no numbers


@cache
def packed(dtype: str) -> Packed:
    """The verbs of "float64", "float32", "float16" or "bfloat16"."""
    halves = {"float16": (pack_f16x2, unpack_f16x2), "bfloat16": (pack_bf16x2, unpack_bf16x2)}
    return _words(*halves[dtype]) if dtype in halves else _numbers(dtype)


def _words(pack_two: Any, unpack_two: Any) -> Packed:
    @verb
    def load(held, v, x, index, keep, fill):
        w = 4 * v
        words = ld_global_v4_b32(x, index, i32(keep), pack_two(f32(fill), f32(fill)))
        held[w], held[w + 1], held[w + 2], held[w + 3] = words

    @verb
    def unpack(frag, at, held, v):
        for w in range(4):
            frag[at + 2 * w], frag[at + 2 * w + 1] = unpack_two(held[4 * v + w])

    @verb
    def pack(held, v, frag, at):
        for w in range(4):
            held[4 * v + w] = pack_two(frag[at + 2 * w], frag[at + 2 * w + 1])

    @verb
    def unpack_again(held):
        for w in range(len(held)):
            held[w] = u32(recomputed_i32(i32(held[w])))

    return Packed.from_locals(locals(), element=u32, size=4)


def _numbers(dtype: str) -> Packed:
    mem = storage(dtype)
    SIZE = mem.vector

    @verb
    def load(held, v, x, index, keep, fill):
        mem.load_vector(held, v * SIZE, x, index, keep, fill)

    @verb
    def unpack(frag, at, held, v):
        for c in range(SIZE):
            frag[at + c] = held[v * SIZE + c]

    @verb
    def pack(held, v, frag, at):
        for c in range(SIZE):
            held[v * SIZE + c] = frag[at + c]

    @verb
    def unpack_again(held):
        pass

    return Packed.from_locals(locals(), element=mem.number, size=SIZE)
