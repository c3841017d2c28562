"""Loads and stores of float32 numbers in shared memory, by 32-bit addresses: one, two neighbours, or four.

at: the index of the first number, in elements of the array, which may be bytes.
"""

from __future__ import annotations

from ..compiler.backend import verb
from ..ptx.arithmetic import bits_of_f32, f32_of_bits
from ..ptx.memory import (
    ld_shared_b32,
    ld_shared_v2_f32 as ld_shared_v2_f32,
    st_shared_b32,
    st_shared_v2_f32 as st_shared_v2_f32,
    st_shared_v4_b32,
)


@verb
def load_float(array, at):
    return f32_of_bits(ld_shared_b32(array, at))


@verb
def store_float(array, at, x):
    st_shared_b32(array, at, bits_of_f32(x))


@verb
def store_four_floats(array, at, four):
    a, b, c, d = bits_of_f32(four[0]), bits_of_f32(four[1]), bits_of_f32(four[2]), bits_of_f32(four[3])
    st_shared_v4_b32(array, at, a, b, c, d)
