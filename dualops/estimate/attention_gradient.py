"""Attention gradient: its kernels on both rungs, and the work of each."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from heapq import nsmallest
from itertools import product
from typing import Any

from ..cuda.flash_attention.options import having
from ..cuda.flash_attention.sm80 import backward as sm80
from ..cuda.flash_attention.sm80.config import (
    Sm80DkvConfig,
    Sm80DqConfig,
    dkv_configs as sm80_dkv_configs,
    dq_configs as sm80_dq_configs,
)
from ..cuda.flash_attention.sm90 import backward as sm90
from ..cuda.flash_attention.sm90.backward import dkv_step
from ..cuda.flash_attention.sm90.bias import boxed_bias
from ..cuda.flash_attention.sm90.config import BOX, SLACK, DqConfig, dq_configs, padded
from ..cuda.flash_attention.sm90.dkv_config import (
    CONSUMERS,
    FRAGMENT_BYTES,
    AnyDkvConfig,
    DkvApartConfig,
    DkvConfig,
    FusedConfig,
    dkv_configs,
)
from ..cuda.flash_attention.sm90.fused_launch import fused_choices
from ..cuda.launch.plans import Choice
from ..cuda.launch.step import Step
from ..cuda.tile.roles import MOST_REGISTERS
from ..cuda.tile.warpgroup import ROWS
from ..spec import Problem
from .architectures import Architecture
from .attention import pieces_of_keys, pieces_of_queries
from .candidates import Candidate, Kernel, Part, without_idle_stages
from .model import Estimate, Work, copying, estimate_of
from .steps import DKV_EXPOSED, DQ_EXPOSED, Product, Softmax, resident, warp_step, warpgroup_step

DQ_INSTRUCTIONS, DKV_INSTRUCTIONS = 3.5, 4.0  # of a score: P, its product with dP - delta, and one conversion or two
BESIDE = 40  # registers of a thread besides scores, probabilities and sums
DQ_KEYS, DKV_QUERIES = range(32, 129, 16), range(16, 113, 16)
BEST = 8  # Configs of each of two kernels, of which every pair is one candidate


def gradient_candidates(p: Problem, gpu: Architecture, rungs: Container[str]) -> Iterator[Candidate]:
    """All three gradients in one kernel, where there is one, and pairs of a kernel for dq and one for dk and dv; of the
    rungs that do the problem.
    """
    results = p.outputs(p.spec.gradients)
    delta = copying(p.nbytes("o", "do") + p.nbytes("lse"), gpu)
    if "sm90" in rungs:
        for choice in fused_choices(p, results, gpu.device):
            yield _fused(choice, delta, p, gpu)
        metas = {**p.arrays, **results, **sm90.workspace(p)}
        own = [config for config, _ in (*_dq_configs(p), *_dkv_configs(p))]
        dq = without_idle_stages([_sm90_dq(config, p, gpu) for config in dq_grid(p, gpu)], own)
        dkv = without_idle_stages([_sm90_dkv(config, p, gpu) for config in dkv_grid(p, gpu)], own)
        for one, other in product(_best(dq, own), _best(dkv, own)):
            steps = partial(_sm90_steps, p, metas, one.part.config, other.part.config)
            yield _pair("sm90", delta, one, other, steps)
    if "sm80" not in rungs:
        return
    dq = [_sm80_dq(config, p, gpu) for config, _ in sm80_dq_configs(p.D, p.Dv, _options(p))]
    dkv = [_sm80_dkv(config, p, gpu) for config, _ in sm80_dkv_configs(p.D, p.Dv, _options(p))]
    for one, other in product(dq, dkv):
        if all(each.part.config.min_blocks * each.shared_bytes <= gpu.shared_per_block for each in (one, other)):
            steps = partial(_sm80_steps, p, results, one.part.config, other.part.config)
            yield _pair("sm80", delta, one, other, steps)


def _options(p: Problem) -> list[str]:
    return [option.name for option, _ in having(p).variants]


def _best(kernels: Sequence[Kernel], own: Sequence[Any]) -> list[Kernel]:
    """And the operator's own, wherever they stand."""
    first = nsmallest(BEST, kernels, key=lambda each: each.estimate.seconds)
    return [*first, *(each for each in kernels if each.part.config in own and each not in first)]


