"""The Configs of attention's dk and dv on Hopper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS
from ...tile.warpgroup_exchange import exchange_bytes
from ..bias_tiles import bias_operand
from ..lse_delta_smem import lane_columns
from .config import BLOCK_MASK, LIGHT_OPTIONS, are_many, parts_width

CONSUMERS_APART = 2
BARRIERS = 512  # bytes of shared memory that the mbarriers take, at most
WHOLE = 1024  # a multiple of which tiles begin at


class DkvTiles(NamedTuple):
    """What lies in shared memory. Q and dO are read two ways: as columns of a product, and as steps of its sum."""

    k: Operand  # [BLOCK_KV, D]; dk is put over it in the end
    v: Operand  # [BLOCK_KV, Dv]; and dv over that
    q: Operand  # [BLOCK_Q, D], a stage
    do: Operand  # [BLOCK_Q, Dv], a stage
    q_steps: Operand
    do_steps: Operand
    v_at: int
    q_at: int
    do_at: int
    bias_at: int  # of a bias in boxes, [BLOCK_Q, BLOCK_KV], a stage
    p_at: int  # what warpgroups hand over
    nbytes: int


def _tiles(
    widths: tuple[int, int],
    block_kv: int,
    block_q: int,
    stages: int,
    *,
    do_stages: int | None = None,
    bias_bytes: int = 0,
    p_bytes: int = 0,
) -> DkvTiles:
    """do_stages: of dO, where they are not as many as Q's."""
    k, v = (Operand(block_kv, width, 2, 128, "k") for width in widths)
    q, do = (Operand(block_q, width, 2, 128, "k") for width in widths)
    q_steps, do_steps = (Operand(block_q, width, 2, 128, "mn") for width in widths)
    v_at = k.nbytes
    q_at = v_at + v.nbytes
    do_at = q_at + stages * q.nbytes
    bias_at = do_at + (stages if do_stages is None else do_stages) * do.nbytes
    p_at = bias_at + stages * bias_bytes
    return DkvTiles(k, v, q, do, q_steps, do_steps, v_at, q_at, do_at, bias_at, p_at, p_at + p_bytes)


