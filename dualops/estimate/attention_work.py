"""Attention: the work of its kernels, forward and gradient, on both rungs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..cuda.flash_attention.sm80.config import Sm80Config
from ..cuda.flash_attention.sm80.dkv_config import Sm80DkvConfig
from ..cuda.flash_attention.sm80.dq_config import Sm80DqConfig
from ..cuda.flash_attention.sm90.config import BOX, Sm90Config, padded
from ..cuda.flash_attention.sm90.dkv_config import AnyDkvConfig, DkvApartConfig
from ..cuda.flash_attention.sm90.dq_config import DqConfig
from ..cuda.flash_attention.sm90.fused_config import CONSUMERS, FRAGMENT_BYTES, FusedConfig
from ..cuda.tile.warpgroup import ROWS
from ..spec import Problem
from ..spec.attention.band import band
from .architectures import Architecture
from .model import Product, Units, Work, units, waits

# of a score: maximum, multiplication and sum, sum, half a conversion; P, its product with dP - delta, a conversion or two
INSTRUCTIONS, DKV_INSTRUCTIONS = 3.5, 4.0
# of a step's exponentials and arithmetic what no product hides, where there are no turns: fitted; but dk and dv wait
# twice in a step, so that they hide nothing
FORWARD_EXPOSED, DQ_EXPOSED, DKV_EXPOSED = 0.47, 0.85, 1.0
SM80 = (Sm80Config, Sm80DqConfig, Sm80DkvConfig)


def _step(
    config: Any, gpu: Architecture, products: Sequence[Product], scores: int, instructions: float, moved_bytes: float
) -> tuple[Units, int, int]:
    """Return the clocks of a step, the groups of threads that have steps of their own, and an SM's blocks."""
    if not isinstance(config, SM80):
        return units(gpu, products, scores, instructions, moved_bytes), getattr(config, "consumers", CONSUMERS), 1
    warp, blocks = (16 * getattr(config, "strips", 1), 0), config.min_blocks
    return units(gpu, products, scores, instructions, moved_bytes, warp), blocks * config.groups, blocks


def _widths(config: Any, p: Problem) -> tuple[int, int]:
    return (p.D, p.Dv) if isinstance(config, SM80) else (padded(p.D), padded(p.Dv))


def forward_work(config: Sm90Config | Sm80Config, p: Problem, gpu: Architecture) -> Work:
    """Q @ K.T, and P @ V with P in registers."""
    D, Dv = _widths(config, p)
    slices, columns = (config.slices, config.columns(Dv)) if isinstance(config, Sm90Config) else (1, Dv)
    queries, keys = config.block_q, config.block_kv
    left = isinstance(config, Sm90Config) or not config.holds_q(D, 2)
    products = Product(queries, keys, D, left), Product(queries, columns, keys, False)
    copied, scores = 2 * keys * (D + columns), queries * keys
    step, groups, blocks = _step(config, gpu, products, scores, INSTRUCTIONS * scores + queries * columns, copied)
    return Work(
        step,
        waits(step, FORWARD_EXPOSED, groups, getattr(config, "turns", False)),
        {steps: slices * count for steps, count in pieces_of_queries(p, queries, keys).items()},
        p.spec.forward_cost.bytes_read(p) + p.spec.forward_cost.bytes_written(p),
        blocks,
        copied,
        getattr(config, "stages", 2) - 1,
    )


def dq_work(config: DqConfig | Sm80DqConfig, p: Problem, gpu: Architecture) -> Work:
    """S = Q @ K.T and dP = dO @ V.T, and dq += dS @ K with dS in registers."""
    (D, Dv), queries, keys = _widths(config, p), config.block_q, config.block_kv
    left = isinstance(config, DqConfig) or not config.held
    products = Product(queries, keys, D, left), Product(queries, keys, Dv, left), Product(queries, D, keys, False)
    copied, scores = 2 * keys * (D + Dv), queries * keys
    step, groups, blocks = _step(config, gpu, products, scores, INSTRUCTIONS * scores, copied)
    return Work(
        step,
        waits(step, DQ_EXPOSED, groups, getattr(config, "turns", False)),
        pieces_of_queries(p, queries, keys),
        p.nbytes("q", "k", "v", "do", "lse", "q"),
        blocks,
        copied,
    )


def dkv_work(config: AnyDkvConfig | FusedConfig | Sm80DkvConfig, p: Problem, gpu: Architecture) -> Work:
    """S.T and dP.T, and dv += P.T @ dO, dk += dS.T @ Q with P.T and dS.T in registers; where dq is made too, its
    product, and its sums on their way to memory.
    """
    (D, Dv), queries, keys = _widths(config, p), config.block_q, config.block_kv
    products = [
        Product(keys, queries, D, not getattr(config, "k_held", False)),
        Product(keys, queries, Dv, not getattr(config, "v_held", False)),
        Product(keys, Dv, queries, False),
        Product(keys, D, queries, False),
    ]
    copied, scores = 2 * queries * (D + Dv), keys * queries
    handed, memory_bytes, ahead = 0, p.nbytes("q", "k", "v", "do", "lse", "k", "v"), config.stages - 1
    if isinstance(config, FusedConfig):
        products += [Product(ROWS, BOX, keys, True)] * CONSUMERS
        handed, memory_bytes = 2 * scores + 2 * CONSUMERS * FRAGMENT_BYTES, memory_bytes + sums_bytes(p)
    elif not isinstance(config, SM80):
        ahead -= 1  # a tile is released in the next step
    if isinstance(config, DkvApartConfig):
        handed = 2 * scores * (4 if config.exact else 2)  # P, written and read
    step, groups, blocks = _step(config, gpu, products, scores, DKV_INSTRUCTIONS * scores, copied + handed)
    hidden = isinstance(config, DkvApartConfig) and config.beside  # during the products of the tile before
    wait = waits(step, 0, groups) if hidden else waits(step, DKV_EXPOSED, groups, times=2)
    return Work(step, wait, pieces_of_keys(p, keys, queries), memory_bytes, blocks, copied, ahead)


def sums_bytes(p: Problem) -> int:
    """Return the bytes of dq in float32."""
    return 4 * p.B * p.H * p.Sq * padded(p.D)


def pieces_of_queries(p: Problem, block_q: int, block_kv: int) -> Counter[int]:
    """Count the tiles of queries of all heads by the number of key tiles that they see."""
    left, right = band(p)
    offset = 0 if p.causal == "top_left" else p.Sk - p.Sq
    return _pieces(p.Sq, p.Sk, block_q, block_kv, (offset - left, offset + right), p.B * p.H)


def pieces_of_keys(p: Problem, block_kv: int, block_q: int) -> Counter[int]:
    """Count the key tiles of all key heads by the number of query tiles that see them, over all heads of the group."""
    left, right = band(p)
    offset = 0 if p.causal == "top_left" else p.Sk - p.Sq
    seen = _pieces(p.Sk, p.Sq, block_kv, block_q, (-offset - right, left - offset), p.B * p.H // p.group)
    return Counter({steps * p.group: count for steps, count in seen.items()})


def _pieces(rows: int, columns: int, block_rows: int, block_columns: int, sees: tuple[int, int], heads: int) -> Counter:
    """Row i sees columns i + sees[0] to i + sees[1]."""
    found: Counter[int] = Counter()
    for first in range(0, rows, block_rows):
        last = min(rows, first + block_rows) - 1
        begin, end = max(0, first + sees[0]), min(columns, last + sees[1] + 1)
        found[-(-end // block_columns) - begin // block_columns if end > begin else 0] += heads
    return found
