"""The Configs of attention's sm80 rung, and the shared memory of its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...tile.softmax_rows import LANES
from ...tile.warp_mma import LINE_BYTES, FactorSlice
from ...tile.warp_rows import WarpRowsLayout
from ..saved_lse import lane_columns

ROWS = 64  # queries of four warps
STAGES = 2
ITEMSIZE = 2


def pitch(width: int) -> int:
    """Return how many elements of a row lie in one box."""
    whole = LINE_BYTES // ITEMSIZE
    return whole // 2 if width <= whole // 2 else whole


def box_count(width: int) -> int:
    """Return how many boxes a head of this width fills, padded with zeros."""
    return -(-width // pitch(width))


class Tiles(NamedTuple):
    """Boxes in shared memory, and where they begin, in elements."""

    q: FactorSlice
    k: FactorSlice
    v: FactorSlice
    q_boxes: int
    v_boxes: int
    k_at: int
    v_at: int
    k_size: int  # elements from one stage to the next
    v_size: int
    nbytes: int


class _Groups:
    """A block has `groups` of four warps."""

    groups: int

    @property
    def threads(self) -> int:
        return 128 * self.groups

    def tiles(self, D: int, Dv: int) -> Any:
        raise NotImplementedError

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


@dataclass(frozen=True)
class Sm80Config(_Groups):
    """A block has 64 queries for each of `groups` of four warps, and block_kv keys at a time in each of two stages."""

    groups: int
    block_kv: int
    min_blocks: int = 1

    @property
    def block_q(self) -> int:
        return ROWS * self.groups

    def tiles(self, D: int, Dv: int) -> Tiles:
        """Return the tiles for heads of these widths."""
        along, across = pitch(D), pitch(Dv)
        q, k = (FactorSlice("depth", rows, along) for rows in (self.block_q, self.block_kv))
        v = FactorSlice("row", across, self.block_kv)
        q_boxes, v_boxes = box_count(D), box_count(Dv)
        k_at = q_boxes * q.size
        k_size, v_size = q_boxes * k.size, v_boxes * v.size
        v_at = k_at + STAGES * k_size
        rows = 4 * self.threads // 32 * WarpRowsLayout(across).size
        nbytes = max(ITEMSIZE * (v_at + STAGES * v_size), rows)
        return Tiles(q, k, v, q_boxes, v_boxes, k_at, v_at, k_size, v_size, nbytes)


MOST_HELD = 128  # columns of Q of which a thread keeps its share in registers
LIGHT_OPTIONS = ("band", "sinks", "key_padding_mask")  # options that need no registers
LONG_OPTIONS = ("score_mod", "mask_mod")  # that may need any number of registers


def configs(D: int, Dv: int, options: Sequence[str]) -> Iterator[tuple[Sm80Config, str]]:
    """Yield tiles for heads of these widths, best first; none if results leave too few registers.

    Share of FlashAttention-2's TFLOP/s on an H200, D=128, S=8192, full and causal: 0.93 and 1.04.
    """
    heavy = [name for name in options if name not in LIGHT_OPTIONS]
    rich = len(heavy) > 1 or any(name in LONG_OPTIONS for name in heavy)
    why = ", options need registers" if rich else ""
    widest = max(D, Dv)
    if Dv > 128 and (rich or "bias" in heavy):
        return
    if widest <= 128 and not rich:
        yield Sm80Config(1, 64, min_blocks=2), "64 queries by 64 keys"
    if widest <= 128:
        yield Sm80Config(1, 32, min_blocks=2), f"64 queries by 32 keys{why or ', little shared memory'}"
    else:
        yield Sm80Config(1, 32), f"64 queries by 32 keys, wide heads{why}"


MOST_WIDTH = 128  # of a head: registers hold the sums of its gradients


class Sm80DqTiles(NamedTuple):
    """Boxes in shared memory, and where they begin, in elements."""

    q: FactorSlice
    do: FactorSlice
    k: FactorSlice
    k_right: FactorSlice  # K as the right factor of dS
    v: FactorSlice
    q_boxes: int
    v_boxes: int
    do_at: int
    k_at: int
    v_at: int
    k_size: int  # elements from one stage to the next
    v_size: int
    nbytes: int


@dataclass(frozen=True)
class Sm80DqConfig(_Groups):
    """A block has 64 queries for each of `groups` of four warps, and block_kv keys at a time in each of two stages."""

    groups: int
    block_kv: int
    min_blocks: int = 1

    @property
    def block_q(self) -> int:
        return ROWS * self.groups

    def tiles(self, D: int, Dv: int) -> Sm80DqTiles:
        """Return the tiles for heads of these widths."""
        along, along_v = pitch(D), pitch(Dv)
        q, k = (FactorSlice("depth", rows, along) for rows in (self.block_q, self.block_kv))
        do, v = (FactorSlice("depth", rows, along_v) for rows in (self.block_q, self.block_kv))
        k_right = FactorSlice("row", along, self.block_kv)
        q_boxes, v_boxes = box_count(D), box_count(Dv)
        k_size, v_size = q_boxes * k.size, v_boxes * v.size
        do_at = q_boxes * q.size
        k_at = do_at + v_boxes * do.size
        v_at = k_at + STAGES * k_size
        rows = 4 * self.threads // 32 * WarpRowsLayout(along).size
        nbytes = max(ITEMSIZE * (v_at + STAGES * v_size), rows)
        return Sm80DqTiles(q, do, k, k_right, v, q_boxes, v_boxes, do_at, k_at, v_at, k_size, v_size, nbytes)


def dq_configs(D: int, Dv: int, options: Sequence[str]) -> Iterator[tuple[Sm80DqConfig, str]]:
    """Yield tiles for heads of these widths, best first; none for heads that are too wide."""
    if max(D, Dv) > MOST_WIDTH:
        return
    heavy = [name for name in options if name not in LIGHT_OPTIONS]
    why = ", options need registers" if heavy else ""
    if not heavy:
        yield Sm80DqConfig(1, 64, min_blocks=2), "64 queries by 64 keys for dq"
    yield Sm80DqConfig(1, 32, min_blocks=2), f"64 queries by 32 keys for dq{why or ', little shared memory'}"
    yield Sm80DqConfig(1, 32), "64 queries by 32 keys for dq, in all the shared memory of a consumer GPU"


class Sm80DkvTiles(NamedTuple):
    """Boxes in shared memory, and where they begin, in elements. Q and dO are read in two ways: as columns of a
    product, and as steps of its sum.
    """

    k: FactorSlice
    v: FactorSlice
    q: FactorSlice
    do: FactorSlice
    q_steps: FactorSlice
    do_steps: FactorSlice
    k_boxes: int
    v_boxes: int
    v_at: int
    q_at: int
    do_at: int
    q_size: int  # elements from one stage to the next
    do_size: int
    nbytes: int


@dataclass(frozen=True)
class Sm80DkvConfig(_Groups):
    """A block has 64 keys for each of `groups` of four warps, and block_q queries at a time in each of two stages."""

    groups: int
    block_q: int

    @property
    def block_kv(self) -> int:
        return ROWS * self.groups

    @property
    def statistics_bytes(self) -> int:
        """Bytes of shared memory for lse and delta, in addition to the tiles."""
        return 4 * STAGES * 2 * LANES * lane_columns(self.block_q)

    def tiles(self, D: int, Dv: int) -> Sm80DkvTiles:
        """Return the tiles for heads of these widths."""
        along, along_v = pitch(D), pitch(Dv)
        k, q = (FactorSlice("depth", rows, along) for rows in (self.block_kv, self.block_q))
        v, do = (FactorSlice("depth", rows, along_v) for rows in (self.block_kv, self.block_q))
        q_steps, do_steps = (FactorSlice("row", width, self.block_q) for width in (along, along_v))
        k_boxes, v_boxes = box_count(D), box_count(Dv)
        q_size, do_size = k_boxes * q.size, v_boxes * do.size
        v_at = k_boxes * k.size
        q_at = v_at + v_boxes * v.size
        do_at = q_at + STAGES * q_size
        rows = 4 * self.threads // 32 * WarpRowsLayout(max(along, along_v)).size
        nbytes = max(ITEMSIZE * (do_at + STAGES * do_size), rows)
        return Sm80DkvTiles(
            k, v, q, do, q_steps, do_steps, k_boxes, v_boxes, v_at, q_at, do_at, q_size, do_size, nbytes
        )


DKV_LIGHT_OPTIONS = ("band", "sinks", "block_mask")  # options that need no registers
NARROW = 192  # columns of dk and dv that leave registers for 64 queries, or for several options
MOST_OPTIONS = 4  # others, for which these columns leave registers


def dkv_configs(D: int, Dv: int, options: Sequence[str]) -> Iterator[tuple[Sm80DkvConfig, str]]:
    """Yield tiles for heads of these widths, best first; none if results leave too few registers."""
    heavy = [name for name in options if name not in DKV_LIGHT_OPTIONS]
    narrow = sum(pitch(width) * box_count(width) for width in (D, Dv)) <= NARROW
    if max(D, Dv) > MOST_WIDTH or len(heavy) > (MOST_OPTIONS if narrow else 1):
        return
    why = ", options need registers" if heavy else ""
    if narrow and not heavy:
        yield Sm80DkvConfig(2, 64), "128 keys by 64 queries"
    if min(D, Dv) > 32:  # else 32 rows have fewer vectors than there are threads
        yield Sm80DkvConfig(2, 32), f"128 keys by 32 queries{why}"
    yield Sm80DkvConfig(1, 32), f"64 keys by 32 queries{why}"
