"""A product of which each warp makes 32 x 32, and its sum over what several blocks add in memory, one after another.

A tile [rows, columns] lies in memory as strips of 16 rows, each as products of 16 x 8: of each the number that a lane
has first, lane after lane, then the second, to the fourth. So a warp's additions meet neighbouring numbers, and who has
16 rows finds them as accumulators lie.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..backend import Namespace, cuda, i32, i64, u32, verb
from ..ptx.memory import red_add_f32
from .unrolled import one_after_another
from .warp_mma import FactorSlice, fragments, warp_products

SIDE = 32  # rows and columns of a warp
QUAD = 4 * 32  # numbers of a product of 16 x 8
TILES = SIDE // 8  # such products beside one another


class TileSums(Namespace):
    """The verbs, by all warps of a block: each has its rows and columns."""

    multiply: Callable[..., Any]  # (smem, a_at, b_at) -> acc
    store: Callable[..., None]  # (sums, at, acc): at: where the tile begins
    add: Callable[..., None]  # (sums, at, acc)


@cache
def tile_sums(dtype: str, a: FactorSlice, b: FactorSlice, parts: int, boxes: int) -> TileSums:
    """a: a part of the rows, of which there are so many; b: a box of the columns, likewise."""
    a_side, b_side, products = (
        fragments(a, SIDE, left=True),
        fragments(b, SIDE, left=False),
        warp_products(dtype, SIDE, SIDE),
    )
    DOWN, IN_PART, IN_BOX = parts * a.rows // SIDE, a.rows // SIDE, b.rows // SIDE
    PART, BOX, STRIP, SIZE = a.size, b.size, boxes * b.rows // 8 * QUAD, SIDE * SIDE // 32

    def step(n: int) -> Callable[..., None]:
        @verb
        def add_step(acc, smem, a_place, b_place):
            a_frag, b_frag = a_side.make(), b_side.make()
            a_side.read(a_frag, 0, smem, a_place, n)
            b_side.read(b_frag, 0, smem, b_place, n)
            products.multiply(acc, a_frag, b_frag, 0)

        return add_step

    add_steps = one_after_another([step(n) for n in range(a.depth // a.step)])

    @verb
    def multiply(smem, a_at, b_at):
        warp, acc = i32(u32(cuda.threadIdx.x) // u32(32)), products.make()
        down, across = i32(u32(warp) % u32(DOWN)), i32(u32(warp) // u32(DOWN))
        a_place = i32(a_at + down // IN_PART * PART + a_side.start(i32(down % IN_PART * SIDE)))
        b_place = i32(b_at + across // IN_BOX * BOX + b_side.start(i32(across % IN_BOX * SIDE)))
        add_steps(acc, smem, a_place, b_place)
        return acc

    @verb
    def mine():
        tid = u32(cuda.threadIdx.x)
        warp = tid // u32(32)
        return i64(i32(warp % u32(DOWN) * u32(2 * STRIP) + warp // u32(DOWN) * u32(TILES * QUAD) + tid % u32(32)))

    def place(e: int) -> int:
        return e // (4 * TILES) * STRIP + e // 4 % TILES * QUAD + e % 4 * 32

    def of_number(e: int, change: Callable[..., None]) -> Callable[..., None]:
        PLACE = place(e)

        @verb
        def one(sums, first, acc, _):
            change(sums, first + PLACE, acc[e])

        return one

    @verb
    def put(sums, at, value):
        sums[at] = value

    put_all, add_all = (one_after_another([of_number(e, change) for e in range(SIZE)]) for change in (put, red_add_f32))

    @verb
    def store(sums, at, acc):
        put_all(sums, at + mine(), acc, 0)

    @verb
    def add(sums, at, acc):
        add_all(sums, at + mine(), acc, 0)

    return TileSums(multiply=multiply, store=store, add=add)