def _pair(rung: str, delta: Estimate, dq: Kernel, dkv: Kernel, steps: Callable[[], Sequence[Step]]) -> Candidate:
    shared_bytes = max(dq.shared_bytes, dkv.shared_bytes)
    return Candidate(rung, (dq.part, dkv.part), delta + dq.estimate + dkv.estimate, shared_bytes, steps)


def _sm90_steps(p: Problem, metas: Any, dq: DqConfig, dkv: AnyDkvConfig) -> list[Step]:
    return [*sm90.dq_steps(p, metas, dq), dkv_step(p, metas, dkv)]


def _sm80_steps(p: Problem, results: Any, dq: Sm80DqConfig, dkv: Sm80DkvConfig) -> list[Step]:
    metas = {**p.arrays, **results, **sm90.workspace(p)}
    return [sm80.dq_step(p, metas, dq), sm80.dkv_step(p, metas, dkv)]


def _dq_configs(p: Problem) -> Iterator[tuple[DqConfig, str]]:
    return dq_configs(padded(p.D), padded(p.Dv), _options(p), boxed_bias(p) is not None)


def _dkv_configs(p: Problem) -> Iterator[tuple[AnyDkvConfig, str]]:
    return dkv_configs(padded(p.D), padded(p.Dv), _options(p), boxed_bias(p) is not None)


# --- Hopper --------------------------------------------------------------------------------------


def dq_grid(p: Problem, gpu: Architecture) -> Iterator[DqConfig]:
    """Tiles for dq that there is room for; the operator's own first."""
    D, Dv = padded(p.D), padded(p.Dv)
    own, wide = [config for config, _ in _dq_configs(p)], max(D, Dv) > 128
    yield from own
    for keys, turns in product(DQ_KEYS, (True, False)):
        config = DqConfig(2, keys, turns=turns, dq_over_q=wide, zeroed=wide)
        few = keys + D / 2 + BESIDE <= MOST_REGISTERS[2][1]
        if few and config.shared_bytes(D, Dv) + SLACK <= gpu.shared_per_block and config not in own:
            yield config


def dkv_grid(p: Problem, gpu: Architecture) -> Iterator[AnyDkvConfig]:
    """The same for dk and dv."""
    D, Dv = padded(p.D), padded(p.Dv)
    own = [config for config, _ in _dkv_configs(p)]
    yield from own
    for queries, stages, beside in product(DKV_QUERIES, (2, 3, 4), (True, False)):
        if max(D, Dv) > 128:
            config: AnyDkvConfig = DkvApartConfig(queries, stages, beside=beside)
            registers = queries / (1 if beside else 2) + max(D, Dv) / 2
        else:
            config = DkvConfig(2, queries, stages, beside)
            registers = queries + (D + Dv) / 2 + beside * queries / 4
        room = gpu.shared_per_block - config.slack
        few = registers + BESIDE <= MOST_REGISTERS[2][1]
        if few and config.shared_bytes(D, Dv) <= room and config not in own:
            yield config


def dq_work(config: DqConfig, p: Problem, gpu: Architecture) -> Work:
    """Of sm90/dq.py: S = Q @ K.T and dP = dO @ V.T, and dq += dS @ K with dS in registers."""
    D, Dv, queries, keys = padded(p.D), padded(p.Dv), config.block_q, config.block_kv
    products = (Product(queries, keys, D, True), Product(queries, keys, Dv, True), Product(queries, D, keys, False))
    softmax, tile_bytes = Softmax(queries * keys, DQ_INSTRUCTIONS), 2 * keys * (D + Dv)
    return Work(
        warpgroup_step(gpu, p.dtype, products, softmax, tile_bytes),
        softmax.waits(gpu, DQ_EXPOSED, config.consumers, config.turns),
        pieces_of_queries(p, queries, keys),
        p.nbytes("q", "k", "v", "do", "lse") + p.nbytes("q"),
        copied_bytes=tile_bytes,
        ahead=config.stages - 1,
        begins_bytes=2 * queries * (D + Dv) if config.q_stages == 1 else 0,
        launches=2,  # one sets the counter
    )


