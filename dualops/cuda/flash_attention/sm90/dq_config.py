"""The Configs of dq, and of dbias, on attention's sm90 rung: their blocks own queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS
from ...tile.warpgroup_exchange import exchange_bytes
from .config import BLOCK_MASK, LIGHT_OPTIONS, EachReadsV, QueriesConfig, TilesConfig, are_many, boxes, parts_width


class DqTiles(NamedTuple):
    """What lies in shared memory."""

    q: Operand  # [BLOCK_Q, D], a stage
    do: Operand  # [BLOCK_Q, Dv], a stage
    k: Operand  # [BLOCK_KV, D], a stage, as the scores' right factor
    k_right: Operand  # K as the right factor of dS
    v: Operand  # [BLOCK_KV, Dv], a stage
    do_at: int
    k_at: int
    v_at: int
    bias_at: int  # [64, BLOCK_KV], a stage of each warpgroup
    dq_at: int  # [BLOCK_Q, D]; 0 if it overwrites Q, or goes to memory from registers
    p_at: int  # P, from one warpgroup to the other
    nbytes: int


def _dq_tiles(config: DqConfig | DqThirdsConfig, D: int, Dv: int, p_bytes: int = 0) -> DqTiles:
    """Return the tiles, without a place for dq."""
    D, Dv = (parts_width(width, config.thirds) for width in (D, Dv))
    q, do, k, v = (boxes(lines, width) for lines in (config.block_q, config.block_kv) for width in (D, Dv))
    of_queries, of_keys = (config.q_stages * q.nbytes, config.q_stages * do.nbytes), config.stages * k.nbytes
    sizes = *of_queries, of_keys, config.v_stages * v.nbytes, config.bias_bytes, p_bytes
    do_at, k_at, v_at, bias_at, p_at, end = accumulate(sizes)
    return DqTiles(q, do, k, boxes(config.block_kv, D, "mn"), v, do_at, k_at, v_at, bias_at, 0, p_at, end)


@dataclass(frozen=True)
class DqConfig(EachReadsV):
    """A block has 64 queries for each of `consumers` warpgroups, and block_kv keys at a time in each of its stages.

    turns, bias_stages, thirds: as in `Sm90Config`. q_stages: of Q and dO; with two, the loads of the next work item
    overlap this one. dq_over_q: dq overwrites Q in shared memory on its way out. zeroed: sums begin as zeros, not with
    a product that overwrites them: two ways to begin take too many registers for 256 columns.
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

    v_first = True  # its stage is free first

    def tiles(self, D: int, Dv: int) -> DqTiles:
        """Return the tiles for heads of these widths, in whole boxes. Raises ValueError if dq has no place over Q."""
        if self.dq_over_q and self.q_stages > 1:
            raise ValueError(f"dq over Q in {self.q_stages} stages, expected 1")
        tiles = _dq_tiles(self, D, Dv)
        if self.dq_over_q or self.thirds:
            return tiles
        return tiles._replace(dq_at=tiles.nbytes, nbytes=tiles.nbytes + tiles.q.nbytes)


