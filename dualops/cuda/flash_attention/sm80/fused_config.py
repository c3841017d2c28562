"""The Configs of attention's whole gradient in one kernel on the sm80 rung, and what lies in its blocks' memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...tile.softmax_rows import LANES
from ...tile.warp_mma import LINE_BYTES, FactorSlice
from ...tile.warp_rows import WarpRowsLayout
from ..columns import lane_columns
from .config import ROWS, pitch
from .dq_config import ITEMSIZE

HALVES = 2  # of a tile's queries and of a head's columns: two warps that share keys have one each
STRIPS = 2  # of a warp's keys
PART = 32  # queries whose scores are made at a time
NUMBER_BYTES = 12  # of what a block has drawn, and has to tell


class Sm80FusedTiles(NamedTuple):
    """Boxes in shared memory, and where they begin, in elements. K, V, Q and dO have two boxes of columns."""

    k: FactorSlice
    v: FactorSlice
    k_right: FactorSlice  # K as the right factor of dS
    q: FactorSlice  # half of the queries
    do: FactorSlice
    q_part: FactorSlice  # of them those of a part, in a box
    do_part: FactorSlice
    q_steps: FactorSlice  # the same as steps of a sum
    do_steps: FactorSlice
    words: FactorSlice  # P.T or dS.T of a part, whose lines are keys
    ds: FactorSlice  # dS of a part, whose lines are steps of a sum
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
    """A block has 128 keys, and two halves of so many queries at a time in each of its stages. With three stages P and
    dS have two places, so that all threads meet once a tile.

    held: a thread keeps its shares of K and V in registers. ascends: the last keys come first, and of their queries the
    first; else the first keys, and the last queries.
    """

    half: int = PART
    stages: int = 3
    held: bool = False
    ascends: bool = False

    @property
    def block_q(self) -> int:
        return HALVES * self.half

    @property
    def block_kv(self) -> int:
        return STRIPS * ROWS

    @property
    def threads(self) -> int:
        return 256

    @property
    def parts(self) -> int:
        """Parts of a half."""
        return self.half // PART

    @property
    def places(self) -> int:
        """For P and dS."""
        return self.stages - 1

    @property
    def statistics_bytes(self) -> int:
        """What lse and delta take beside the tiles, and a block's numbers; tiles lie behind that."""
        used = 4 * self.stages * 2 * LANES * lane_columns(self.block_q) + NUMBER_BYTES
        return -(-used // LINE_BYTES) * LINE_BYTES

    def tiles(self, D: int, Dv: int) -> Sm80FusedTiles:
        """For heads of these widths."""
        along, along_v = D // HALVES, Dv // HALVES
        k, v = (FactorSlice("depth", self.block_kv, width) for width in (along, along_v))
        k_right = FactorSlice("row", along, self.block_kv)
        q, do = (FactorSlice("depth", self.half, width) for width in (along, along_v))
        q_part, do_part = (FactorSlice("depth", PART, width) for width in (along, along_v))
        q_steps, do_steps = (FactorSlice("row", width, PART) for width in (along, along_v))
        words, ds = FactorSlice("depth", self.block_kv, PART), FactorSlice("row", PART, self.block_kv)
        q_size, do_size = HALVES * HALVES * q.size, HALVES * HALVES * do.size
        words_size = HALVES * self.parts * words.size
        v_at = HALVES * k.size
        q_at = v_at + HALVES * v.size
        do_at = q_at + self.stages * q_size
        p_at = do_at + self.stages * do_size
        ds_at = p_at + self.places * words_size
        nbytes = max(ITEMSIZE * (ds_at + self.places * words_size), self.halves_bytes(D, Dv))
        boxes = k, v, k_right, q, do, q_part, do_part, q_steps, do_steps, words, ds
        return Sm80FusedTiles(*boxes, v_at, q_at, do_at, p_at, ds_at, q_size, do_size, words_size, nbytes)

    def rows_bytes(self, D: int, Dv: int) -> int:
        """What rows of dk and dv take on their way to memory."""
        return 4 * self.threads // 32 * WarpRowsLayout(pitch(max(D, Dv), ITEMSIZE)).size

    def halves_bytes(self, D: int, Dv: int) -> int:
        """Those, and behind them halves of columns of a strip of each warp."""
        return self.rows_bytes(D, Dv) + 4 * self.block_kv * max(D, Dv) // HALVES

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


SERVED = ("band", "sinks")  # options that need no registers
WIDTHS = (64, 128)  # of heads


def fused_configs(D: int, Dv: int, options: Sequence[str], group: Any = 1) -> Iterator[tuple[Sm80FusedConfig, str]]:
    """Tiles for heads of these widths, best first; none for others. group: heads that share a key head.

    Of the time of two kernels, on an H100, full and causal, S=8192 and 2048: D=128 0.64 to 0.79, D=64 0.75 to 0.84. A
    draft of D=128 in two stages, of which an A100 has room for no more, took 1.12 to 1.20 of that in three. Ascending,
    causal heads of 64 take 0.88 and 0.80 of their time, and of 128 1.19 and 0.89: these do not ascend.
    """
    if Dv != D or D not in WIDTHS or any(name not in SERVED for name in options):
        return
    if D == 64:
        yield Sm80FusedConfig(64, 2, held=True, ascends="band" in options and group == 1), "128 keys by 128 queries"
    else:
        yield Sm80FusedConfig(), "128 keys by 64 queries"
