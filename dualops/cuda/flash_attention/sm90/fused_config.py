"""The Configs of attention's whole gradient in one kernel on Hopper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS
from ..bias_tiles import bias_operand
from ..lse_delta_smem import lane_columns
from .config import BOX
from .dkv_config import BARRIERS, WHOLE

CONSUMERS = 2
FRAGMENT_BYTES = 4 * ROWS * BOX  # of dq that a warpgroup makes at a time, in float32
FRAGMENT = ROWS * BOX  # numbers
DS_PLACES = 2  # so that warpgroups meet once a tile
# options that need no registers beside the rest; and of which there are registers for one. What a user's function needs
# nobody knows: of a score_mod that reads the score, its square and all numbers of its place 64 bytes spill
SERVED = ("band", "sinks")
ONE_SERVED = ("alibi", "key_padding_mask", "softcap", "score_mod", "mask_mod", "dropout")


class FusedTiles(NamedTuple):
    """What lies in shared memory. K, Q and dO are read two ways: along either axis."""

    k: Operand  # [BLOCK_KV, D]; dk is put over it in the end
    v: Operand  # [BLOCK_KV, Dv]; and dv over that
    q: Operand  # [BLOCK_Q, D], a stage
    do: Operand  # [BLOCK_Q, Dv], a stage
    part_q: Operand  # [64, D]: a part of the tile of Q, which lie one behind the other
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
class FusedConfig:
    """A block has 128 keys, and block_q queries at a time in each of its stages; dq has so many places on its way.
    k_held, v_held: K and V are in registers, as left factors. bias_in_boxes: each stage has the bias's tile. most: who
    multiplies has 240 registers, not 232. by_steps: 16 queries' share of dv begins as soon as their P is there.
    ascends: the last keys come first, and of their queries the first; else the first keys, and the last queries.

    A warpgroup makes 64 x 64 of a tile's dq: of heads of 128 half of the columns of 64 queries, of heads of 64 all
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
    def block_kv(self) -> int:
        return ROWS * CONSUMERS

    @property
    def bias(self) -> Operand | None:
        """The bias's tile, of a Config whose tiles have one part."""
        return bias_operand(self.block_q, self.block_kv) if self.bias_in_boxes else None

    @property
    def parts(self) -> int:
        """Parts of 64 queries, which the scores of a tile are made in."""
        return self.block_q // ROWS

    @property
    def slack(self) -> int:
        """Bytes beside the tiles: statistics, mbarriers, and what lies between them and the tiles."""
        return -(-(self.stages * 2 * 4 * lane_columns(self.block_q) * 4 + BARRIERS) // WHOLE) * WHOLE

    def tiles(self, D: int, Dv: int) -> FusedTiles:
        """For heads of these widths, in whole boxes."""
        k, v = (Operand(self.block_kv, width, 2, 128, "k") for width in (D, Dv))
        q, do = (Operand(self.block_q, width, 2, 128, "k") for width in (D, Dv))
        part_q, part_do = (Operand(ROWS, width, 2, 128, "k") for width in (D, Dv))
        q_steps, do_steps = (Operand(ROWS, width, 2, 128, "mn") for width in (D, Dv))
        ds = k_columns = Operand(self.block_kv, BOX, 2, 128, "mn")
        v_at = k.nbytes
        q_at = v_at + v.nbytes
        do_at = q_at + self.stages * q.nbytes
        ds_at = do_at + self.stages * do.nbytes
        dq_at = ds_at + DS_PLACES * self.parts * ds.nbytes
        bias_at = dq_at + self.dq_places * CONSUMERS * FRAGMENT_BYTES
        end = bias_at + self.stages * self.bias.nbytes if self.bias else bias_at
        parts = part_q, part_do, q_steps, do_steps
        return FusedTiles(k, v, q, do, *parts, ds, k_columns, v_at, q_at, do_at, ds_at, dq_at, bias_at, end)

    def shared_bytes(self, D: int, Dv: int) -> int:
        return self.tiles(D, Dv).nbytes


def fused_configs(
    D: int, Dv: int, options: Sequence[str], bias_in_boxes: bool = False, group: Any = 1, varlen: bool = False
) -> Iterator[tuple[FusedConfig, str]]:
    """Tiles for heads of these widths, in whole boxes, best first. bias_in_boxes: there is a bias that can come so, for
    which heads of 64, in tiles of two parts, have no room. group: heads that share a key head. varlen: lengths are in
    registers.
    """
    narrow, others = D == Dv == BOX, [name for name in options if name not in SERVED]
    with_bias = others == ["bias"] and bias_in_boxes and not narrow
    served = not others or with_bias or (len(others) == 1 and others[0] in ONE_SERVED)
    spills = {"mask_mod": "band" in options, "score_mod": varlen}  # a register or more of wider heads
    if not narrow and len(others) == 1 and spills.get(others[0], False):
        served = False
    if not served or not (narrow or (D == 2 * BOX and Dv <= 2 * BOX)):
        return
    told = ""
    if narrow:
        # both held, the gradient takes 0.89 of the time (S = 8192, H200, 2026-11-26); beside options V would spill.
        # Causal, ascending takes 0.89 and 0.91 (S = 8192 and 2048, H100); but where a block walks the queries of
        # several heads, the longest, which come last then, would keep a few multiprocessors busy for long
        causal = "band" in options
        config = FusedConfig(
            2 * ROWS,
            k_held=True,
            v_held=not others,
            most=bool(others) or not causal,
            ascends=causal and group == 1,
        )
        told = ", K and V in registers" if config.v_held else ", K in registers"
    elif with_bias:
        config, told = FusedConfig(dq_places=1, bias_in_boxes=True), ", the bias in boxes"
    else:
        # by steps it takes 0.94 to 0.98 of the time, full and causal (S = 2048 to 16384, H100, 2026-11-26), but heads
        # of 64 take 1.01 to 1.02
        config = FusedConfig(by_steps=not others)
    yield config, f"{config.block_kv} keys by {config.block_q} queries{told}"
