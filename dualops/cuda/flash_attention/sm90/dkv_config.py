"""The Configs of attention's dk and dv on Hopper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS
from ..columns import lane_columns
from .config import BLOCK_MASK, LIGHT_OPTIONS, are_many, parts_width

BARRIERS = 512  # bytes of shared memory that the mbarriers take, at most
WHOLE = 1024  # a multiple of which tiles begin at


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

    beside: dS.T is made beside the product for dv, which takes registers. thirds: as `Sm90Config` has it.
    """

    consumers: int
    block_q: int
    stages: int = 2
    beside: bool = True
    thirds: bool = False

    @property
    def block_kv(self) -> int:
        return ROWS * self.consumers

    @property
    def slack(self) -> int:
        """Bytes beside the tiles: statistics, mbarriers, and what lies between them and the tiles."""
        return -(-(self.stages * 2 * 4 * lane_columns(self.block_q) * 4 + BARRIERS) // WHOLE) * WHOLE

    def tiles(self, D: int, Dv: int) -> DkvTiles:
        """For heads of these widths, in whole boxes."""
        D, Dv = (parts_width(width, self.thirds) for width in (D, Dv))
        k, v = (Operand(self.block_kv, width, 2, 128, "k") for width in (D, Dv))
        q, do = (Operand(self.block_q, width, 2, 128, "k") for width in (D, Dv))
        q_steps, do_steps = (Operand(self.block_q, width, 2, 128, "mn") for width in (D, Dv))
        v_at = k.nbytes
        q_at = v_at + v.nbytes
        do_at = q_at + self.stages * q.nbytes
        return DkvTiles(k, v, q, do, q_steps, do_steps, v_at, q_at, do_at, do_at + self.stages * do.nbytes)

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


# queries that there are registers for beside one option that needs some, at widths to 128, and beside several
QUERIES_BESIDE = {"alibi": 64, "key_padding_mask": 64, "mask_mod": 64, "score_mod": 48, "dropout": 48}
QUERIES_BESIDE_ONE, QUERIES_BESIDE_SOME, QUERIES_BESIDE_MANY = 32, 32, 16
MOST_BESIDE = 48  # queries with which dS.T may be made beside the product for dv, at widths to 128


def dkv_configs(D: int, Dv: int, options: Sequence[str]) -> Iterator[tuple[DkvConfig, str]]:
    """Tiles for heads of these widths, in whole boxes, best first; none for heads that are too wide."""
    if max(D, Dv) > 128:
        return
    heavy = [name for name in options if name not in (*LIGHT_OPTIONS, BLOCK_MASK)]
    narrow = max(D, Dv) <= 64
    if not heavy:
        block_q = 96 if narrow else 64
    elif len(heavy) == 1:
        block_q = 64 if narrow else QUERIES_BESIDE.get(heavy[0], QUERIES_BESIDE_ONE)
    else:
        block_q = QUERIES_BESIDE_MANY if are_many(heavy) else QUERIES_BESIDE_SOME
    config = DkvConfig(2, block_q, 3, beside=narrow or block_q <= MOST_BESIDE)
    told = ", options need registers" if heavy else ""
    yield config, f"{config.block_kv} keys by {config.block_q} queries{told}"
