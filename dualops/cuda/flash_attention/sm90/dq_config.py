"""The Configs of dq on attention's sm90 rung."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS
from .config import BLOCK_MASK, LIGHT_OPTIONS, parts_width


class DqTiles(NamedTuple):
    """What lies in shared memory."""

    q: Operand  # [BLOCK_Q, D], a stage
    do: Operand  # [BLOCK_Q, Dv], a stage
    k: Operand  # [BLOCK_KV, D], a stage, as the scores' right factor
    k_right: Operand  # the same as that of dS
    v: Operand  # [BLOCK_KV, Dv], a stage
    do_at: int
    k_at: int
    v_at: int
    dq_at: int  # [BLOCK_Q, D]; 0 where it is put over Q, or goes to memory from registers
    nbytes: int


@dataclass(frozen=True)
class DqConfig:
    """A block has 64 queries for each of `consumers` warpgroups, and block_kv keys at a time in each of its stages.

    turns: warpgroups start their products one after the other, so that the one's exponentials are made beside the
    other's products. q_stages: of Q and dO; with two, what comes next is loaded beside a piece of work. dq_over_q: dq
    has Q's place in shared memory, where there is one, on its way to memory. thirds: as `Sm90Config` has it.
    """

    consumers: int
    block_kv: int
    stages: int = 2
    turns: bool = True
    q_stages: int = 1
    dq_over_q: bool = False
    thirds: bool = False

    @property
    def block_q(self) -> int:
        return ROWS * self.consumers

    def tiles(self, D: int, Dv: int) -> DqTiles:
        """For heads of these widths, in whole boxes. Raises ValueError for a dq that Q has no place for."""
        if self.dq_over_q and self.q_stages > 1:
            raise ValueError(f"dq over Q in {self.q_stages} stages, expected 1")
        D, Dv = (parts_width(width, self.thirds) for width in (D, Dv))
        q, do = Operand(self.block_q, D, 2, 128, "k"), Operand(self.block_q, Dv, 2, 128, "k")
        k, v = Operand(self.block_kv, D, 2, 128, "k"), Operand(self.block_kv, Dv, 2, 128, "k")
        do_at = self.q_stages * q.nbytes
        k_at = do_at + self.q_stages * do.nbytes
        v_at = k_at + self.stages * k.nbytes
        end = v_at + self.stages * v.nbytes
        dq_at, nbytes = (0, end) if self.dq_over_q or self.thirds else (end, end + q.nbytes)
        return DqTiles(q, do, k, Operand(self.block_kv, D, 2, 128, "mn"), v, do_at, k_at, v_at, dq_at, nbytes)

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


MOST_KEYS, KEYS_BESIDE_BIAS, KEYS_BESIDE_SOME = 128, 112, 96
KEYS_BESIDE_DROPOUT, KEYS_BESIDE_DROPOUT_AND_MORE = 80, 64


def keys_beside(heavy: Sequence[str]) -> int:
    """Keys of a tile that registers are left for beside these options and 128 columns of dq."""
    if "dropout" in heavy:
        return KEYS_BESIDE_DROPOUT if len(heavy) == 1 else KEYS_BESIDE_DROPOUT_AND_MORE
    if len(heavy) > 1:
        return KEYS_BESIDE_SOME
    return KEYS_BESIDE_BIAS if "bias" in heavy else MOST_KEYS


def dq_configs(D: int, Dv: int, options: Sequence[str]) -> Iterator[tuple[DqConfig, str]]:
    """Tiles for heads of these widths, in whole boxes to 128, best first: as many keys as registers are left for, of
    those that divide a block mask's tiles where there is one.
    """
    heavy = [name for name in options if name not in LIGHT_OPTIONS]
    if BLOCK_MASK in options:
        block_kv = 128 if keys_beside([name for name in heavy if name != BLOCK_MASK]) == MOST_KEYS else 64
    else:
        block_kv = keys_beside(heavy)
    config = DqConfig(2, block_kv, turns=not heavy)
    told = ", options need registers" if heavy else ""
    yield config, f"{config.block_q} queries by {block_kv} keys for dq{told}"
