"""The Configs of attention's sm80 rung, and what lies in the shared memory of its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...tile.warp_mma import LINE_BYTES, FactorSlice
from ...tile.warp_rows import WarpRowsLayout

ROWS = 64  # queries of four warps
STAGES = 2
ROW_BYTES = 32  # of a thread: maximum and sum of each of four rows


def pitch(width: int, itemsize: int) -> int:
    """Elements of a row that lie in one box."""
    whole = LINE_BYTES // itemsize
    return whole // 2 if itemsize == 2 and width <= whole // 2 else whole


def box_count(width: int, itemsize: int) -> int:
    """Boxes that a head of this width fills; what is beyond the head is zeros."""
    return -(-width // pitch(width, itemsize))


class Tiles(NamedTuple):
    """Boxes in shared memory, and where they begin, in elements."""

    q: FactorSlice
    k: FactorSlice
    v: FactorSlice
    q_boxes: int
    v_boxes: int
    k_at: int
    v_at: int
    k_size: int  # from a stage to the next
    v_size: int
    nbytes: int


@dataclass(frozen=True)
class Sm80Config:
    """A block has 64 queries for each of `groups` of four warps, and block_kv keys at a time in each of two stages.

    strips: the strips of 16 of its group's queries that a warp has, 64 apart. It reads K and V once for all of them.
    """

    groups: int
    block_kv: int
    min_blocks: int = 1
    strips: int = 1

    @property
    def block_q(self) -> int:
        return ROWS * self.groups * self.strips

    @property
    def threads(self) -> int:
        return 128 * self.groups

    def tiles(self, D: int, Dv: int, itemsize: int) -> Tiles:
        """For heads of these widths."""
        along, across = pitch(D, itemsize), pitch(Dv, itemsize)
        q, k = (FactorSlice("depth", rows, along, itemsize) for rows in (self.block_q, self.block_kv))
        v = FactorSlice("row", across, self.block_kv, itemsize)
        q_boxes, v_boxes = box_count(D, itemsize), box_count(Dv, itemsize)
        k_at = q_boxes * q.size
        k_size, v_size = q_boxes * k.size, v_boxes * v.size
        v_at = k_at + STAGES * k_size
        rows = 4 * self.threads // 32 * WarpRowsLayout(across).size
        return Tiles(
            q, k, v, q_boxes, v_boxes, k_at, v_at, k_size, v_size, max(itemsize * (v_at + STAGES * v_size), rows)
        )

    def shared_bytes(self, D: int, Dv: int, itemsize: int) -> int:
        tiles = self.tiles(D, Dv, itemsize)
        return self.rows_at(tiles) + (ROW_BYTES * self.threads if self.strips > 1 else 0)

    def rows_at(self, tiles: Tiles) -> int:
        """The byte where maxima and sums of rows are kept."""
        return -(-tiles.nbytes // 16) * 16

    def holds_q(self, D: int, itemsize: int) -> bool:
        """Whether a thread keeps its share of Q in registers: of float32 it would be two parts."""
        return D <= 128 and itemsize == 2 and self.strips == 1


LIGHT_OPTIONS = ("band", "sinks", "key_padding_mask")  # that need no registers for themselves
LONG_OPTIONS = ("score_mod", "mask_mod")  # of which nobody knows how many they need


STRIPS_BESIDE = ("band",)  # options with which a warp may have two strips of queries


def configs(
    D: int, Dv: int, itemsize: int, options: Sequence[str], many: bool = False
) -> Iterator[tuple[Sm80Config, str]]:
    """Tiles for heads of these widths, best first: none where there are too few registers for results. many: more than
    ROWS queries, in sequences of one length, whose rows are copied 16 bytes at a time, on Hopper; for others the
    assembler finds no registers for two strips.

    Of FlashAttention-2's TFLOP/s on an H200, D=128, S=8192, full and causal: two strips 1.03 and 1.10, one 0.93 and
    1.04; 32 keys 0.96 and 0.99; eight warps 0.99 and 1.04.
    """
    heavy = [name for name in options if name not in LIGHT_OPTIONS]
    rich = len(heavy) > 1 or any(name in LONG_OPTIONS for name in heavy)
    told = ", options need registers" if rich else ""
    widest = max(D, Dv)
    if (Dv > 128 and (rich or "bias" in heavy)) or (Dv > 192 and itemsize == 4):
        return
    if itemsize == 4:
        block_kv = 32 if widest <= 64 else 16
        yield Sm80Config(1, block_kv), f"64 queries by {block_kv} keys, in two parts each"
        return
    if many and widest <= 128 and all(name in STRIPS_BESIDE for name in options):
        yield Sm80Config(1, 64, min_blocks=2, strips=2), "128 queries, 32 a warp, by 64 keys"
    if widest <= 128 and not rich:
        yield Sm80Config(1, 64, min_blocks=2), "64 queries by 64 keys"
    if widest <= 128:
        yield Sm80Config(1, 32, min_blocks=2), f"64 queries by 32 keys{told or ', little shared memory'}"
    else:
        yield Sm80Config(1, 32), f"64 queries by 32 keys, wide heads{told}"
