"""The Configs of dbias on attention's sm90 rung."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS


class DbiasTiles(NamedTuple):
    """What lies in shared memory."""

    q: Operand  # [BLOCK_Q, D], a stage
    k: Operand  # [BLOCK_KV, D], a stage
    do: Operand  # [BLOCK_Q, Dv], a late stage
    v: Operand  # [BLOCK_KV, Dv], a late stage
    k_at: int
    do_at: int
    v_at: int
    nbytes: int


@dataclass(frozen=True)
class DbiasConfig:
    """A block has a tile of 64 rows of the bias for each of `consumers` warpgroups, and block_kv columns.

    stages: of Q and K; late_stages: of dO and V. Neither clusters that share what they load nor dP beside the
    exponentials paid: 1.26 ms of a bias [4, 1, S, S] became 1.48 in clusters of 2 x 2, 1.31 of 2 x 1, and 1.44 (B = 4,
    H = 16, S = 4096, D = 128; measured, H200, 2026-11-26).
    """

    consumers: int
    block_kv: int
    stages: int = 2
    late_stages: int = 1

    @property
    def block_q(self) -> int:
        return ROWS * self.consumers

    @property
    def words_bytes(self) -> int:
        """Of the bias's tile in shared memory (`bias_words`)."""
        return 2 * self.block_q * self.block_kv

    def tiles(self, D: int, Dv: int) -> DbiasTiles:
        """For heads of these widths, in whole boxes."""
        q, k = (Operand(lines, D, 2, 128, "k") for lines in (self.block_q, self.block_kv))
        do, v = (Operand(lines, Dv, 2, 128, "k") for lines in (self.block_q, self.block_kv))
        k_at = self.stages * q.nbytes
        do_at = k_at + self.stages * k.nbytes
        v_at = do_at + self.late_stages * do.nbytes
        return DbiasTiles(q, k, do, v, k_at, do_at, v_at, v_at + self.late_stages * v.nbytes)

    @property
    def box_lines(self) -> dict[str, int]:
        """Rows of a box of each array."""
        return {"q": self.block_q, "k": self.block_kv, "do": self.block_q, "v": self.block_kv}

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


MOST_KEYS, LEAST_KEYS = 128, 64
STAGES = ((2, 2), (2, 1), (1, 1))  # best first


def dbias_configs(D: int, Dv: int, room: int) -> Iterator[tuple[DbiasConfig, str]]:
    """Tiles for heads of these widths, in whole boxes, that there is so much shared memory for, best first: large ones,
    as a tile of scores is two products of what L2 has to bring, 4 * (BLOCK_Q + BLOCK_KV) bytes for a column of heads.
    """
    for block_kv, (stages, late_stages) in product(range(MOST_KEYS, LEAST_KEYS - 1, -16), STAGES):
        config = DbiasConfig(2, block_kv, stages, late_stages)
        if config.shared_bytes(D, Dv) + config.words_bytes <= room:
            yield config, f"{config.block_q} queries by {config.block_kv} keys"
