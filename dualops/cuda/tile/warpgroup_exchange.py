"""Send numbers from one warpgroup to another through shared memory, thread to thread.

Numbers are sent as float32. If all are below 16, they may be multiplied by 2**12 and sent as float16, which keeps 11
bits down to 2**-26; larger numbers become infinite.

    one warpgroup                               the other
    place = box.claim(barriers, i)              place = box.take(barriers, i)
    box.put(smem, place, values)                box.get(values, smem, place, n)
    box.hand(barriers, i)                       box.free(barriers, i)

Fillings are numbered by `i`. Filling i is in place i % places, in phase i // places of the place's two mbarriers, which
count the warps of one warpgroup. A thread reads the numbers of the thread with the same number in its warpgroup. Its 16
bytes are next to those of its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

from ..compiler.backend import Members, Noun, cuda, f32, i32, kept_noun, members, u32, verb
from ..ptx.arithmetic import bits_of_f32, f32_of_bits
from ..ptx.convert import pack_f16x2
from ..ptx.memory import ld_shared_v4_b32, st_shared_v4_b32
from ..ptx.warp import bar_warp_sync
from .pipeline import arrivals, arrives, places
from .rows import FULL_WARP
from .storage import storage
from .unrolled import unrolled

THREADS = 128
EIGHT = 8  # numbers
WIDE = 16  # bytes


Handover = Noun  # what `warpgroup_exchange` makes


def exchange_bytes(size: int, places: int, exact: bool) -> int:
    """Return the bytes of shared memory for `size` numbers of each thread, in `places` places."""
    return (4 if exact else 2) * THREADS * size * places


@kept_noun
def warpgroup_exchange(at: int, size: int, count: int, exact: bool) -> Members:
    """The verbs for `size` numbers per thread, a multiple of 8. Shared memory begins at byte `at`. exact: as
    float32."""
    own, BYTES = places(count, arrivals(THREADS // 32), arrivals(THREADS // 32)), exchange_bytes(size, 1, exact)
    NUMBER = exchange_bytes(1, 1, exact)
    put_eight, get_eight = _as_floats() if exact else _as_halves()

    @verb
    def _mine(place, n):
        return i32(at + place * BYTES + n * NUMBER + WIDE * i32(u32(cuda.threadIdx.x) % u32(THREADS)))

    @unrolled(range(0, size, EIGHT))
    def put(smem, place, values, n):
        put_eight(smem, _mine(place, n), values, n)

    @verb
    def get(values, smem, place, n):
        """Read eight numbers, from number n on, a constant."""
        get_eight(values, smem, _mine(place, n))

    @verb
    def free(barriers, i):
        """Free the place, after all lanes of my warp have read their numbers, for example after the wait for a
        product."""
        if arrives():
            own.free(barriers, i)

    @verb
    def leave(barriers, i):
        """Free the place, if lanes have not synchronized since they read their numbers."""
        bar_warp_sync(FULL_WARP)
        free(barriers, i)

    return members(locals(), barriers=own.barriers, init=own.init, claim=own.claim, hand=own.hand, take=own.take)


def _as_floats() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the verbs (smem, place, values, n) and (values, smem, place) for eight numbers as float32.

    The last four numbers of all threads are stored after the first four of all threads.
    """

    @verb
    def put(smem, place, values, n):
        for m in range(0, EIGHT, 4):
            a, b = bits_of_f32(values[n + m]), bits_of_f32(values[n + m + 1])
            c, d = bits_of_f32(values[n + m + 2]), bits_of_f32(values[n + m + 3])
            st_shared_v4_b32(smem, i32(place + m // 4 * WIDE * THREADS), a, b, c, d)

    @verb
    def get(values, smem, place):
        for m in range(0, EIGHT, 4):
            a, b, c, d = ld_shared_v4_b32(smem, i32(place + m // 4 * WIDE * THREADS))
            values[m], values[m + 1] = f32_of_bits(a), f32_of_bits(b)
            values[m + 2], values[m + 3] = f32_of_bits(c), f32_of_bits(d)

    return put, get


def _as_halves() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the verbs (smem, place, values, n) and (values, smem, place) for eight adjacent numbers as float16."""
    LARGER, SMALLER, mem = f32(2**12), f32(2**-12), storage("float16")

    @verb
    def two(values, n):
        return pack_f16x2(values[n] * LARGER, values[n + 1] * LARGER)

    @verb
    def put(smem, place, values, n):
        st_shared_v4_b32(smem, place, two(values, n), two(values, n + 2), two(values, n + 4), two(values, n + 6))

    @verb
    def get(values, smem, place):
        mem.load_shared(values, 0, smem, place)
        for e in range(EIGHT):
            values[e] *= SMALLER

    return put, get
