"""The Configs of dbias on attention's sm90 rung."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ...tile.boxes import Cluster, box_shape
from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS

ONE_BLOCK = Cluster()


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

    stages: of Q and K; late_stages: of dO and V. beside: dP is made beside the exponentials, which takes BLOCK_KV / 2
    registers while options need theirs. cluster: blocks that have neighbouring tiles of the bias, and share what they
    load: those above one another K and V, those beside one another Q and dO.
    """

    consumers: int
    block_kv: int
    stages: int = 2
    late_stages: int = 1
    beside: bool = False
    cluster: Cluster = ONE_BLOCK

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

    def box_lines(self, D: int, Dv: int) -> dict[str, int]:
        """Rows of a box of each array: of the part that a block of the cluster loads."""
        tiles, cluster = self.tiles(D, Dv), self.cluster
        shared = {"q": cluster.of_a, "k": cluster.of_b, "do": cluster.of_a, "v": cluster.of_b}
        return {name: box_shape(getattr(tiles, name), sharing)[0] for name, sharing in shared.items()}

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


MOST_KEYS, LEAST_KEYS = 128, 64
STAGES = ((2, 2), (2, 1), (1, 1))  # best first
LEAST_SHARED = 1024  # rows and columns of a bias of whose tiles clusters have few beyond its end
SHARING = ONE_BLOCK  # such a bias's clusters; others than of one block are not measured yet


def dbias_configs(D: int, Dv: int, room: int, *, shares: bool) -> Iterator[tuple[DbiasConfig, str]]:
    """Tiles for heads of these widths, in whole boxes, that there is so much shared memory for, best first: large ones,
    as a tile of scores is two products of what L2 has to bring, 4 * (BLOCK_Q + BLOCK_KV) bytes for a column of heads.
    shares: the bias is large, with rows and columns of its own.
    """
    for block_kv, (stages, late_stages) in product(range(MOST_KEYS, LEAST_KEYS - 1, -16), STAGES):
        config = DbiasConfig(2, block_kv, stages, late_stages, cluster=SHARING if shares else ONE_BLOCK)
        if config.shared_bytes(D, Dv) + config.words_bytes <= room:
            yield config, f"{config.block_q} queries by {config.block_kv} keys"
