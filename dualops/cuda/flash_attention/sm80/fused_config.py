"""The Configs of attention's whole gradient in one kernel on the sm80 rung."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...tile.softmax_rows import LANES
from ...tile.warp_mma import FactorSlice
from ...tile.warp_rows import WarpRowsLayout
from ..columns import lane_columns
from .config import ROWS, pitch
from .dq_config import ITEMSIZE

PART = 32
HALVES = 2  # of a tile's queries, and of a head's columns


class Sm80FusedTiles(NamedTuple):
    """Boxes in shared memory, and where they begin, in elements. Of columns there are two boxes, of queries two parts."""

    k: FactorSlice
    v: FactorSlice
    k_right: FactorSlice  # K as the right factor of dS
    q: FactorSlice  # a half
    do: FactorSlice
    q_part: FactorSlice
    do_part: FactorSlice
    q_steps: FactorSlice  # as steps of a sum
    do_steps: FactorSlice
    words: FactorSlice  # P.T or dS.T of a part, whose lines are keys
    ds: FactorSlice  # dS of a part, whose lines are steps
    v_at: int
    q_at: int
    do_at: int
    p_at: int
    ds_at: int
    q_size: int  # from a stage to the next
    do_size: int
    words_size: int  # from a place to the next
    nbytes: int


@dataclass(frozen=True)
class Sm80FusedConfig:
    """A block has 128 keys, and two parts of so many queries at a time in each of its stages. Three stages: P and dS
    have two places, so that all threads meet once a tile.
    """

    part: int = 32
    stages: int = 3
    held: bool = False
    ascends: bool = False
    matrices: bool = False
    order: bool = True
    poll: str = "top"
    soon: bool = True
    heads: int = 16

    @property
    def block_q(self) -> int:
        return HALVES * self.part

    @property
    def block_kv(self) -> int:
        return 2 * ROWS

    @property
    def threads(self) -> int:
        return 256

    @property
    def parts(self) -> int:
        return self.part // PART

    @property
    def places(self) -> int:
        return self.stages - 1

    @property
    def statistics_bytes(self) -> int:
        """What lse, delta and a number take beside the tiles."""
        return 4 * self.stages * 2 * LANES * lane_columns(self.block_q) + 16

    def tiles(self, D: int, Dv: int) -> Sm80FusedTiles:
        """For heads of these widths."""
        along, along_v = D // HALVES, Dv // HALVES
        k, v = (FactorSlice("depth", self.block_kv, width) for width in (along, along_v))
        q, do = (FactorSlice("depth", self.part, width) for width in (along, along_v))
        q_part, do_part = (FactorSlice("depth", PART, width) for width in (along, along_v))
        q_steps, do_steps = (FactorSlice("row", width, PART) for width in (along, along_v))
        k_right = FactorSlice("row", along, self.block_kv)
        words, ds = FactorSlice("depth", self.block_kv, PART), FactorSlice("row", PART, self.block_kv)
        q_size, do_size, words_size = (HALVES * HALVES * q.size, HALVES * HALVES * do.size, HALVES * self.parts * words.size)
        v_at = HALVES * k.size
        q_at = v_at + HALVES * v.size
        do_at = q_at + self.stages * q_size
        p_at = do_at + self.stages * do_size
        ds_at = p_at + self.places * words_size
        end = ds_at + self.places * words_size
        nbytes = max(ITEMSIZE * end, self.exchange_bytes(D, Dv))
        starts = v_at, q_at, do_at, p_at, ds_at, q_size, do_size, words_size
        return Sm80FusedTiles(k, v, k_right, q, do, q_part, do_part, q_steps, do_steps, words, ds, *starts, nbytes)

    def rows_bytes(self, D: int, Dv: int) -> int:
        """What rows of dk and dv take on their way to memory."""
        return 4 * self.threads // 32 * WarpRowsLayout(pitch(max(D, Dv), ITEMSIZE)).size

    def exchange_bytes(self, D: int, Dv: int) -> int:
        """And what warps hand one another before, behind that."""
        return self.rows_bytes(D, Dv) + 4 * self.block_kv * max(D, Dv) // HALVES

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


SERVED = ("band", "sinks")  # options that need no registers
WIDTHS = (64, 128)


def fused_configs(D: int, Dv: int, options: Sequence[str]) -> Iterator[tuple[Sm80FusedConfig, str]]:
    """Tiles for heads of these widths, best first."""
    if D != Dv or D not in WIDTHS or any(name not in SERVED for name in options):
        return
    if D == 128:
        yield Sm80FusedConfig(32, 3), "128 keys by 64 queries"
        yield Sm80FusedConfig(32, 2), "128 keys by 64 queries, two stages"
    else:
        yield Sm80FusedConfig(64, 2, held=True), "128 keys by 128 queries"
