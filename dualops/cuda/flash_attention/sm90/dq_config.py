"""The Configs of dq on attention's sm90 rung."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS
from ...tile.warpgroup_exchange import exchange_bytes
from ..bias_tiles import bias_operand
from .config import BLOCK_MASK, LIGHT_OPTIONS, are_many, parts_width


class DqTiles(NamedTuple):
    """What lies in shared memory."""

    q: Operand  # [BLOCK_Q, D], a stage
    do: Operand  # [BLOCK_Q, Dv], a stage
    k: Operand  # [BLOCK_KV, D], a stage, as the scores' right factor
    k_right: Operand  # the same as that of dS
    v: Operand  # [BLOCK_KV, Dv], a stage
    bias: Operand  # [64, BLOCK_KV], a stage of each warpgroup
    do_at: int
    k_at: int
    v_at: int
    bias_at: int
    dq_at: int  # [BLOCK_Q, D]; 0 where it is put over Q, or goes to memory from registers
    nbytes: int


@dataclass(frozen=True)
class DqConfig:
    """A block has 64 queries for each of `consumers` warpgroups, and block_kv keys at a time in each of its stages.

    turns: warpgroups start their products one after the other, so that the one's exponentials are made beside the
    other's products. q_stages: of Q and dO; with two, what comes next is loaded beside a piece of work. dq_over_q: dq
    has Q's place in shared memory, where there is one, on its way to memory. zeroed: its sums begin as zeros, not with
    a product that does not add: of 256 columns, two ways to begin would be more registers than there are. thirds: as
    `Sm90Config` has it. bias_stages: of the bias's tiles, which come as boxes; 0 where it does not, or there is none.
    """

    consumers: int
    block_kv: int
    stages: int = 2
    turns: bool = True
    q_stages: int = 1
    dq_over_q: bool = False
    zeroed: bool = False
    thirds: bool = False
    bias_stages: int = 0

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
        bias, bias_at = bias_operand(ROWS, self.block_kv), v_at + self.stages * v.nbytes
        end = bias_at + self.bias_stages * self.consumers * bias.nbytes
        dq_at, nbytes = (0, end) if self.dq_over_q or self.thirds else (end, end + q.nbytes)
        k_right = Operand(self.block_kv, D, 2, 128, "mn")
        return DqTiles(q, do, k, k_right, v, bias, do_at, k_at, v_at, bias_at, dq_at, nbytes)

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


class DqThirdsTiles(NamedTuple):
    """What lies in shared memory: as `DqTiles` has it, of thirds."""

    q: Operand
    do: Operand
    k: Operand
    k_right: Operand
    v: Operand
    do_at: int
    k_at: int
    v_at: int
    p_at: int  # what warpgroups hand over
    nbytes: int


@dataclass(frozen=True)
class DqThirdsConfig:
    """Of numbers in thirds (`Sm90Config`): a block has 64 queries, whose scores are one warpgroup's and whose dq is the
    other's, and block_kv keys at a time. K has more stages than V: it is needed for both, V for dP alone.
    """

    block_kv: int
    stages: int = 2
    v_stages: int = 1

    @property
    def block_q(self) -> int:
        return ROWS

    def tiles(self, D: int, Dv: int) -> DqThirdsTiles:
        """For heads of these widths, in whole boxes."""
        D, Dv = (parts_width(width, thirds=True) for width in (D, Dv))
        q, do = Operand(ROWS, D, 2, 128, "k"), Operand(ROWS, Dv, 2, 128, "k")
        k, v = Operand(self.block_kv, D, 2, 128, "k"), Operand(self.block_kv, Dv, 2, 128, "k")
        k_at = q.nbytes + do.nbytes
        v_at = k_at + self.stages * k.nbytes
        p_at = v_at + self.v_stages * v.nbytes
        nbytes = p_at + exchange_bytes(self.block_kv // 2, 1, exact=True)
        k_right = Operand(self.block_kv, D, 2, 128, "mn")
        return DqThirdsTiles(q, do, k, k_right, v, q.nbytes, k_at, v_at, p_at, nbytes)

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


AnyDqConfig = DqConfig | DqThirdsConfig
MOST_KEYS, KEYS_BESIDE_BIAS, KEYS_BESIDE_ASKING, KEYS_BESIDE_SOME = 128, 112, 112, 96
KEYS_BESIDE_DROPOUT, KEYS_BESIDE_DROPOUT_AND_MORE, KEYS_BESIDE_DROPOUT_AND_MANY = 80, 64, 48
KEYS_BESIDE_BOXES_AND_MORE = 80


def keys_beside(heavy: Sequence[str]) -> int:
    """Keys of a tile that registers are left for beside these options and 128 columns of dq."""
    if "dropout" in heavy:
        if are_many(heavy):
            return KEYS_BESIDE_DROPOUT_AND_MANY
        return KEYS_BESIDE_DROPOUT if len(heavy) == 1 else KEYS_BESIDE_DROPOUT_AND_MORE
    if len(heavy) > 1:
        return KEYS_BESIDE_SOME
    return KEYS_BESIDE_BIAS if "bias" in heavy else MOST_KEYS


WIDE_KEYS_BESIDE_ONE, WIDE_KEYS_BESIDE_DROPOUT, WIDE_KEYS_OF_BLOCKS = 48, 32, 32


def wide_keys(D: int, Dv: int, options: Sequence[str]) -> int:
    """Keys of a tile beside heads wider than 128: as many as shared memory has room for, or registers."""
    if "dropout" in options:
        return WIDE_KEYS_BESIDE_DROPOUT
    if BLOCK_MASK in options:
        return WIDE_KEYS_OF_BLOCKS
    if D > 192 or any(name not in LIGHT_OPTIONS for name in options):
        return WIDE_KEYS_BESIDE_ONE
    return {256: 64, 192: 80}.get(Dv, 96)


def dq_configs(
    D: int, Dv: int, options: Sequence[str], bias_in_boxes: bool = False, varlen: bool = False
) -> Iterator[tuple[DqConfig, str]]:
    """Tiles for heads of these widths, in whole boxes, best first: as many keys as registers are left for, of those
    that divide a block mask's tiles where there is one. bias_in_boxes: there is a bias that can come so, which needs
    room in shared memory and no registers of those that multiply. varlen: rows beyond a sequence's last may be another
    one's, which softcap has to ask (`FragmentScores.there`), and which takes registers. Beside a list of tiles, dropout
    or rows of more boxes the kernel spills a register for it.

    TFLOP/s of its three products, S = 4096, on an H200, 2026-11-25: D = Dv = 256 686, in turns 626; 192 causal 687, in
    turns 725.
    """
    heavy = [name for name in options if name not in LIGHT_OPTIONS]
    told = ", options need registers" if heavy else ""
    if bias_in_boxes and max(D, Dv) <= 128 and not {BLOCK_MASK, "dropout"} & {*options}:
        keys = MOST_KEYS if len(heavy) == 1 else KEYS_BESIDE_BOXES_AND_MORE
        config = DqConfig(2, keys, turns=False, dq_over_q=True, bias_stages=1)
        yield config, f"{config.block_q} queries by {config.block_kv} keys for dq, the bias in boxes"
    if "bias" in options:
        told += ", the bias from memory"
    if max(D, Dv) > 128:
        config = DqConfig(2, wide_keys(D, Dv, options), turns=not heavy and D <= 192, dq_over_q=True, zeroed=True)
    elif BLOCK_MASK in options:
        most = keys_beside([name for name in heavy if name != BLOCK_MASK]) == MOST_KEYS
        config = DqConfig(2, 128 if most else 64, turns=not heavy)
    else:
        keys = KEYS_BESIDE_ASKING if varlen and heavy == ["softcap"] else keys_beside(heavy)
        config = DqConfig(2, keys, turns=not heavy)
    yield config, f"{config.block_q} queries by {config.block_kv} keys for dq{told}"
