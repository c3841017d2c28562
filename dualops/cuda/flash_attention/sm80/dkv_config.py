"""The Configs of dk and dv on attention's sm80 rung."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...tile.softmax_rows import LANES
from ...tile.warp_mma import FactorSlice
from ...tile.warp_rows import WarpRowsLayout
from ..lse_delta_smem import lane_columns
from .config import ROWS, box_count, pitch
from .dq_config import ITEMSIZE, MOST_WIDTH


class Sm80DkvTiles(NamedTuple):
    """Boxes in shared memory, and where they begin, in elements. Q and dO are read two ways: as columns of a product,
    and as steps of its sum.
    """

    k: FactorSlice
    v: FactorSlice
    q: FactorSlice
    do: FactorSlice
    q_steps: FactorSlice
    do_steps: FactorSlice
    k_boxes: int
    v_boxes: int
    v_at: int
    q_at: int
    do_at: int
    q_size: int  # from a stage to the next
    do_size: int
    nbytes: int


@dataclass(frozen=True)
class Sm80DkvConfig:
    """A block has 64 keys for each of `groups` of four warps, and block_q queries at a time in each of its stages.

    k_held, v_held: a thread keeps its share of K, or V, in registers.
    """

    groups: int
    block_q: int
    k_held: bool = False
    v_held: bool = False
    min_blocks: int = 1
    stages: int = 2

    @property
    def block_kv(self) -> int:
        return ROWS * self.groups

    @property
    def threads(self) -> int:
        return 128 * self.groups

    @property
    def statistics_bytes(self) -> int:
        """Bytes of shared memory for lse and delta, which tiles do not include."""
        return 4 * self.stages * 2 * LANES * lane_columns(self.block_q)

    def tiles(self, D: int, Dv: int) -> Sm80DkvTiles:
        """For heads of these widths."""
        along, along_v = pitch(D, ITEMSIZE), pitch(Dv, ITEMSIZE)
        k, q = (FactorSlice("depth", rows, along) for rows in (self.block_kv, self.block_q))
        v, do = (FactorSlice("depth", rows, along_v) for rows in (self.block_kv, self.block_q))
        q_steps, do_steps = (FactorSlice("row", width, self.block_q) for width in (along, along_v))
        k_boxes, v_boxes = box_count(D, ITEMSIZE), box_count(Dv, ITEMSIZE)
        q_size, do_size = k_boxes * q.size, v_boxes * do.size
        v_at = k_boxes * k.size
        q_at = v_at + v_boxes * v.size
        do_at = q_at + self.stages * q_size
        rows = 4 * self.threads // 32 * WarpRowsLayout(max(along, along_v)).size
        nbytes = max(ITEMSIZE * (do_at + self.stages * do_size), rows)
        return Sm80DkvTiles(
            k, v, q, do, q_steps, do_steps, k_boxes, v_boxes, v_at, q_at, do_at, q_size, do_size, nbytes
        )

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


LIGHT_OPTIONS = ("band", "sinks", "block_mask")  # that need no registers for themselves
MOST_BESIDE = 192  # columns of dk and dv that leave registers for 64 queries, or for several options
MOST_OPTIONS = 4  # others, for which these columns leave registers


def dkv_configs(D: int, Dv: int, options: Sequence[str]) -> Iterator[tuple[Sm80DkvConfig, str]]:
    """Tiles for heads of these widths, best first: none where there are too few registers for results."""
    heavy = [name for name in options if name not in LIGHT_OPTIONS]
    narrow = sum(pitch(width, ITEMSIZE) * box_count(width, ITEMSIZE) for width in (D, Dv)) <= MOST_BESIDE
    if max(D, Dv) > MOST_WIDTH or len(heavy) > (MOST_OPTIONS if narrow else 1):
        return
    told = ", options need registers" if heavy else ""
    if narrow and not heavy:
        yield Sm80DkvConfig(2, 64), "128 keys by 64 queries"
    if min(D, Dv) > 32:  # else 32 rows have fewer vectors than there are threads
        yield Sm80DkvConfig(2, 32), f"128 keys by 32 queries{told}"
    yield Sm80DkvConfig(1, 32), f"64 keys by 32 queries{told}"
