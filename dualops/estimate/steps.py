"""What a step of a kernel on tensor cores keeps busy, from its products and its scores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..cuda.launch.arrays import align_up
from .architectures import Architecture
from .model import Units

# clocks of a step that threads wait: for a barrier, and for the first of a product's results. This, HANDOVER and the
# shares of `exposed` are fitted: to the seven figures of dq that its page (section 13) and sm90/config.py have, of 128,
# 96 and 64 keys a tile in turns (702, 644, 563), of 128 and 96 not in turns (643, 611), and of 48 with D = 256
# both ways (626, 686), and for forward to three of sm90/config.py: 620 in turns and 627 not in turns, D = 128, and 506
# of three warpgroups, D = 64. The working clock of `architectures` is the one with which they agree. Everything else
# that is measured was left for the tests to hold the model against.
STEP = 230
HANDOVER = 385  # more, for each warpgroup that takes turns with others
FORWARD_EXPOSED, DQ_EXPOSED = 0.47, 0.85  # of a step's softmax what no product hides, where there are no turns
# all of it in dk and dv, whose step waits twice, for dv between P and dS: this is not fitted, but the loop was
# read because without this the estimates were 6 to 13 % too good
DKV_EXPOSED = 1.0
MOST_REGISTERS, MOST_BLOCKS = 255, 32  # of a thread; of an SM


class Product(NamedTuple):
    """[rows, depth] @ [depth, columns] by a block. left: whether the left factor is read from shared memory."""

    rows: int
    columns: int
    depth: int
    left: bool

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.depth

    @property
    def warpgroup_bytes(self) -> float:
        """Of shared memory that warpgroups read, 64 rows each: of 16 bits, 16 deep at a time."""
        return self.rows / 64 * self.depth / 16 * (2048 * self.left + 32 * self.columns)

    def warp_bytes(self, rows: int, columns: int) -> float:
        """Return the bytes of shared memory that warps read, each with this many rows and columns."""
        warps = self.rows / rows * self.columns / columns
        return warps * self.depth / 16 * 32 * (rows * self.left + columns)


class Softmax(NamedTuple):
    """Scores of a step, and ordinary instructions: for each score, and for sums that are rescaled."""

    scores: int
    instructions: float
    rescaled: int = 0

    def exponentials(self, gpu: Architecture) -> float:
        """Clocks."""
        return self.scores / gpu.exponentials

    def arithmetic(self, gpu: Architecture) -> float:
        """Clocks."""
        return (self.scores * self.instructions + self.rescaled) / gpu.lanes

    def waits(
        self, gpu: Architecture, exposed: float, groups: int, turns: bool = False, products_waited_for: int = 1
    ) -> float:
        """Clocks of a step in which no unit is busy. groups: of threads that work side by side on steps of their own:
        one alone hides nothing; in turns, each computes its exponentials during the other's products.
        """
        if turns and groups > 1:
            return STEP + HANDOVER * groups
        softmax = self.exponentials(gpu) + self.arithmetic(gpu)
        return products_waited_for * STEP + (exposed if groups > 1 else 1) * softmax


def warpgroup_step(
    gpu: Architecture, dtype: str, products: Iterable[Product], softmax: Softmax, moved_bytes: int
) -> Units:
    """Of Hopper's products. moved_bytes: what else goes into shared memory or out of it."""
    products = list(products)
    shared = sum(product.warpgroup_bytes for product in products) + moved_bytes
    return _units(gpu, sum(product.flops for product in products) / gpu.tensor[dtype], softmax, shared)


def warp_step(
    gpu: Architecture, products: Iterable[tuple[Product, tuple[int, int]]], softmax: Softmax, moved_bytes: int
) -> Units:
    """Of a warp's products, each with the rows and columns that a warp has of it."""
    products = list(products)
    shared = sum(product.warp_bytes(*tile) for product, tile in products) + moved_bytes
    return _units(gpu, sum(product.flops for product, _ in products) / gpu.warp_tensor, softmax, shared)


def _units(gpu: Architecture, tensor: float, softmax: Softmax, shared_bytes: float) -> Units:
    return Units(tensor, softmax.exponentials(gpu), softmax.arithmetic(gpu), shared_bytes / gpu.shared_bandwidth)


def by_registers(gpu: Architecture, threads: int, registers: float, min_blocks: int) -> int:
    """Blocks that an SM has registers and threads for. registers: of a thread, if a Config leaves it them."""
    asked = gpu.registers_per_sm // (threads * min_blocks) // 8 * 8
    taken = min(round(registers), asked, MOST_REGISTERS)
    return min(gpu.registers_per_sm // (threads * align_up(taken, 8)), gpu.threads_per_sm // threads, MOST_BLOCKS)


def resident(gpu: Architecture, shared_bytes: int, most: int) -> int:
    """Blocks that an SM has at once: that many at most, where there is room for them. 1 KiB of each is the system's."""
    return max(1, min(most, gpu.shared_per_sm // (shared_bytes + 1024)))
