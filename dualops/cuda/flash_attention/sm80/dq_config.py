"""The Configs of dq on attention's sm80 rung."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...tile.warp_mma import FactorSlice
from ...tile.warp_rows import WarpRowsLayout
from .config import LIGHT_OPTIONS, ROWS, STAGES, box_count, pitch

ITEMSIZE = 2
MOST_WIDTH = 128  # of a head, of which gradients have their sums in registers


class Sm80DqTiles(NamedTuple):
    """Boxes in shared memory, and where they begin, in elements."""

    q: FactorSlice
    do: FactorSlice
    k: FactorSlice
    k_right: FactorSlice  # the same as the right factor of dS
    v: FactorSlice
    q_boxes: int
    v_boxes: int
    do_at: int
    k_at: int
    v_at: int
    k_size: int  # from a stage to the next
    v_size: int
    nbytes: int


@dataclass(frozen=True)
class Sm80DqConfig:
    """A block has 64 queries for each of `groups` of four warps, and block_kv keys at a time in each of two stages.

    held: a thread keeps its shares of Q and dO in registers.
    """

    groups: int
    block_kv: int
    held: bool = True
    min_blocks: int = 1

    @property
    def block_q(self) -> int:
        return ROWS * self.groups

    @property
    def threads(self) -> int:
        return 128 * self.groups

    def tiles(self, D: int, Dv: int) -> Sm80DqTiles:
        """For heads of these widths."""
        along, along_v = pitch(D, ITEMSIZE), pitch(Dv, ITEMSIZE)
        q, k = (FactorSlice("depth", rows, along) for rows in (self.block_q, self.block_kv))
        do, v = (FactorSlice("depth", rows, along_v) for rows in (self.block_q, self.block_kv))
        k_right = FactorSlice("row", along, self.block_kv)
        q_boxes, v_boxes = box_count(D, ITEMSIZE), box_count(Dv, ITEMSIZE)
        k_size, v_size = q_boxes * k.size, v_boxes * v.size
        do_at = q_boxes * q.size
        k_at = do_at + v_boxes * do.size
        v_at = k_at + STAGES * k_size
        rows = 4 * self.threads // 32 * WarpRowsLayout(along).size
        nbytes = max(ITEMSIZE * (v_at + STAGES * v_size), rows)
        return Sm80DqTiles(q, do, k, k_right, v, q_boxes, v_boxes, do_at, k_at, v_at, k_size, v_size, nbytes)

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


def dq_configs(D: int, Dv: int, options: Sequence[str]) -> Iterator[tuple[Sm80DqConfig, str]]:
    """Tiles for heads of these widths, best first; none for heads that are too wide."""
    if max(D, Dv) > MOST_WIDTH:
        return
    heavy = [name for name in options if name not in LIGHT_OPTIONS]
    told = ", options need registers" if heavy else ""
    if not heavy:
        yield Sm80DqConfig(1, 64, min_blocks=2), "64 queries by 64 keys for dq"
    yield Sm80DqConfig(1, 32, min_blocks=2), f"64 queries by 32 keys for dq{told or ', little shared memory'}"
    yield Sm80DqConfig(1, 32), "64 queries by 32 keys for dq, in all the shared memory that a consumers' card has"
