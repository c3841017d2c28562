"""The Configs of dbias on attention's sm90 rung."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS


class DbiasTiles(NamedTuple):
    """What lies in shared memory."""

    q: Operand  # [BLOCK_Q, D], which has a stage in turns with
    do: Operand  # [BLOCK_Q, Dv]
    k: Operand  # [BLOCK_KV, D], likewise
    v: Operand  # [BLOCK_KV, Dv]
    query_bytes: int  # of a stage
    key_bytes: int
    keys_at: int
    nbytes: int


@dataclass(frozen=True)
class DbiasConfig:
    """A block has a tile of 64 rows of the bias for each of `consumers` warpgroups, and block_kv columns.

    stages: of Q and dO, in turns, and as many of K and V, at least 2. overlap: dP is computed during the exponentials,
    and warpgroups take turns to start both products.

    Of a bias [4, 1, S, S], B = 4, H = 16, S = 4096, D = 128, delta among it (measured, H200, 2026-11-26, before threads
    asked whether all scores of a warp count): 1.28 ms with overlap and in turns, 1.30 with overlap and without turns,
    1.29 with neither; 1.34 when Q and K had two stages, and dO and V one. Clusters that share K and V did not pay: 1.29
    of two blocks, 1.39 of four. Loads alone take 0.79, and all else without them 1.17.
    """

    consumers: int
    block_kv: int
    stages: int = 3
    overlap: bool = False

    @property
    def block_q(self) -> int:
        return ROWS * self.consumers

    @property
    def words_bytes(self) -> int:
        """Of the bias's tile in shared memory (`bias_registers`)."""
        return 2 * self.block_q * self.block_kv

    def tiles(self, D: int, Dv: int) -> DbiasTiles:
        """For heads of these widths, in whole boxes."""
        q, do = (Operand(self.block_q, width, 2, 128, "k") for width in (D, Dv))
        k, v = (Operand(self.block_kv, width, 2, 128, "k") for width in (D, Dv))
        query_bytes, key_bytes = max(q.nbytes, do.nbytes), max(k.nbytes, v.nbytes)
        keys_at = self.stages * query_bytes
        return DbiasTiles(q, do, k, v, query_bytes, key_bytes, keys_at, keys_at + self.stages * key_bytes)

    @property
    def box_lines(self) -> dict[str, int]:
        """Rows of a box of each array."""
        return {"q": self.block_q, "k": self.block_kv, "do": self.block_q, "v": self.block_kv}

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


MOST_KEYS, FEWER_KEYS, LEAST_KEYS = 128, 112, 64
STAGES = 4, 3, 2  # best first
# options beside which there are registers for dP beside the exponentials; and those of which there are for one
SERVED, ONE_SERVED = ("bias", "band", "sinks"), ("alibi", "key_padding_mask", "softcap")
MANY = 4  # others at once, beside which there are registers for FEWER_KEYS alone


def dbias_configs(D: int, Dv: int, room: int, options: Sequence[str]) -> Iterator[tuple[DbiasConfig, str]]:
    """Tiles for heads of these widths, in whole boxes, that there is so much shared memory for, best first: large ones,
    as a tile of scores is two products of what L2 has to bring, 4 * (BLOCK_Q + BLOCK_KV) bytes for a column of heads.
    options: their names.
    """
    others = [name for name in options if name not in SERVED]
    overlap = not others or (len(others) == 1 and others[0] in ONE_SERVED)
    most = FEWER_KEYS if len(others) >= MANY else MOST_KEYS
    for block_kv, stages in product(range(most, LEAST_KEYS - 1, -16), STAGES):
        config = DbiasConfig(2, block_kv, stages, overlap)
        if config.shared_bytes(D, Dv) + config.words_bytes <= room:
            yield config, f"{config.block_q} queries by {config.block_kv} keys"
