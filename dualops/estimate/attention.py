"""Attention forward: its Configs on both rungs, and the work of their kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from functools import partial
from itertools import product

from ..cuda.flash_attention import sm80, sm90
from ..cuda.flash_attention.arguments import variant
from ..cuda.flash_attention.options import having
from ..cuda.flash_attention.sm80.config import Sm80Config, configs as sm80_configs
from ..cuda.flash_attention.sm90.config import SLACK, Sm90Config, configs as sm90_configs, padded
from ..cuda.flash_attention.sm90.schedule import is_static
from ..cuda.tile.roles import REGISTERS
from ..spec import Problem
from ..spec.attention.band import band
from ..spec.meta import itemsize
from .architectures import Architecture
from .candidates import Candidate, Kernel, Part, without_idle_stages
from .model import Work, estimate_of
from .steps import FORWARD_EXPOSED, Product, Softmax, resident, warp_step, warpgroup_step

KNOWN_OPTIONS = ("band", "sinks")  # their cost is known: fewer tiles, nothing else
INSTRUCTIONS = 3.5  # of a score: maximum, one multiplication and sum, one sum, half a conversion
BESIDE = 32  # registers of a thread besides scores, probabilities and sums
KEYS = range(48, 129, 16)  # of which a thread has 64 pairs of scores at most, the bits that `dropout_mask` has


def refuse_unknown(p: Problem) -> None:
    """Raises NotImplementedError for what the model does not know."""
    op = p.spec.name
    if p.dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"{op}: no estimates for {p.dtype}, expected bfloat16 or float16")
    if others := [option.name for option, _ in having(p).variants if option.name not in KNOWN_OPTIONS]:
        raise NotImplementedError(f"{op}: no estimates with {', '.join(others)}, expected causal, window and sinks")
    if p.Sq <= sm90.SHORT:
        raise NotImplementedError(f"{op}: no estimates for Sq={p.Sq}, expected more than {sm90.SHORT} queries")


def forward_candidates(p: Problem, gpu: Architecture, rungs: Container[str]) -> Iterator[Candidate]:
    """Every Config that the GPU has room for, of the rungs that do the problem."""
    results, options = p.outputs(), [option.name for option, _ in having(p).variants]
    if "sm90" in rungs:
        own = [config for config, _ in sm90_configs(padded(p.D), padded(p.Dv), options)]
        for kernel in without_idle_stages((_sm90_kernel(config, p, gpu) for config in sm90_grid(p, gpu)), own):
            steps = partial(sm90.forward_steps, p, results, kernel.part.config)
            yield Candidate("sm90", (kernel.part,), kernel.estimate, kernel.shared_bytes, steps)
    for config, _ in sm80_configs(p.D, p.Dv, 2, options, gpu.device.has_wgmma) if "sm80" in rungs else ():
        shared_bytes, estimate = config.shared_bytes(p.D, p.Dv, 2), estimate_of(sm80_work(config, p, gpu), gpu)
        if config.min_blocks * shared_bytes <= gpu.shared_per_block:
            steps = partial(sm80.forward_steps, p, results, config)
            yield Candidate("sm80", (Part("o", config),), estimate, shared_bytes, steps)


def _sm90_kernel(config: Sm90Config, p: Problem, gpu: Architecture) -> Kernel:
    shared_bytes = config.shared_bytes(padded(p.D), p.Dv)
    return Kernel(Part("o", config), estimate_of(sm90_work(config, p, gpu), gpu), shared_bytes)


def sm90_grid(p: Problem, gpu: Architecture) -> Iterator[Sm90Config]:
    """Tiles that shared memory has room for, and registers; the operator's own first."""
    D, Dv, options = padded(p.D), padded(p.Dv), [option.name for option, _ in having(p).variants]
    own = [config for config, _ in sm90_configs(D, Dv, options)]
    yield from own
    slices = own[0].slices
    for consumers, keys, stages, turns in product((2, 3), KEYS, (2, 3), (True, False)):
        config = Sm90Config(consumers, keys, stages, turns, slices=slices)
        if keys / 2 + keys / 4 + config.columns(Dv) / 2 + BESIDE > REGISTERS[consumers][1]:
            continue
        fitting = _with_room(config, D, Dv, gpu.shared_per_block - SLACK)
        if fitting and fitting not in own:
            yield fitting


def _with_room(config: Sm90Config, D: int, Dv: int, room: int) -> Sm90Config | None:
    """Return the Config with two places for Q if there is room, else with one, else with o stored over Q."""
    shape = (config.consumers, config.block_kv, config.stages, config.turns)
    for q_stages, o_over_q in ((2, False), (1, False), (1, True)):
        if o_over_q and config.columns(Dv) > D:
            continue
        found = Sm90Config(*shape, q_stages, o_over_q=o_over_q, slices=config.slices)
        if found.shared_bytes(D, Dv) <= room:
            return found
    return None


def sm90_work(config: Sm90Config, p: Problem, gpu: Architecture) -> Work:
    """Of sm90/forward.py: Q @ K.T from shared memory, P @ V with P in registers."""
    D, Dv, queries, keys = padded(p.D), config.columns(p.Dv), config.block_q, config.block_kv
    products = (Product(queries, keys, D, True), Product(queries, Dv, keys, False))
    softmax = Softmax(queries * keys, INSTRUCTIONS, queries * Dv)
    tile_bytes = 2 * keys * (D + Dv)
    pieces = pieces_of_queries(p, queries, keys)
    return Work(
        warpgroup_step(gpu, p.dtype, products, softmax, tile_bytes),
        softmax.waits(gpu, FORWARD_EXPOSED, config.consumers, config.turns),
        {steps: config.slices * count for steps, count in pieces.items()},
        forward_bytes(p),
        copied_bytes=tile_bytes,
        ahead=config.stages - 1,
        begins_bytes=2 * queries * D if config.q_stages == 1 else 0,
        launches=1 if is_static(config, variant(p)) else 2,  # one sets the counter
    )


def sm80_work(config: Sm80Config, p: Problem, gpu: Architecture) -> Work:
    """Of sm80/forward.py: a warp has 16 queries a strip, and reads every key and value."""
    queries, keys, rows = config.block_q, config.block_kv, 16 * config.strips
    held = config.holds_q(p.D, itemsize(p.dtype))
    products = (
        (Product(queries, keys, p.D, not held), (rows, keys)),
        (Product(queries, p.Dv, keys, False), (rows, p.Dv)),
    )
    softmax = Softmax(queries * keys, INSTRUCTIONS, queries * p.Dv)
    tile_bytes = 2 * keys * (p.D + p.Dv)
    blocks = resident(gpu, config.shared_bytes(p.D, p.Dv, itemsize(p.dtype)), config.min_blocks)
    return Work(
        warp_step(gpu, products, softmax, tile_bytes),
        softmax.waits(gpu, FORWARD_EXPOSED, blocks * config.groups),
        pieces_of_queries(p, queries, keys),
        forward_bytes(p),
        blocks=blocks,
        copied_bytes=tile_bytes,
        begins_bytes=2 * queries * p.D,
    )


def forward_bytes(p: Problem) -> int:
    """Return the bytes that are read and written, each once."""
    return p.spec.forward_cost.bytes_read(p) + p.spec.forward_cost.bytes_written(p)


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
