"""The Configs of attention's dk and dv on Hopper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS
from .config import LIGHT_OPTIONS

PAD = 4  # floats between the columns of a lane and the next lane's, so that lanes meet different banks
BARRIERS = 512  # bytes of shared memory that the mbarriers take, at most
WHOLE = 1024  # a multiple of which tiles begin at
MOST_BYTES = 227 * 1024  # of Hopper's shared memory


class DkvTiles(NamedTuple):
    """What lies in shared memory. Q and dO are read two ways: as columns of a product, and as steps of its sum."""

    k: Operand  # [BLOCK_KV, D]; dk is put over it in the end
    v: Operand  # [BLOCK_KV, Dv]; and dv over that
    q: Operand  # [BLOCK_Q, D], a stage
    do: Operand  # [BLOCK_Q, Dv], a stage
    q_steps: Operand
    do_steps: Operand
    v_at: int
    q_at: int
    do_at: int
    nbytes: int


@dataclass(frozen=True)
class DkvConfig:
    """A block has 64 keys for each of `consumers` warpgroups, and block_q queries at a time in each of its stages.

    beside: dS.T is made beside the product for dv, which takes registers. few: registers of a thread that loads, which
    says how many there are for those that multiply.
    """

    consumers: int
    block_q: int
    stages: int = 2
    beside: bool = True
    few: int = 24

    @property
    def block_kv(self) -> int:
        return ROWS * self.consumers

    @property
    def lane_columns(self) -> int:
        """Floats from a lane's columns to the next one's, of a statistic of the tile's queries."""
        return self.block_q // 4 + PAD

    @property
    def slack(self) -> int:
        """Bytes beside the tiles: statistics, mbarriers, and what lies between them and the tiles."""
        return -(-(self.stages * 2 * 4 * self.lane_columns * 4 + BARRIERS) // WHOLE) * WHOLE

    def tiles(self, D: int, Dv: int) -> DkvTiles:
        """For heads of these widths, in whole boxes."""
        k, v = (Operand(self.block_kv, width, 2, 128, "k") for width in (D, Dv))
        q, do = (Operand(self.block_q, width, 2, 128, "k") for width in (D, Dv))
        q_steps, do_steps = (Operand(self.block_q, width, 2, 128, "mn") for width in (D, Dv))
        v_at = k.nbytes
        q_at = v_at + v.nbytes
        do_at = q_at + self.stages * q.nbytes
        return DkvTiles(k, v, q, do, q_steps, do_steps, v_at, q_at, do_at, do_at + self.stages * do.nbytes)

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


def dkv_configs(D: int, Dv: int, options: Sequence[str]) -> Iterator[tuple[DkvConfig, str]]:
    """Tiles for heads of these widths, in whole boxes, best first; none for heads that are too wide."""
    if max(D, Dv) > 128:
        return
    heavy = [name for name in options if name not in LIGHT_OPTIONS]
    if heavy:
        config = DkvConfig(2, 32, 3)
    elif max(D, Dv) > 64:  # with dS.T beside the product for dv registers are left for 48 queries
        config = DkvConfig(2, 64, 3, beside=False)
    else:
        config = DkvConfig(2, 96, 3)
    told = ", options need registers" if heavy else ""
    yield config, f"{config.block_kv} keys by {config.block_q} queries{told}"