@dataclass(frozen=True)
class DqThirdsConfig(QueriesConfig):
    """For float32 as three parts of bfloat16: a block has 64 queries, and block_kv keys at a time. One warpgroup has
    the scores, the other dq. K has more stages than V: both need it, V only dP.
    """

    block_kv: int

    consumers, stages, v_stages, v_warps, q_stages, bias_stages, thirds = 2, 2, 1, 4, 1, 0, True

    @property
    def block_q(self) -> int:
        return ROWS

    def tiles(self, D: int, Dv: int) -> DqTiles:
        """Return the tiles for heads of these widths, in whole boxes."""
        return _dq_tiles(self, D, Dv, exchange_bytes(self.block_kv // 2, 1, exact=True))


AnyDqConfig = DqConfig | DqThirdsConfig
MOST_KEYS, KEYS_WITH_BIAS, KEYS_WITH_ASKING, KEYS_WITH_SOME = 128, 112, 112, 96
KEYS_WITH_DROPOUT, KEYS_WITH_DROPOUT_AND_MORE, KEYS_WITH_DROPOUT_AND_MANY = 80, 64, 48
KEYS_WITH_BOXES_AND_MORE = 80


def dq_keys_with(heavy: Sequence[str]) -> int:
    """Return how many keys of a tile these options and 128 columns of dq leave registers for."""
    if "dropout" in heavy:
        if are_many(heavy):
            return KEYS_WITH_DROPOUT_AND_MANY
        return KEYS_WITH_DROPOUT if len(heavy) == 1 else KEYS_WITH_DROPOUT_AND_MORE
    if len(heavy) > 1:
        return KEYS_WITH_SOME
    return KEYS_WITH_BIAS if "bias" in heavy else MOST_KEYS


WIDE_KEYS_WITH_ONE, WIDE_KEYS_WITH_DROPOUT, WIDE_KEYS_OF_BLOCKS = 48, 32, 32


def dq_wide_keys(D: int, Dv: int, options: Sequence[str]) -> int:
    """Return how many keys a tile has for heads wider than 128: as many as shared memory and registers have
    room for.
    """
    if "dropout" in options:
        return WIDE_KEYS_WITH_DROPOUT
    if BLOCK_MASK in options:
        return WIDE_KEYS_OF_BLOCKS
    if D > 192 or any(name not in LIGHT_OPTIONS for name in options):
        return WIDE_KEYS_WITH_ONE
    return {256: 64, 192: 80}.get(Dv, 96)


def dq_configs(
    D: int, Dv: int, options: Sequence[str], bias_in_boxes: bool = False, varlen: bool = False
) -> Iterator[tuple[DqConfig, str]]:
    """Yield tiles for heads of these widths, in whole boxes, best first: as many keys as there are registers for; if
    there is a block mask, a number that divides its tiles. bias_in_boxes: the bias can be copied as boxes, which takes
    shared memory but no registers of consumers; with a block mask or dropout, or for wider heads, the kernel would
    spill a register. varlen: rows beyond the end may be another sequence's, which softcap must test
    (`fragment_scores.there`); this takes registers.

    TFLOP/s of its three products, S = 4096, on an H200, 2026-11-25: D = Dv = 256 686, in turns 626; 192 causal 687, in
    turns 725.
    """
    heavy = [name for name in options if name not in LIGHT_OPTIONS]
    note = ", options need registers" if heavy else ""
    if bias_in_boxes and max(D, Dv) <= 128 and not {BLOCK_MASK, "dropout"} & {*options}:
        keys = MOST_KEYS if len(heavy) == 1 else KEYS_WITH_BOXES_AND_MORE
        config = DqConfig(2, keys, turns=False, dq_over_q=True, bias_stages=1)
        yield config, f"{config.block_q} queries by {config.block_kv} keys for dq, the bias in boxes"
    if "bias" in options:
        note += ", the bias from memory"
    if max(D, Dv) > 128:
        config = DqConfig(2, dq_wide_keys(D, Dv, options), turns=not heavy and D <= 192, dq_over_q=True, zeroed=True)
    elif BLOCK_MASK in options:
        most = dq_keys_with([name for name in heavy if name != BLOCK_MASK]) == MOST_KEYS
        config = DqConfig(2, 128 if most else 64, turns=not heavy)
    else:
        keys = KEYS_WITH_ASKING if varlen and heavy == ["softcap"] else dq_keys_with(heavy)
        config = DqConfig(2, keys, turns=not heavy)
    yield config, f"{config.block_q} queries by {config.block_kv} keys for dq{note}"


class DbiasTiles(NamedTuple):
    """What lies in shared memory."""

    q: Operand  # [BLOCK_Q, D]; a stage holds it or dO
    do: Operand  # [BLOCK_Q, Dv]
    k: Operand  # [BLOCK_KV, D]; a stage holds it or V
    v: Operand  # [BLOCK_KV, Dv]
    query_bytes: int  # of a stage
    key_bytes: int
    keys_at: int
    nbytes: int


@dataclass(frozen=True)
class DbiasConfig(TilesConfig):
    """A block has a tile of 64 rows of the bias for each of `consumers` warpgroups, and block_kv columns.

    stages: of Q and dO, in turn, and as many of K and V, at least 2. `overlap`: computing dP overlaps the exponentials,
    and warpgroups take turns to start both products.

    For a bias [4, 1, S, S], B = 4, H = 16, S = 4096, D = 128, including delta (H200, 2026-11-26, before the test
    whether all scores of a warp count): 1.28 ms with both, 1.30 without turns, 1.29 with neither; 1.34 when Q and K had
    two stages, and dO and V one. Clusters that share K and V: 1.29 with two blocks, 1.39 with four.
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
        """Bytes of the bias's tile in shared memory (`bias_registers`)."""
        return 2 * self.block_q * self.block_kv

    def tiles(self, D: int, Dv: int) -> DbiasTiles:
        """Return the tiles for heads of these widths, in whole boxes."""
        q, do, k, v = (boxes(lines, width) for lines in (self.block_q, self.block_kv) for width in (D, Dv))
        query_bytes, key_bytes = max(q.nbytes, do.nbytes), max(k.nbytes, v.nbytes)
        keys_at = self.stages * query_bytes
        return DbiasTiles(q, do, k, v, query_bytes, key_bytes, keys_at, keys_at + self.stages * key_bytes)


FEWER_KEYS, LEAST_KEYS = 112, 64
DBIAS_STAGES = 4, 3, 2  # best first
# options that leave registers for dP during the exponentials; and those of which one does
SERVED, ONE_SERVED = ("bias", "band", "sinks"), ("alibi", "key_padding_mask", "softcap")
MANY_OTHERS = 4  # others at once, which leave registers for FEWER_KEYS only


def dbias_configs(D: int, Dv: int, room: int, options: Sequence[str]) -> Iterator[tuple[DbiasConfig, str]]:
    """Yield tiles for heads of these widths, in whole boxes, that fit in `room` bytes of shared memory, best first.
    Large ones are better: a tile of scores has two products of what L2 supplies, 4 * (BLOCK_Q + BLOCK_KV) bytes for a
    column of heads.
    """
    others = [name for name in options if name not in SERVED]
    overlap = not others or (len(others) == 1 and others[0] in ONE_SERVED)
    most = FEWER_KEYS if len(others) >= MANY_OTHERS else MOST_KEYS
    for block_kv, stages in product(range(most, LEAST_KEYS - 1, -16), DBIAS_STAGES):
        config = DbiasConfig(2, block_kv, stages, overlap)
        if config.shared_bytes(D, Dv) + config.words_bytes <= room:
            yield config, f"{config.block_q} queries by {config.block_kv} keys"
