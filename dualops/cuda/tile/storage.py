"""Storage of a dtype's values in memory, and the verbs that load and store them.

Arithmetic is float32 for every dtype except float64. A kernel is written once for all dtypes, and gets the verbs of its
dtype when it is built. Half-precision arrays are uint16 arrays for the kernel; loads convert them to floats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..compiler.backend import Namespace, f32, f64, i32, u16, verb
from ..ptx.arithmetic import bits_of_f32, f32_of_bits
from ..ptx.convert import (
    bf16_of_f32,
    f16_of_f32,
    f32_of_bf16,
    f32_of_f16,
    pack_bf16x2,
    pack_f16x2,
    unpack_bf16x2,
    unpack_f16x2,
)
from ..ptx.memory import (
    fetch_global_b32 as fetch_global_b32,
    ld_global_b32,
    ld_global_once_v2_f64,
    ld_global_once_v4_b32,
    ld_global_v2_f64,
    ld_global_v4_b32,
    ld_shared_v2_f64,
    ld_shared_v4_b32,
    ld_shared_v4_f32,
    st_global_kept_v4_b32,
    st_global_v2_f64,
    st_global_v4_b32,
)


class Storage(Namespace):
    """The verbs of one dtype. `x`, `y` are arrays of `element`, indices are int64 and count elements."""

    element: Any  # Numba type of an array's element
    number: Any  # Numba type of arithmetic: f32 or f64
    itemsize: int  # bytes of an element
    vector: int  # elements in 16 bytes
    load: Callable[..., Any]  # (x, index) -> number
    store: Callable[..., None]  # (y, index, number)
    rounded: Callable[..., Any]  # (number) -> the number after a store and a load
    load_vector: Callable[..., None]  # (frag, at, x, index, keep, fill): 16 bytes to frag[at : at + vector]
    store_vector: Callable[..., None]  # (y, index, keep, frag, at)
    store_kept: Callable[..., None]  # store_vector of data that are read again soon: 16 and 32 bits stay in L2
    load_shared: Callable[..., None]  # (frag, at, smem, index): 16 bytes of a shared array of `element`
    load_once: Callable[..., None]  # load_vector, bypassing L1
    load_of_pair: Callable[..., Any]  # (x, start, i): element start + i, start even; loads two 16-bit elements at once
    one_of_pair: Callable[..., Any] | None  # (bits, i): number i of the two in 32 bits, for dtypes of 16 bits


@cache
def storage(dtype: str) -> Storage:
    """The verbs of "float64", "float32", "float16" or "bfloat16"."""
    halves = {
        "float16": (f32_of_f16, f16_of_f32, unpack_f16x2, pack_f16x2),
        "bfloat16": (f32_of_bf16, bf16_of_f32, unpack_bf16x2, pack_bf16x2),
    }
    return _half(*halves[dtype]) if dtype in halves else {"float64": _float64, "float32": _float32}[dtype]()


class Access(Namespace):
    """Loads and stores of `vector` adjacent elements, skipped if `keep` is false."""

    vector: int
    load: Callable[..., None]  # (frag, at, x, index, keep, fill)
    store: Callable[..., None]  # (y, index, keep, frag, at)


@cache
def access(dtype: str, aligned: bool, once: bool = False) -> Access:
    """Loads and stores of 16 bytes if rows are aligned to 16 bytes, else of one element. once: bypass L1."""
    chosen = storage(dtype)
    if aligned:
        load = chosen.load_once if once else chosen.load_vector
        return Access(vector=chosen.vector, load=load, store=chosen.store_vector)

    @verb
    def load(frag, at, x, index, keep, fill):
        if keep:
            frag[at] = chosen.load(x, index)
        else:
            frag[at] = chosen.number(fill)

    @verb
    def store(y, index, keep, frag, at):
        if keep:
            chosen.store(y, index, frag[at])

    return Access(vector=1, load=load, store=store)


@verb
def _load_one(x, index, odd):
    return x[index + odd]


@verb
def _load_element(x, index):
    return x[index]


@verb
def _store_element(y, index, value):
    y[index] = value


@verb
def _same(value):
    return value


def _plain(number: Any, itemsize: int) -> dict[str, Any]:
    """Return the members of dtypes that are computed with as they are stored."""
    sizes = {"element": number, "number": number, "itemsize": itemsize, "vector": 16 // itemsize}
    loads = {"load": _load_element, "load_of_pair": _load_one, "one_of_pair": None}
    return sizes | loads | {"store": _store_element, "rounded": _same}


def _float64() -> Storage:
    def loading(load_two: Any) -> Callable[..., None]:
        @verb
        def load_vector(frag, at, x, index, keep, fill):
            frag[at], frag[at + 1] = load_two(x, index, i32(keep), f64(fill))

        return load_vector

    @verb
    def store_vector(y, index, keep, frag, at):
        st_global_v2_f64(y, index, i32(keep), frag[at], frag[at + 1])

    @verb
    def load_shared(frag, at, smem, index):
        frag[at], frag[at + 1] = ld_shared_v2_f64(smem, index)

    return Storage.from_locals(
        locals(),
        **_plain(f64, 8),
        load_vector=loading(ld_global_v2_f64),
        store_kept=store_vector,
        load_once=loading(ld_global_once_v2_f64),
    )


def _float32() -> Storage:
    def loading(load_words: Any) -> Callable[..., None]:
        @verb
        def load_vector(frag, at, x, index, keep, fill):
            a, b, c, d = load_words(x, index, i32(keep), bits_of_f32(f32(fill)))
            frag[at], frag[at + 1] = f32_of_bits(a), f32_of_bits(b)
            frag[at + 2], frag[at + 3] = f32_of_bits(c), f32_of_bits(d)

        return load_vector

    def storing(store_words: Any) -> Callable[..., None]:
        @verb
        def store_vector(y, index, keep, frag, at):
            a, b = bits_of_f32(frag[at]), bits_of_f32(frag[at + 1])
            c, d = bits_of_f32(frag[at + 2]), bits_of_f32(frag[at + 3])
            store_words(y, index, i32(keep), a, b, c, d)

        return store_vector

    @verb
    def load_shared(frag, at, smem, index):
        frag[at], frag[at + 1], frag[at + 2], frag[at + 3] = ld_shared_v4_f32(smem, index)

    return Storage.from_locals(
        locals(),
        **_plain(f32, 4),
        load_vector=loading(ld_global_v4_b32),
        store_vector=storing(st_global_v4_b32),
        store_kept=storing(st_global_kept_v4_b32),
        load_once=loading(ld_global_once_v4_b32),
    )


def _half(number_of_bits: Any, bits_of_number: Any, unpack: Any, pack: Any) -> Storage:
    @verb
    def load(x, index):
        return number_of_bits(x[index])

    @verb
    def load_of_pair(x, index, odd):
        return one_of_pair(ld_global_b32(x, index), odd)

    @verb
    def one_of_pair(bits, odd):
        first, second = unpack(bits)
        return second if odd else first

    @verb
    def store(y, index, value):
        y[index] = bits_of_number(value)

    @verb
    def rounded(value):
        return number_of_bits(bits_of_number(value))

    def loading(load_words: Any) -> Callable[..., None]:
        @verb
        def load_vector(frag, at, x, index, keep, fill):
            a, b, c, d = load_words(x, index, i32(keep), pack(f32(fill), f32(fill)))
            frag[at], frag[at + 1] = unpack(a)
            frag[at + 2], frag[at + 3] = unpack(b)
            frag[at + 4], frag[at + 5] = unpack(c)
            frag[at + 6], frag[at + 7] = unpack(d)

        return load_vector

    def storing(store_words: Any) -> Callable[..., None]:
        @verb
        def store_vector(y, index, keep, frag, at):
            a, b = pack(frag[at], frag[at + 1]), pack(frag[at + 2], frag[at + 3])
            c, d = pack(frag[at + 4], frag[at + 5]), pack(frag[at + 6], frag[at + 7])
            store_words(y, index, i32(keep), a, b, c, d)

        return store_vector

    @verb
    def load_shared(frag, at, smem, index):
        a, b, c, d = ld_shared_v4_b32(smem, index)
        frag[at], frag[at + 1] = unpack(a)
        frag[at + 2], frag[at + 3] = unpack(b)
        frag[at + 4], frag[at + 5] = unpack(c)
        frag[at + 6], frag[at + 7] = unpack(d)

    return Storage.from_locals(
        locals(),
        element=u16,
        number=f32,
        itemsize=2,
        vector=8,
        load_vector=loading(ld_global_v4_b32),
        store_vector=storing(st_global_v4_b32),
        store_kept=storing(st_global_kept_v4_b32),
        load_once=loading(ld_global_once_v4_b32),
    )
