"""The Configs of forward on attention's sm90 rung, for many queries and for few, and what all Configs share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from ....spec import Problem
from ...tile.split_bf16x3 import PARTS
from ...tile.swizzle import SPANS, Operand
from ...tile.warpgroup import ROWS
from ..arguments import Variant

SLACK = 1024  # bytes of shared memory for mbarriers and alignment
BLOCK_MASK = "block_mask"  # the option
BOX = 64  # elements of 16 bits in a line of a box


def padded(width: int) -> int:
    """Return a head's width in whole boxes, padded with zeros."""
    return -(-width // BOX) * BOX


def widths(sizes: Problem | Variant) -> tuple[int, int]:
    """Return D and Dv in whole boxes, as numbers: a kernel is built for them."""
    return padded(int(sizes.D)), padded(int(sizes.Dv))


def boxes(lines: int, width: int, major: str = "k") -> Operand:
    """Return a tile of 16-bit numbers, in boxes of BOX columns."""
    return Operand(lines, width, 2, 2 * BOX, major)


def bias_operand(queries: int, keys: int) -> Operand:
    """Return a tile of a 16-bit bias, in the widest boxes that divide it."""
    span = next(span for span in SPANS if 2 * keys % span == 0)
    return Operand(queries, keys, 2, span, "k")


def parts_width(width: int, thirds: bool) -> int:
    """Return the width of such a head in shared memory, where float32 has three parts for each number."""
    return PARTS * width if thirds else width


def factors(dtype: str) -> str:
    """Return the dtype of the factors of products."""
    return "bfloat16" if dtype == "float32" else dtype


def slice_width(Dv: int, slices: int) -> int:
    """Return how many columns of V a slice has, in whole boxes."""
    return padded(-(-Dv // slices))


class Tiles(NamedTuple):
    """What lies in shared memory."""

    q: Operand  # [BLOCK_Q, D], a stage
    k: Operand  # [BLOCK_KV, D], a stage
    v: Operand  # [BLOCK_KV, Dv], a stage
    k_at: int
    v_at: int
    bias_at: int  # [64, BLOCK_KV], a stage of each warpgroup
    o_at: int  # [BLOCK_Q, Dv]; 0 if it overwrites Q, or goes to memory from registers
    nbytes: int


class TilesConfig:
    """A Config that knows its tiles, for heads of these widths in whole boxes."""

    def tiles(self, D: int, Dv: int) -> Any:
        raise NotImplementedError

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


class QueriesConfig(TilesConfig):
    """What the Configs of forward and dq share."""

    consumers: int
    block_kv: int
    bias_stages: int
    stages: int

    v_first = False  # V of a tile is loaded before K

    @property
    def warps(self) -> int:
        """Of the consumers."""
        return 4 * self.consumers

    @property
    def block_q(self) -> int:
        return ROWS * self.consumers

    @property
    def bias(self) -> Operand | None:
        """The bias's tile of a warpgroup, if it is copied as boxes."""
        return bias_operand(ROWS, self.block_kv) if self.bias_stages else None

    @property
    def bias_bytes(self) -> int:
        return self.bias_stages * self.consumers * self.bias.nbytes if self.bias else 0


class EachReadsV(QueriesConfig):
    """Configs of kernels whose consumers all read K and V, in as many stages."""

    @property
    def v_stages(self) -> int:
        return self.stages

    @property
    def v_warps(self) -> int:
        """Those that read V."""
        return self.warps


@dataclass(frozen=True)
class Sm90Config(EachReadsV):
    """A block has 64 queries for each of `consumers` warpgroups, and block_kv keys at a time in each of its stages.

    turns: warpgroups take turns to start products, so that one's exponentials overlap the others' products. q_stages:
    with two, the loads of the next work item overlap this one. split, serial: keys are split (`split_kv`), among
    blocks, or for one block that takes all splits of its rows in turn. heads: heads of a group whose queries share a
    tile; needs one consumer. o_over_q: o overwrites Q in shared memory on its way out. slices: slices of V's columns,
    each a work item of its own (`schedule`). most: consumers get more registers, from the threads that load. thirds:
    float32, as three parts of bfloat16 (`float32`); o goes to memory from registers. held: Q is in registers, two for
    each 8 columns of D, and its place in shared memory is free once it is there. bias_stages: of the bias's tiles, if
    it is copied as boxes; otherwise 0.
    """

    consumers: int
    block_kv: int
    stages: int = 2
    turns: bool = True
    q_stages: int = 2
    split: bool = False
    serial: bool = False
    heads: int = 1
    o_over_q: bool = False
    slices: int = 1
    most: bool = False
    thirds: bool = False
    held: bool = False
    bias_stages: int = 0

    @property
    def queries(self) -> int:
        """Queries of each head of a tile."""
        return self.block_q // self.heads

    def columns(self, Dv: int) -> int:
        """Return how many columns of V are in shared memory: those of a slice."""
        return slice_width(Dv, self.slices)

    def tiles(self, D: int, Dv: int) -> Tiles:
        """Return the tiles for heads of these widths, D in whole boxes. Raises ValueError if o does not fit in Q's
        place.
        """
        Dv = self.columns(Dv)
        if self.o_over_q and (self.q_stages > 1 or Dv > D or self.split):
            raise ValueError(f"o of {Dv} columns over Q of {D} in {self.q_stages} stages, expected at most {D} and 1")
        D, Dv = (parts_width(width, self.thirds) for width in (D, Dv))
        q, k, v = boxes(self.block_q, D), boxes(self.block_kv, D), boxes(self.block_kv, Dv, "mn")
        sizes = self.q_stages * q.nbytes, self.stages * k.nbytes, self.stages * v.nbytes, self.bias_bytes
        k_at, v_at, bias_at, end = accumulate(sizes)
        if self.o_over_q or self.split or self.thirds:
            return Tiles(q, k, v, k_at, v_at, bias_at, 0, end)
        return Tiles(q, k, v, k_at, v_at, bias_at, end, end + 2 * self.block_q * Dv)


MOST_BYTES = 227 * 1024 - SLACK  # of Hopper's shared memory
LIGHT_OPTIONS = ("band", "sinks")  # that need no registers
LIGHT_ALONE = ["key_padding_mask"]  # whose bits fit if no other option needs registers
# keys that one other option leaves registers for, and several. TFLOP/s of S = 4096 if tuned: softcap 494 (112 keys:
# 474), ALiBi 565 (112: 531, not in turns 512; Q in registers later gained 3 and 2 %), dropout 467, a bias from memory
# 417 to 468 (96: 401 to 431, 64: 364; 128 as 112); 660 without options
KEYS_WITH = {"softcap": 128, "alibi": 128, "bias": 112, "dropout": 128}
IN_TURNS = ("softcap", "alibi", "bias")
KEYS_WITH_ONE, KEYS_WITH_SOME, KEYS_WITH_READING, KEYS_WITH_MANY = 96, 64, 48, 32
READING_OPTIONS = ("bias", "dropout")
MANY = 5  # options, one of which reads
ASKED_SELDOM = ("mask_mod", BLOCK_MASK)  # evaluated only in tiles that the mask cuts


def keys_with(heavy: Sequence[str]) -> int:
    """Return how many keys of a tile these options leave registers for."""
    if len(heavy) == 1:
        return KEYS_WITH.get(heavy[0], KEYS_WITH_ONE)
    if are_many(heavy):
        return KEYS_WITH_MANY
    return KEYS_WITH_READING if _read(heavy) else KEYS_WITH_SOME


def configs(D: int, Dv: int, options: Sequence[str], bias_in_boxes: bool = False) -> Iterator[tuple[Sm90Config, str]]:
    """Yield tiles for heads of these widths, best first: as many keys as there are registers for. bias_in_boxes: the
    bias can be copied as boxes, which takes shared memory but no registers.

    Figures: TFLOP/s on an H200, bursts, 2026-11-22, full and causal, two batches of S = 8192 and 16 or 32 heads.
    """
    heavy = [name for name in options if name not in LIGHT_OPTIONS]
    heavy = [] if heavy == LIGHT_ALONE else heavy
    note = ", options need registers" if heavy else ""
    if BLOCK_MASK in options:
        config = _of_block_mask(D, Dv, [name for name in heavy if name not in ASKED_SELDOM])
    elif max(D, Dv) > 128:
        config = _wide_config(D, Dv, heavy)
        if not options and D <= 192 and Dv <= 128:  # 1.02 and 1.04 (two runs); causal 0.98 and, in turns, 1.00 and 0.99
            config = replace(config, turns=False, most=True, held=True)
        note += f", o of {config.slices} slices" * (config.slices > 1) + ", o over Q" * config.o_over_q
    elif heavy == ["bias"] and bias_in_boxes:
        # 1.26 of the speed with a bias from memory; Q not in registers 1.21, not in turns 1.16, 112 keys 1.13
        config = Sm90Config(2, 128, q_stages=1, most=True, held=True, bias_stages=1)
    elif heavy:
        config = Sm90Config(2, keys_with(heavy), turns=False)
        if heavy[0] in IN_TURNS and len(heavy) == 1:
            # softcap alone is 2 to 5 % faster without `most`; causal, it would spill
            config = replace(config, turns=True, most=list(options) != ["softcap"], held=heavy == ["alibi"])
        elif heavy == ["dropout"]:  # in turns 0.61 to 0.66 of the speed without options, else 0.68
            config = replace(config, most=True)
    elif max(D, Dv) > 64:  # 620 and 600, not in turns 627 and 602; S = 2048: 571 and 534, not in turns 555 and 527
        config = Sm90Config(2, 128, held=True)
    else:  # 506 and 461; two stages, in turns, 475 and 456
        config = Sm90Config(3, 128, stages=3, turns=False)
    yield config, f"{config.block_q} queries by {config.block_kv} keys{note}"


WIDE_KEYS = {128: (112, 48), 192: (96, 48), 256: (80, 48)}  # by columns of a slice: without options, and with


def _wide_config(D: int, Dv: int, heavy: Sequence[str]) -> Sm90Config:
    """Return a Config with as many keys as there are registers and shared memory for. o overwrites Q if its own place
    would cost keys.

    D 192, Dv 128: 654 and 614.
    """
    slices = _slices(Dv, heavy)
    most = KEYS_WITH_MANY if are_many(heavy) else WIDE_KEYS[max(slice_width(Dv, slices), 128)][bool(heavy)]
    return _of_room(D, Dv, heavy, slices, range(most, 0, -16))


def _of_room(D: int, Dv: int, heavy: Sequence[str], slices: int, keys: Iterable[int]) -> Sm90Config:
    """Return a Config with the first of these numbers of keys that fits in shared memory."""
    for block_kv in keys:
        for o_over_q in (False, True) if slice_width(Dv, slices) <= D else (False,):
            config = Sm90Config(2, block_kv, turns=not heavy, q_stages=1, o_over_q=o_over_q, slices=slices)
            if config.shared_bytes(D, Dv) <= MOST_BYTES:
                return config
    raise AssertionError(f"no room for heads of {D} and {Dv}")


def _of_block_mask(D: int, Dv: int, heavy: Sequence[str]) -> Sm90Config:
    """Return a Config whose tiles divide those of a block mask. Most tiles are fully visible, so that turns pay."""
    if max(D, Dv) > 128:
        return _of_room(D, Dv, heavy, _slices(Dv, heavy), (32, 16) if heavy else (64, 32, 16))
    if heavy:
        return Sm90Config(2, 32 if _read(heavy) else 64, turns=False)
    return Sm90Config(2, 128, stages=2 if max(D, Dv) > 64 else 3)


def _slices(Dv: int, options: Sequence[str]) -> int:
    """Return how many slices V needs: with 256 columns, which take 128 registers, options that read have too
    few left.
    """
    return -(-Dv // (128 if _read(options) else 256))


def _read(options: Sequence[str]) -> bool:
    return any(name in READING_OPTIONS for name in options)


def are_many(options: Sequence[str]) -> bool:
    """Return whether options leave few registers."""
    return len(options) >= MANY and _read(options)


def short_config(D: int, Dv: int, options: Sequence[str], group: int) -> tuple[Sm90Config, str]:
    """Return tiles for few queries, and a description: as many bytes of K and V in flight as fit.

    A tile has the queries of all heads of a group, which share their keys. With dropout it has those of one head, since
    a call returns weights for two queries of a head.
    """
    heads = group if group <= ROWS and "dropout" not in options else 1
    heavy = [name for name in options if name not in LIGHT_OPTIONS]
    slices = -(-Dv // 128)  # with 256 columns too few registers are left
    width = D + slice_width(Dv, slices)
    if heavy or width > 256:
        block_kv = KEYS_WITH_MANY if _read(heavy) and len(heavy) > 1 else 64
        stages = 3 if width > 256 else 5
    else:
        block_kv, stages = 128, 3 if width > 128 else 5
    config = Sm90Config(1, block_kv, stages, turns=False, split=True, heads=heads, slices=slices)
    if config.shared_bytes(D, Dv) > MOST_BYTES:
        config = replace(config, q_stages=1)
    of_heads = f"{config.queries} queries of {heads} heads" if heads > 1 else f"{config.queries} queries"
    return config, f"few queries: {of_heads} by {config.block_kv} keys, which are split"
