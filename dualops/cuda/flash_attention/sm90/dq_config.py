"""The Configs of dq on attention's sm90 rung."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS
from .config import BLOCK_MASK, LIGHT_OPTIONS, MOST_BYTES


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
    dq_at: int  # [BLOCK_Q, D]; 0 where it is put over Q
    nbytes: int


@dataclass(frozen=True)
class DqConfig:
    """A block has 64 queries for each of `consumers` warpgroups, and block_kv keys at a time in each of its stages.

    turns: warpgroups start their products one after the other, so that the one's exponentials are made beside the
    other's products. q_stages: of Q and dO; with two, what comes next is loaded beside a piece of work. dq_over_q: dq
    has Q's place in shared memory, where there is one, on its way to memory.
    """

    consumers: int
    block_kv: int
    stages: int = 2
    turns: bool = True
    q_stages: int = 1
    dq_over_q: bool = False

    @property
    def block_q(self) -> int:
        return ROWS * self.consumers

    def tiles(self, D: int, Dv: int) -> DqTiles:
        """For heads of these widths, in whole boxes. Raises ValueError for a dq that Q has no place for."""
        if self.dq_over_q and self.q_stages > 1:
            raise ValueError(f"dq over Q in {self.q_stages} stages, expected 1")
        q, do = Operand(self.block_q, D, 2, 128, "k"), Operand(self.block_q, Dv, 2, 128, "k")
        k, v = Operand(self.block_kv, D, 2, 128, "k"), Operand(self.block_kv, Dv, 2, 128, "k")
        do_at = self.q_stages * q.nbytes
        k_at = do_at + self.q_stages * do.nbytes
        v_at = k_at + self.stages * k.nbytes
        end = v_at + self.stages * v.nbytes
        dq_at, nbytes = (0, end) if self.dq_over_q else (end, end + q.nbytes)
        return DqTiles(q, do, k, Operand(self.block_kv, D, 2, 128, "mn"), v, do_at, k_at, v_at, dq_at, nbytes)

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


ASKED_BEFORE = ("mask_mod", BLOCK_MASK, "key_padding_mask")  # masks that pick pairs
# keys of a tile beside none, such masks, one other option, and several, by columns of dq
KEYS = {64: (128, 96, 64, 32), 128: (128, 64, 48, 32), 192: (64, 48, 32, 32), 256: (48, 32, 16, 16)}


def dq_configs(D: int, Dv: int, options: Sequence[str]) -> Iterator[tuple[DqConfig, str]]:
    """Tiles for heads of these widths, in whole boxes, best first: as many keys as registers are left for."""
    heavy = [name for name in options if name not in LIGHT_OPTIONS]
    others = [name for name in heavy if name not in ASKED_BEFORE]
    kind = min(2, len(others)) + 1 if others else min(1, len(heavy))
    most = KEYS[D][kind]
    for block_kv in (1 << n for n in range(7, 3, -1)) if BLOCK_MASK in options else range(most, 0, -16):
        if block_kv > most:
            continue
        for dq_over_q in (False, True):
            config = DqConfig(2, block_kv, turns=not heavy, dq_over_q=dq_over_q)
            if config.shared_bytes(D, Dv) <= MOST_BYTES:
                told = ", options need registers" * bool(heavy) + ", dq over Q" * dq_over_q
                yield config, f"{config.block_q} queries by {block_kv} keys for dq{told}"
                return
