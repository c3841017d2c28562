"""The Configs of attention's kernels on Hopper that own keys: of dk and dv, and of the whole gradient in one kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS
from ...tile.warpgroup_exchange import exchange_bytes
from ..saved_lse import lane_columns
from .config import BLOCK_MASK, BOX, LIGHT_OPTIONS, TilesConfig, are_many, bias_operand, boxes, parts_width

CONSUMERS = 2  # of blocks that do not say how many
BARRIERS = 512  # bytes of shared memory for mbarriers, at most
WHOLE = 1024  # alignment of tiles, in bytes


class DkvTiles(NamedTuple):
    """What lies in shared memory. Q and dO are read in two ways: as columns of a product, and as steps of its sum."""

    k: Operand  # [BLOCK_KV, D]; dk overwrites it at the end
    v: Operand  # [BLOCK_KV, Dv]; dv overwrites it at the end
    q: Operand  # [BLOCK_Q, D], a stage
    do: Operand  # [BLOCK_Q, Dv], a stage
    q_steps: Operand
    do_steps: Operand
    v_at: int
    q_at: int
    do_at: int
    bias_at: int  # of a bias in boxes, [BLOCK_Q, BLOCK_KV], a stage
    p_at: int  # P, from one warpgroup to the other
    nbytes: int


class _Keys(TilesConfig):
    """What the Configs share. By default a block has CONSUMERS warpgroups, no bias in boxes and no exchange of P."""

    block_q: int
    stages: int

    thirds, bias_in_boxes = False, False

    @property
    def block_kv(self) -> int:
        return ROWS * CONSUMERS

    @property
    def warps(self) -> int:
        """Of the consumers."""
        return 4 * CONSUMERS

    @property
    def do_stages(self) -> int:
        return self.stages

    @property
    def slack(self) -> int:
        """Bytes in addition to the tiles: lse and delta, mbarriers, alignment."""
        return -(-(self.stages * 2 * 4 * lane_columns(self.block_q) * 4 + BARRIERS) // WHOLE) * WHOLE

    @property
    def bias(self) -> Operand | None:
        """The bias's tile, if it is copied as boxes."""
        return bias_operand(self.block_q, self.block_kv) if self.bias_in_boxes else None

    @property
    def bias_bytes(self) -> int:
        return self.stages * self.bias.nbytes if self.bias else 0

    @property
    def p_bytes(self) -> int:
        """Bytes of P, from one warpgroup to the other."""
        return 0

    def tiles(self, D: int, Dv: int) -> Any:
        """Return the tiles for heads of these widths, in whole boxes."""
        widths = parts_width(D, self.thirds), parts_width(Dv, self.thirds)
        k, v, q, do = (boxes(lines, width) for lines in (self.block_kv, self.block_q) for width in widths)
        q_steps, do_steps = (boxes(self.block_q, width, "mn") for width in widths)
        of_queries = self.stages * q.nbytes, self.do_stages * do.nbytes, self.bias_bytes
        v_at, q_at, do_at, bias_at, p_at, end = accumulate((k.nbytes, v.nbytes, *of_queries, self.p_bytes))
        return DkvTiles(k, v, q, do, q_steps, do_steps, v_at, q_at, do_at, bias_at, p_at, end)


@dataclass(frozen=True)
class DkvConfig(_Keys):
    """A block has 64 keys for each of `consumers` warpgroups, and block_q queries at a time in each of its stages.

    `overlap`: the computation of dS.T overlaps the product for dv, which takes registers. thirds: as in `Sm90Config`.
    bias_in_boxes: each stage has the bias's tile.
    """

    consumers: int
    block_q: int
    stages: int = 2
    overlap: bool = True
    thirds: bool = False
    bias_in_boxes: bool = False

    @property
    def block_kv(self) -> int:
        return ROWS * self.consumers

    @property
    def warps(self) -> int:
        return 4 * self.consumers