def _slack(block_q: int, stages: int) -> int:
    return -(-(stages * 2 * 4 * lane_columns(block_q) * 4 + BARRIERS) // WHOLE) * WHOLE


@dataclass(frozen=True)
class DkvConfig:
    """A block has 64 keys for each of `consumers` warpgroups, and block_q queries at a time in each of its stages.

    overlap: dS.T is computed during the product for dv, which takes registers. thirds: as `Sm90Config` has it.
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
    def bias(self) -> Operand | None:
        """The bias's tile."""
        return bias_operand(self.block_q, self.block_kv) if self.bias_in_boxes else None

    @property
    def slack(self) -> int:
        """Bytes beside the tiles: statistics, mbarriers, and what lies between them and the tiles."""
        return _slack(self.block_q, self.stages)

    def tiles(self, D: int, Dv: int) -> DkvTiles:
        """For heads of these widths, in whole boxes."""
        widths = parts_width(D, self.thirds), parts_width(Dv, self.thirds)
        bias_bytes = self.bias.nbytes if self.bias else 0
        return _tiles(widths, self.block_kv, self.block_q, self.stages, bias_bytes=bias_bytes)

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


@dataclass(frozen=True)
class DkvApartConfig:
    """A block has 64 keys, whose dv is one warpgroup's and whose dk is the other's, and block_q queries at a time in
    each of its stages. P has so many places on its way from the one to the other.

    overlap: P and dS are computed during the products for dv and dk of the tile before, which takes registers. exact: P
    is handed over as float32, else as float16 (`tile.warpgroup_exchange`), which P * slope may be too large for.
    """

    block_q: int
    stages: int
    places: int = 2
    overlap: bool = True
    exact: bool = False

    @property
    def block_kv(self) -> int:
        return ROWS

    @property
    def slack(self) -> int:
        """As `DkvConfig` has it."""
        return _slack(self.block_q, self.stages)

    def tiles(self, D: int, Dv: int) -> DkvTiles:
        """For heads of these widths, in whole boxes."""
        p_bytes = exchange_bytes(self.block_q // 2, self.places, self.exact)
        return _tiles((D, Dv), self.block_kv, self.block_q, self.stages, p_bytes=p_bytes)

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


@dataclass(frozen=True)
class DkvThirdsConfig:
    """As `DkvApartConfig`, of numbers in thirds (`Sm90Config`), P as float32. Q has more stages than dO: the last
    product of a tile needs it.
    """

    block_q: int
    stages: int = 2
    do_stages: int = 1
    places: int = 1

    @property
    def block_kv(self) -> int:
        return ROWS

    @property
    def slack(self) -> int:
        """As `DkvConfig` has it."""
        return _slack(self.block_q, self.stages)

    def tiles(self, D: int, Dv: int) -> DkvTiles:
        """For heads of these widths, in whole boxes."""
        widths = parts_width(D, True), parts_width(Dv, True)
        p_bytes = exchange_bytes(self.block_q // 2, self.places, True)
        return _tiles(widths, ROWS, self.block_q, self.stages, do_stages=self.do_stages, p_bytes=p_bytes)

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


# queries that there are registers for beside one option that needs some, at widths to 128; a bias in boxes; others; and
# beside several
QUERIES_BESIDE = {"alibi": 64, "key_padding_mask": 64, "mask_mod": 64, "score_mod": 48, "dropout": 48}
QUERIES_BESIDE_BOXES = 64
QUERIES_BESIDE_ONE, QUERIES_BESIDE_SOME, QUERIES_BESIDE_MANY = 32, 32, 16
MOST_BESIDE = 48  # queries with which dS.T may be made beside the product for dv, at widths to 128


AnyDkvConfig = DkvConfig | DkvApartConfig | DkvThirdsConfig
BENDING = ("softcap", "score_mod")  # options that have slopes
BESIDE_APART = ("alibi", "key_padding_mask", "dropout")  # options that leave registers enough


def dkv_configs(
    D: int, Dv: int, options: Sequence[str], bias_in_boxes: bool = False
) -> Iterator[tuple[AnyDkvConfig, str]]:
    """Tiles for heads of these widths, in whole boxes, best first; none for wide heads with so many options that
    registers do not do. bias_in_boxes: there is a bias that can come so.

    TFLOP/s of the four products on an H200, 2026-11-25, P handed over as bfloat16: D = Dv = 256, S = 4096 697, 64
    queries in two stages 534, 32 in four 637; D = 192, Dv = 128, S = 8192 671, 64 queries 649, 32 in a `DkvConfig` 586.
    """
    heavy = [name for name in options if name not in (*LIGHT_OPTIONS, BLOCK_MASK)]
    told = ", options need registers" if heavy else ""
    if max(D, Dv) <= 128:
        config = _config(max(D, Dv) <= 64, heavy)
        if bias_in_boxes:
            if len(heavy) == 1:
                config = replace(config, block_q=QUERIES_BESIDE_BOXES, overlap=max(D, Dv) <= 64)
            config, told = replace(config, bias_in_boxes=True), ", the bias in boxes"
    elif not are_many(heavy):
        config = _apart_of_list(D + Dv, heavy) if BLOCK_MASK in options else _apart_config(D + Dv, heavy)
    else:
        return
    yield config, f"{config.block_kv} keys by {config.block_q} queries{told}"


def _config(narrow: bool, heavy: Sequence[str]) -> DkvConfig:
    if not heavy:
        block_q = 96 if narrow else 64
    elif len(heavy) == 1:
        block_q = 64 if narrow else QUERIES_BESIDE.get(heavy[0], QUERIES_BESIDE_ONE)
    else:
        block_q = QUERIES_BESIDE_MANY if are_many(heavy) else QUERIES_BESIDE_SOME
    return DkvConfig(2, block_q, 3, overlap=narrow or block_q <= MOST_BESIDE)


def _apart_config(width: int, heavy: Sequence[str]) -> DkvApartConfig:
    """width: of Q and dO together; as many queries as shared memory has room for in three stages, or registers."""
    if not heavy:
        return DkvApartConfig(80 if width <= 320 else 64 if width <= 384 else 48, 3)
    exact = any(name in BENDING for name in heavy)
    if len(heavy) == 1 and not exact:
        return DkvApartConfig(48, 3, overlap=heavy[0] in BESIDE_APART)
    return DkvApartConfig(32, 3 if exact else 4, overlap=False, exact=exact)


def _apart_of_list(width: int, heavy: Sequence[str]) -> DkvApartConfig:
    """The same of queries that divide a block mask's tiles, where mask_mod is asked in few of them."""
    others = [name for name in heavy if name != "mask_mod"]
    if others or width > 384:
        exact = any(name in BENDING for name in others)
        return DkvApartConfig(32, 3 if exact else 4, overlap=not others, exact=exact)
    return DkvApartConfig(64, 3)