def dkv_work(config: AnyDkvConfig, p: Problem, gpu: Architecture) -> Work:
    """Of sm90/dkv.py: S.T and dP.T, and dv += P.T @ dO, dk += dS.T @ Q with P.T and dS.T in registers. Of dkv_split.py,
    where P goes through shared memory, in 16 bits or 32. A tile is released in the next step.
    """
    D, Dv, queries, keys = padded(p.D), padded(p.Dv), config.block_q, config.block_kv
    products = (
        Product(keys, queries, D, True),
        Product(keys, queries, Dv, True),
        Product(keys, Dv, queries, False),
        Product(keys, D, queries, False),
    )
    handed = 0
    if isinstance(config, DkvApartConfig):
        handed = 2 * keys * queries * (4 if config.exact else 2)  # written and read
    softmax, tile_bytes = Softmax(keys * queries, DKV_INSTRUCTIONS), 2 * queries * (D + Dv)
    moved_bytes = tile_bytes + handed + _statistics_bytes(config.block_q)
    return Work(
        warpgroup_step(gpu, p.dtype, products, softmax, moved_bytes),
        _waits(config, softmax, gpu),
        pieces_of_keys(p, keys, queries),
        p.nbytes("q", "k", "v", "do", "lse") + p.nbytes("k", "v"),
        copied_bytes=tile_bytes,
        ahead=config.stages - 2,
        begins_bytes=2 * keys * (D + Dv),
    )


def _waits(config: AnyDkvConfig, softmax: Softmax, gpu: Architecture) -> float:
    """Clocks of a step in which no unit is busy.

    For wide heads, both P and dS are computed during the products of the tile before. The 3 % that `beside` saves for
    narrower heads (the page, section 13) is not counted.
    """
    if isinstance(config, DkvApartConfig) and config.beside:
        return Softmax(0, 0).waits(gpu, DKV_EXPOSED, 2)
    return softmax.waits(gpu, DKV_EXPOSED, 2, products_waited_for=2)


def fused_work(config: FusedConfig, p: Problem, gpu: Architecture) -> Work:
    """Of sm90/fused.py: that of dk and dv, and a fifth product dq = dS @ K, each warpgroup half of it; dS and
    dq go through shared memory, dq from there to memory.
    """
    D, Dv, queries, keys = padded(p.D), padded(p.Dv), config.block_q, config.block_kv
    dq = [Product(ROWS, BOX, keys, True)] * CONSUMERS
    products = (
        Product(keys, queries, D, not config.k_held),
        Product(keys, queries, Dv, not config.v_held),
        Product(keys, Dv, queries, False),
        Product(keys, D, queries, False),
        *dq,
    )
    softmax, tile_bytes = Softmax(keys * queries, DKV_INSTRUCTIONS), 2 * queries * (D + Dv)
    ds_bytes, dq_bytes = 2 * keys * queries, 2 * CONSUMERS * FRAGMENT_BYTES  # written; written and read
    moved_bytes = tile_bytes + ds_bytes + dq_bytes + _statistics_bytes(queries)
    return Work(
        warpgroup_step(gpu, p.dtype, products, softmax, moved_bytes),
        softmax.waits(gpu, DKV_EXPOSED, CONSUMERS, products_waited_for=2),
        pieces_of_keys(p, keys, queries),
        p.nbytes("q", "k", "v", "do", "lse") + p.nbytes("k", "v") + sums_bytes(p),
        copied_bytes=tile_bytes,
        ahead=config.stages - 1,
        begins_bytes=2 * keys * (D + Dv),
        launches=2,  # one clears the flags
    )


def _statistics_bytes(queries: int) -> int:
    """Return the shared-memory bytes of eight warps that read lse and delta of their columns, four at once a lane.

    Lanes of a column read the same address, so each read counts as a turn of 128 bytes.
    """
    return 8 * 128 * 2 * queries // 16


