"""Attention: the work of its kernels, forward and gradient, on both rungs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..cuda.flash_attention.sm80.config import MOST_HELD, Sm80Config, Sm80DkvConfig, Sm80DqConfig
from ..cuda.flash_attention.sm90.config import BOX, Sm90Config, padded
from ..cuda.flash_attention.sm90.dkv_config import CONSUMERS, FRAGMENT_BYTES, AnyDkvConfig, DkvApartConfig, FusedConfig
from ..cuda.flash_attention.sm90.dq_config import DqConfig
from ..cuda.tile.warpgroup import ROWS
from ..spec import Problem
from ..spec.attention.band import band
from .architectures import Architecture
from .model import Product, Work, units, waits

INSTRUCTIONS = 3.5  # per score: maximum, multiply-add, sum, half a conversion; in the gradient as many
FORWARD_EXPOSED = 0.47  # fitted: the share of forward's arithmetic that no product hides without turns; else all
SM80 = (Sm80Config, Sm80DqConfig, Sm80DkvConfig)


def _work(
    config: Any,
    gpu: Architecture,
    products: Sequence[Product],
    pieces: Mapping[int, int],
    memory_bytes: int,
    copied: int,
    *,
    exposed: float = 1.0,
    times: int = 1,
    handed: int = 0,
    late: int = 0,
) -> Work:
    """Return the work of a kernel whose first product is the scores.

    handed: bytes that threads exchange per step; late: steps that a stage remains in use after its own; exposed, times:
    as in `waits`.
    """
    scores, blocks = products[0].rows * products[0].columns, 1
    warp, groups = None, getattr(config, "consumers", CONSUMERS)
    if isinstance(config, SM80):
        blocks, warp = getattr(config, "min_blocks", 1), (16, 0)
        groups = blocks * config.groups
    step = units(gpu, products, scores, INSTRUCTIONS * scores, copied + handed, warp)
    wait = waits(step, exposed, groups, getattr(config, "turns", False), times)
    return Work(step, wait, pieces, memory_bytes, blocks, copied, getattr(config, "stages", 2) - 1 - late)


def _widths(config: Any, p: Problem) -> tuple[int, int]:
    return (p.D, p.Dv) if isinstance(config, SM80) else (padded(p.D), padded(p.Dv))


def forward_work(config: Sm90Config | Sm80Config, p: Problem, gpu: Architecture) -> Work:
    """Return the work of Q @ K.T, and P @ V with P in registers."""
    (D, Dv), queries, keys, slices = _widths(config, p), config.block_q, config.block_kv, 1
    if isinstance(config, Sm90Config):
        Dv, slices = config.columns(Dv), config.slices
    held = isinstance(config, Sm80Config) and D <= MOST_HELD
    products = Product(queries, keys, D, not held), Product(queries, Dv, keys, False)
    pieces = {steps: slices * count for steps, count in pieces_of_queries(p, queries, keys).items()}
    memory_bytes = p.spec.forward_cost.bytes_read(p) + p.spec.forward_cost.bytes_written(p)
    return _work(config, gpu, products, pieces, memory_bytes, 2 * keys * (D + Dv), exposed=FORWARD_EXPOSED)


def dq_work(config: DqConfig | Sm80DqConfig, p: Problem, gpu: Architecture) -> Work:
    """Return the work of S = Q @ K.T and dP = dO @ V.T, and dq += dS @ K with dS in registers."""
    (D, Dv), queries, keys = _widths(config, p), config.block_q, config.block_kv
    left = not getattr(config, "held", False)
    products = Product(queries, keys, D, left), Product(queries, keys, Dv, left), Product(queries, D, keys, False)
    memory_bytes = p.nbytes("q", "k", "v", "do", "lse", "q")
    return _work(config, gpu, products, pieces_of_queries(p, queries, keys), memory_bytes, 2 * keys * (D + Dv))


def dkv_work(config: AnyDkvConfig | FusedConfig | Sm80DkvConfig, p: Problem, gpu: Architecture) -> Work:
    """Return the work of S.T and dP.T, and dv += P.T @ dO, dk += dS.T @ Q with P.T and dS.T in registers; in a kernel
    that computes dq too, also dq's product and the additions of its sums to memory.
    """
    (D, Dv), queries, keys = _widths(config, p), config.block_q, config.block_kv
    products = [
        Product(keys, queries, D, not getattr(config, "k_held", False)),
        Product(keys, queries, Dv, not getattr(config, "v_held", False)),
        Product(keys, Dv, queries, False),
        Product(keys, D, queries, False),
    ]
    pieces, memory_bytes = pieces_of_keys(p, keys, queries), p.nbytes("q", "k", "v", "do", "lse", "k", "v")
    work = partial(_work, config, gpu, copied=2 * queries * (D + Dv))
    if isinstance(config, FusedConfig):
        dq = [Product(ROWS, BOX, keys, True)] * CONSUMERS
        handed = 2 * keys * queries + 2 * CONSUMERS * FRAGMENT_BYTES
        return work([*products, *dq], pieces, memory_bytes + sums_bytes(p), times=2, handed=handed)
    if isinstance(config, DkvApartConfig) and config.overlap:  # with the products of the previous tile
        return work(products, pieces, memory_bytes, exposed=0, late=1)
    return work(products, pieces, memory_bytes, times=2, late=not isinstance(config, SM80))


def sums_bytes(p: Problem) -> int:
    """Return the bytes of dq in float32."""
    return 4 * p.B * p.H * p.Sq * padded(p.D)


def pieces_of_queries(p: Problem, block_q: int, block_kv: int) -> Counter[int]:
    """Count the tiles of queries of all heads by the number of key tiles that they see."""
    below, above = _band(p)
    return _pieces(p.Sq, p.Sk, block_q, block_kv, -below, above, p.B * p.H)


def pieces_of_keys(p: Problem, block_kv: int, block_q: int) -> Counter[int]:
    """Count the key tiles of all key heads by the number of query tiles that see them, over all heads of the group."""
    below, above = _band(p)
    seen = _pieces(p.Sk, p.Sq, block_kv, block_q, -above, below, p.B * p.H // p.group)
    return Counter({steps * p.group: count for steps, count in seen.items()})


def _band(p: Problem) -> tuple[int, int]:
    """Return how many keys before its own index a query sees, and how many after it."""
    left, right = band(p)
    offset = 0 if p.causal == "top_left" else p.Sk - p.Sq
    return left - offset, right + offset


def _pieces(rows: int, columns: int, block_rows: int, block_columns: int, least: int, most: int, heads: int) -> Counter:
    """Count the tiles of rows by the tiles of columns that they see; row i sees columns i + least to i + most."""
    found: Counter[int] = Counter()
    for first in range(0, rows, block_rows):
        last = min(rows, first + block_rows) - 1
        begin, end = max(0, first + least), min(columns, last + most + 1)
        found[-(-end // block_columns) - begin // block_columns if end > begin else 0] += heads
    return found
