"""matmul's ladder on CUDA cores: a block computes a tile of the result from slices in shared memory.

One kernel, two Configs: a thread computes one element of the tile, or its own small tile in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dualops.cuda.compiler.backend import Kernel, builds, cuda, f32, i64, kernel, pointer, u16
from dualops.cuda.matmul.tiled import block_order
from dualops.cuda.tile.groups import group
from dualops.cuda.tile.products import mma_ab
from dualops.cuda.tile.shared import Part, Shared, Tile
from dualops.cuda.tile.vector_load import vector_tile

DTYPE = "bfloat16"  # of a, b and y in all steps


@dataclass(frozen=True)
class TilesConfig:
    """A block of lanes x lanes threads. Each computes rows x columns neighbouring elements of the result."""

    lanes: int
    rows: int
    columns: int
    block_k: int  # steps of the sum in a slice

    @cached_property
    def threads(self) -> int:
        return self.lanes * self.lanes

    @cached_property
    def block_m(self) -> int:
        return self.lanes * self.rows

    @cached_property
    def block_n(self) -> int:
        return self.lanes * self.columns

    def shared_bytes(self, dtype: str) -> int:
        return slices(self).nbytes


class Slices(NamedTuple):
    """The layout of shared memory, which holds float32."""

    a: Tile  # [BLOCK_M, BLOCK_K]
    b: Tile  # [BLOCK_K, BLOCK_N]
    nbytes: int


def slices(config: TilesConfig) -> Slices:
    """Return the layout of a kernel's shared memory."""
    shared = Shared(DTYPE, config.threads)
    a = vector_tile(shared, config.block_m, config.block_k, aligned=True)
    b = vector_tile(shared, config.block_k, config.block_n, aligned=True)
    return Slices(a, b, shared.nbytes)


@builds
def build_tiles(config: TilesConfig) -> Kernel:
    """Build matmul_tiles(y, a, b, M, N, K): a block computes y[m0 : m0 + BLOCK_M, n0 : n0 + BLOCK_N].

        1  for each slice of BLOCK_K steps along the sum:
        2      the block loads a's and b's part of it to shared memory; barrier
        3      acc [rows, columns] += a @ b, where each number is read by all threads that need it; barrier
        4  y = acc

    Slices are 0 beyond the edges of a and b. N and K: multiples of 8.
    """
    tile = slices(config)
    product = mma_ab(f32, tile.a, tile.b, config.rows, config.columns, config.lanes)
    out, of_block = group(DTYPE, config.columns), block_order(config.block_m, config.block_n)

    @kernel(*[pointer(u16)] * 3, *[i64] * 3, threads=config.threads)
    def matmul_tiles(y, a, b, M, N, K):
        smem = cuda.shared.array(0, f32, alignment=16)
        _, m0, n0 = of_block(M, N)
        acc = product.fragment()
        product.clear(acc)
        for k0 in range(0, K, config.block_k):
            tile.a.load(smem, Part(a, m0 * K + k0, K, M - m0, K - k0, 0))
            tile.b.load(smem, Part(b, k0 * N + n0, N, K - k0, N - n0, 0))
            cuda.syncthreads()
            product.add(acc, smem)
            cuda.syncthreads()

        m, n = m0 + cuda.threadIdx.x // config.lanes * config.rows, n0 + product.column(0)
        for i in range(config.rows):
            out.store(y, (m + i) * N + n, (m + i < M) & (n < N), acc, i * config.columns)

    return matmul_tiles