@dataclass(frozen=True)
class DkvApartConfig(_Keys):
    """A block has 64 keys, and block_q queries at a time in each of its stages. One warpgroup has dv, the other dk. P
    passes from one to the other in `places`.

    `overlap`: the computations of P and dS overlap the products for dv and dk of the previous tile, which takes
    registers. exact: P is passed as float32, otherwise as float16 (`tile.warpgroup_exchange`); P * slope may be too
    large for that. thirds: as in `Sm90Config`; then dO has one stage, as the last product of a tile needs Q.
    """

    block_q: int
    stages: int
    places: int = 2
    overlap: bool = True
    exact: bool = False
    thirds: bool = False

    @property
    def block_kv(self) -> int:
        return ROWS

    @property
    def do_stages(self) -> int:
        return 1 if self.thirds else self.stages

    @property
    def p_bytes(self) -> int:
        return exchange_bytes(self.block_q // 2, self.places, self.exact)


# queries that one option leaves registers for, at widths to 128; a bias in boxes; other options; and several
QUERIES_BESIDE = {"alibi": 64, "key_padding_mask": 64, "mask_mod": 64, "score_mod": 48, "dropout": 48}
QUERIES_BESIDE_BOXES = 64
QUERIES_BESIDE_ONE, QUERIES_BESIDE_SOME, QUERIES_BESIDE_MANY = 32, 32, 16
MOST_BESIDE = 48  # queries with which computing dS.T may overlap the product for dv, at widths to 128


AnyDkvConfig = DkvConfig | DkvApartConfig
BENDING = ("softcap", "score_mod")  # options that have slopes
BESIDE_APART = ("alibi", "key_padding_mask", "dropout")  # options that leave enough registers


def dkv_configs(
    D: int, Dv: int, options: Sequence[str], bias_in_boxes: bool = False
) -> Iterator[tuple[AnyDkvConfig, str]]:
    """Yield tiles for heads of these widths, in whole boxes, best first; none for wide heads with more options than
    there are registers for. bias_in_boxes: the bias can be copied as boxes.

    TFLOP/s of the four products on an H200, 2026-11-25, P passed as bfloat16: D = Dv = 256, S = 4096 697, 64 queries in
    two stages 534, 32 in four 637; D = 192, Dv = 128, S = 8192 671, 64 queries 649, 32 in a `DkvConfig` 586.
    """
    heavy = [name for name in options if name not in (*LIGHT_OPTIONS, BLOCK_MASK)]
    note = ", options need registers" if heavy else ""
    if max(D, Dv) <= 128:
        config = _config(max(D, Dv) <= 64, heavy)
        if bias_in_boxes:
            if len(heavy) == 1:
                config = replace(config, block_q=QUERIES_BESIDE_BOXES, overlap=max(D, Dv) <= 64)
            config, note = replace(config, bias_in_boxes=True), ", the bias in boxes"
    elif not are_many(heavy):
        config = _apart_of_list(D + Dv, heavy) if BLOCK_MASK in options else _apart_config(D + Dv, heavy)
    else:
        return
    yield config, f"{config.block_kv} keys by {config.block_q} queries{note}"


def _config(narrow: bool, heavy: Sequence[str]) -> DkvConfig:
    if not heavy:
        block_q = 96 if narrow else 64
    elif len(heavy) == 1:
        block_q = 64 if narrow else QUERIES_BESIDE.get(heavy[0], QUERIES_BESIDE_ONE)
    else:
        block_q = QUERIES_BESIDE_MANY if are_many(heavy) else QUERIES_BESIDE_SOME
    return DkvConfig(2, block_q, 3, overlap=narrow or block_q <= MOST_BESIDE)


def _apart_config(width: int, heavy: Sequence[str]) -> DkvApartConfig:
    """Return a Config with as many queries as registers, and shared memory in three stages, have room for. width: of Q
    and dO together.
    """
    if not heavy:
        return DkvApartConfig(80 if width <= 320 else 64 if width <= 384 else 48, 3)
    exact = any(name in BENDING for name in heavy)
    if len(heavy) == 1 and not exact:
        return DkvApartConfig(48, 3, overlap=heavy[0] in BESIDE_APART)
    return DkvApartConfig(32, 3 if exact else 4, overlap=False, exact=exact)


def _apart_of_list(width: int, heavy: Sequence[str]) -> DkvApartConfig:
    """Return a Config whose queries divide a block mask's tiles; few of them evaluate mask_mod."""
    others = [name for name in heavy if name != "mask_mod"]
    if others or width > 384:
        exact = any(name in BENDING for name in others)
        return DkvApartConfig(32, 3 if exact else 4, overlap=not others, exact=exact)
    return DkvApartConfig(64, 3)


FRAGMENT_BYTES = 4 * ROWS * BOX  # of dq that a warpgroup computes at a time, in float32
FRAGMENT = ROWS * BOX  # numbers
DS_PLACES = 2  # so that warpgroups meet once per tile
# options that need no registers; and sets of others that registers have room for. A user's function may need any number
# of registers: with a score_mod that reads the score, its square and all coordinates, 64 bytes spill
SERVED = ("band", "sinks")
SERVED_TOGETHER = {"alibi", "key_padding_mask", "dropout"}, {"softcap", "key_padding_mask"}, {"score_mod"}, {"mask_mod"}


class FusedTiles(NamedTuple):
    """What lies in shared memory. K, Q and dO are read in two ways: by rows and by columns."""

    k: Operand  # [BLOCK_KV, D]; dk overwrites it at the end
    v: Operand  # [BLOCK_KV, Dv]; dv overwrites it at the end
    q: Operand  # [BLOCK_Q, D], a stage
    do: Operand  # [BLOCK_Q, Dv], a stage
    part_q: Operand  # [64, D]: a part of the tile of Q
    part_do: Operand  # [64, Dv], of dO
    q_steps: Operand
    do_steps: Operand
    ds: Operand  # [BLOCK_KV, 64], dS.T of 64 queries as the left factor of their dq
    k_columns: Operand  # [BLOCK_KV, 64], of K as the right one
    v_at: int
    q_at: int
    do_at: int
    ds_at: int
    dq_at: int  # a fragment of each warpgroup in each place
    bias_at: int  # of a bias in boxes, [64, BLOCK_KV], a stage
    nbytes: int


@dataclass(frozen=True)
class FusedConfig(_Keys):
    """A block has 128 keys, and block_q queries at a time in each of its stages. dq leaves through `dq_places`.

    k_held, v_held: K and V are in registers, as left factors.
    bias_in_boxes: each stage has the bias's tile.
    most: consumers have 240 registers, not 232.
    by_steps: the product for dv begins as soon as P of 16 queries is there.
    ascends: the last keys come first, and their first queries; otherwise the first keys, and the last queries.

    A warpgroup computes 64 x 64 of a tile's dq: for heads of 128 half of the columns of 64 queries, for heads of 64 all
    columns of half of 128 queries.
    """

    block_q: int = 64
    stages: int = 2
    dq_places: int = 2
    k_held: bool = False
    v_held: bool = False
    bias_in_boxes: bool = False
    most: bool = True
    by_steps: bool = False
    ascends: bool = False

    @property
    def parts(self) -> int:
        """Parts of 64 queries; scores of a part are computed together."""
        return self.block_q // ROWS

    def tiles(self, D: int, Dv: int) -> FusedTiles:
        """Return the tiles for heads of these widths, in whole boxes."""
        k, v, q, do = (boxes(lines, width) for lines in (self.block_kv, self.block_q) for width in (D, Dv))
        part_q, part_do, q_steps, do_steps = (boxes(ROWS, width, major) for major in ("k", "mn") for width in (D, Dv))
        ds = k_columns = boxes(self.block_kv, BOX, "mn")
        of_queries = self.stages * q.nbytes, self.stages * do.nbytes, DS_PLACES * self.parts * ds.nbytes
        rest = self.dq_places * CONSUMERS * FRAGMENT_BYTES, self.bias_bytes
        v_at, q_at, do_at, ds_at, dq_at, bias_at, end = accumulate((k.nbytes, v.nbytes, *of_queries, *rest))
        parts = part_q, part_do, q_steps, do_steps
        return FusedTiles(k, v, q, do, *parts, ds, k_columns, v_at, q_at, do_at, ds_at, dq_at, bias_at, end)


def fused_configs(
    D: int, Dv: int, options: Sequence[str], bias_in_boxes: bool = False, group: Any = 1, varlen: bool = False
) -> Iterator[tuple[FusedConfig, str]]:
    """Yield tiles for heads of these widths, in whole boxes, best first. bias_in_boxes: the bias can be copied as
    boxes; heads of 64, with tiles of two parts, have no room for it. group: heads that share a key head. varlen:
    lengths take registers.
    """
    narrow, others = D == Dv == BOX, [name for name in options if name not in SERVED]
    with_bias = others == ["bias"] and bias_in_boxes and not narrow
    served = with_bias or any(some.issuperset(others) for some in SERVED_TOGETHER)
    spills = varlen and not narrow and ("score_mod" in others or ("mask_mod" in others and "band" in options))
    if not served or spills or not (narrow or (D == 2 * BOX and Dv <= 2 * BOX)):
        return
    note = ""
    if narrow:
        # with both held, the gradient takes 0.89 of the time (S = 8192, H200, 2026-11-26); with options V would spill.
        # Causal, ascending takes 0.89 and 0.91 (S = 8192 and 2048, H100). But if a block visits the queries of several
        # heads, the longest blocks come last, and keep a few multiprocessors busy for long
        banded = "band" in options  # a causal mask or a window
        config = FusedConfig(
            2 * ROWS, k_held=True, v_held=not others, most=bool(others) or not banded, ascends=banded and group == 1
        )
        note = ", K and V in registers" if config.v_held else ", K in registers"
    elif with_bias:
        config, note = FusedConfig(dq_places=1, bias_in_boxes=True), ", the bias in boxes"
    else:
        # with by_steps it takes 0.94 to 0.98 of the time, full and causal (S = 2048 to 16384, H100, 2026-11-26), but
        # 1.01 to 1.02 for heads of 64
        config = FusedConfig(by_steps=not others)
    yield config, f"{config.block_kv} keys by {config.block_q} queries{note}"