def sums_bytes(p: Problem) -> int:
    """Of dq in float32."""
    return 4 * p.B * p.H * p.Sq * padded(p.D)


def _sm90_dq(config: DqConfig, p: Problem, gpu: Architecture) -> Kernel:
    shared_bytes = config.shared_bytes(padded(p.D), padded(p.Dv))
    return Kernel(Part("dq", config), estimate_of(dq_work(config, p, gpu), gpu), shared_bytes)


def _sm90_dkv(config: AnyDkvConfig, p: Problem, gpu: Architecture) -> Kernel:
    shared_bytes = config.shared_bytes(padded(p.D), padded(p.Dv))
    return Kernel(Part("dk, dv", config), estimate_of(dkv_work(config, p, gpu), gpu), shared_bytes)


def _fused(choice: Choice, delta: Estimate, p: Problem, gpu: Architecture) -> Candidate:
    """With the pass that makes rows of dq's sums."""
    config: FusedConfig = choice.config.fused
    rows = copying(sums_bytes(p) + p.nbytes("q"), gpu)
    estimate = delta + estimate_of(fused_work(config, p, gpu), gpu) + rows
    shared_bytes = config.shared_bytes(padded(p.D), padded(p.Dv))
    return Candidate("sm90", (Part("dq, dk, dv", config),), estimate, shared_bytes, choice.steps)


# --- before Hopper -------------------------------------------------------------------------------


def _sm80_dq(config: Sm80DqConfig, p: Problem, gpu: Architecture) -> Kernel:
    """Of sm80/dq.py: a warp has 16 queries."""
    D, Dv, queries, keys = p.D, p.Dv, config.block_q, config.block_kv
    products = (
        (Product(queries, keys, D, not config.held), (16, keys)),
        (Product(queries, keys, Dv, not config.held), (16, keys)),
        (Product(queries, D, keys, False), (16, D)),
    )
    softmax, tile_bytes = Softmax(queries * keys, DQ_INSTRUCTIONS), 2 * keys * (D + Dv)
    shared_bytes = config.shared_bytes(D, Dv)
    blocks = resident(gpu, shared_bytes, config.min_blocks)
    work = Work(
        warp_step(gpu, products, softmax, tile_bytes),
        softmax.waits(gpu, DQ_EXPOSED, blocks * config.groups),
        pieces_of_queries(p, queries, keys),
        p.nbytes("q", "k", "v", "do", "lse") + p.nbytes("q"),
        blocks=blocks,
        copied_bytes=tile_bytes,
        begins_bytes=2 * queries * (D + Dv),
    )
    return Kernel(Part("dq", config), estimate_of(work, gpu), shared_bytes)


def _sm80_dkv(config: Sm80DkvConfig, p: Problem, gpu: Architecture) -> Kernel:
    """Of sm80/dkv.py: a warp has 16 keys."""
    D, Dv, queries, keys = p.D, p.Dv, config.block_q, config.block_kv
    products = (
        (Product(keys, queries, D, not config.k_held), (16, queries)),
        (Product(keys, queries, Dv, not config.v_held), (16, queries)),
        (Product(keys, Dv, queries, False), (16, Dv)),
        (Product(keys, D, queries, False), (16, D)),
    )
    softmax, tile_bytes = Softmax(keys * queries, DKV_INSTRUCTIONS), 2 * queries * (D + Dv)
    shared_bytes = config.shared_bytes(D, Dv) + config.statistics_bytes
    blocks = resident(gpu, shared_bytes, config.min_blocks)
    work = Work(
        warp_step(gpu, products, softmax, tile_bytes),
        softmax.waits(gpu, DKV_EXPOSED, blocks * config.groups, products_waited_for=2),
        pieces_of_keys(p, keys, queries),
        p.nbytes("q", "k", "v", "do", "lse") + p.nbytes("k", "v"),
        blocks=blocks,
        copied_bytes=tile_bytes,
        ahead=config.stages - 1,
        begins_bytes=2 * keys * (D + Dv),
    )
    return Kernel(Part("dk, dv", config), estimate_of(work, gpu), shared_bytes)
