"""Retention: its Configs on both rungs, and the work of their kernels. Forward is one pass, the gradient three."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add

from ..cuda.launch.arrays import cdiv
from ..cuda.launch.plans import Choice
from ..cuda.retention import sm80, sm90
from ..cuda.retention.sm80.config import BOX as SM80_BOX, ROWS, SLICE, Shape, Sm80Config, columns_of
from ..cuda.retention.sm80.rows import MOST_HELD
from ..cuda.retention.sm90.config import BOX, CONSUMERS, KEY_WIDTH, Config, WideConfig, padded
from ..spec import Problem
from .architectures import Architecture
from .candidates import Candidate, Part
from .model import Estimate, Product, Work, copying, estimate_of, units, waits

# ordinary instructions per number, counted in the kernels' loops. Per score: its decay, the test whether it is seen,
# half a conversion. Per number of a key for the state: two conversions and its decay. Per number of the state: its
# decay, half a conversion and half a store. Per number of a result: its decay, half a conversion and half a store
SCORE, KEY, STATE, RESULT = 4.5, 2.75, 2.0, 2.0
# how often threads wait, for one product each (two at the same time if heads are wide) and then for barriers: per chunk
# of sm90; per tile of scores, and per slice of a state, of sm80
CHUNK_WAITS, WIDE_WAITS, TILE_WAITS, SLICE_WAITS = 4 + 2, 3 + 1, 2 + 1, 1 + 1
EXPOSED = 1.0  # share of a step's arithmetic that no product hides: each product waits for the previous one
THREADS = 256  # per SM, each with the most registers that a thread can have
FOUND = 0.51  # share of the bandwidth while states between chunks are computed: 126 MB in 85 us on an H100


def refuse_unknown(p: Problem, backward: bool) -> None:
    """Raise NotImplementedError for a problem whose cost the model does not know."""
    for unknown, problem in (
        (not (p.B and p.H and p.Sk), "of an empty problem"),
        (p.form != "chunk", f"for form={p.form!r}, expected 'chunk'"),
        (p.Sk <= sm80.FEW, f"for S={p.Sk}, expected more than {sm80.FEW} tokens"),
        (p.normalize is not None, f"with normalize={p.normalize!r}, expected None"),
        (backward and "log_decay" in p.arrays, "of the gradient with log_decay"),
    ):
        if unknown:
            raise NotImplementedError(f"{p.spec.name}: no estimates {problem}")


def candidates(p: Problem, backward: bool, gpu: Architecture, choices: Sequence[Choice]) -> Iterator[Candidate]:
    """Yield the operator's own Configs, then those with other numbers of segments on Hopper."""
    makes = ", ".join(f"d{name}" for name in "qvk") if backward else "o"
    for choice in choices:
        config, parts = choice.config, (Part(makes, choice.config),)
        if isinstance(config, Sm80Config):
            parts = Part(makes, config.rows), Part(f"states between {config.chunk} tokens", config.states)
        yield Candidate(choice.rung, parts, retention_estimate(config, p, backward, gpu), choice.steps)
    results, roles = (p.outputs(p.spec.gradients), sm90.BACKWARD) if backward else (p.outputs(), sm90.FORWARD)
    for own in [choice.config for choice in choices if choice.rung == "sm90"]:
        for config in segments_grid(own, p, backward, gpu):
            steps = partial(sm90.steps_of, p, results, config, roles)
            yield Candidate("sm90", (Part(makes, config),), retention_estimate(config, p, backward, gpu), steps)


def segments_grid(own: Config, p: Problem, backward: bool, gpu: Architecture) -> Iterator[Config]:
    """Yield Configs with segments of two chunks or more, as long as fewer segments would leave SMs without a block."""
    blocks = min(p.B * p.H * own.slices(D, Dv) for D, Dv in passes_of(p, backward))
    for segments in (1 << power for power in range(16)):
        fits = segments * sm90.LEAST_CHUNKS * own.chunk <= p.Sk and blocks * segments < 2 * gpu.device.sms
        if segments != own.segments and (segments == 1 or fits):
            yield replace(own, segments=segments)


def passes_of(p: Problem, backward: bool) -> list[tuple[int, int]]:
    """Return the widths of q and v in each pass: the pass for o, or the passes for dq, dv and dk."""
    D, Dv = int(p.D), int(p.Dv)
    return [(Dv, D), (D, Dv), (Dv, D)] if backward else [(D, Dv)]


def retention_estimate(config: Config | Sm80Config, p: Problem, backward: bool, gpu: Architecture) -> Estimate:
    """Estimate all passes: in parallel if a block of sm90 computes a whole sequence, else one after another.

    In the latter case each pass follows two launches that compute the states between chunks or segments: they read K
    and V, write states, then read and write them again.
    """
    passes, found = passes_of(p, backward), list[Estimate]()
    if not isinstance(config, Sm80Config) and config.segments == 1:
        return estimate_of(walk_work(config, *passes[0], len(passes), p, gpu), gpu)
    parts = cdiv(p.Sk, config.chunk) if isinstance(config, Sm80Config) else config.segments
    for D, Dv in passes:
        if parts > 1:
            found.append(copying(p.B * p.H * (2 * p.Sk * (D + Dv) + 12 * parts * D * Dv / FOUND), gpu, 2))
        own = (
            rows_work(config, D, Dv, p, gpu) if isinstance(config, Sm80Config) else walk_work(config, D, Dv, 1, p, gpu)
        )
        found.append(estimate_of(own, gpu))
    return reduce(add, found)


def walk_work(config: Config, D: int, Dv: int, passes: int, p: Problem, gpu: Architecture) -> Work:
    """Return the work of sm90, for parallel passes that are assumed to be alike. A step is a chunk: K.T @ V is added to
    the state, then Q @ K.T, Q @ state and P @ V. If heads are wide, each warpgroup has 64 columns.
    """
    n, wide = config.chunk, config if isinstance(config, WideConfig) else None
    keys, columns, groups = (wide.tiles(D).keys, BOX, CONSUMERS) if wide else (KEY_WIDTH, padded(Dv), 1)
    products = [Product(n, n, keys, True), Product(n, columns, keys, True), Product(n, columns, n, False)]
    products += [Product(keys, columns, n, False)] * config.parts
    decayed, tiles = n * (columns if wide else keys), 2 * n * (2 * keys + groups * columns)
    numbers = n * n * SCORE + decayed * KEY * config.parts + keys * columns * STATE + n * columns * RESULT
    moved = groups * 2 * (decayed + 2 * n * columns + keys * columns) + tiles
    step, segments = units(gpu, products * groups, 0, groups * numbers, moved), config.segments
    return Work(
        step,
        waits(step, EXPOSED, CONSUMERS, times=WIDE_WAITS if wide else CHUNK_WAITS),
        {cdiv(cdiv(p.Sk, n), segments): p.B * p.H * config.slices(D, Dv) * segments * passes},
        passes * p.B * p.H * 4 * (p.Sk * (D + Dv) + (segments > 1) * segments * D * Dv),
        copied_bytes=tiles,
        ahead=(wide.tiles(D).stages if wide else config.stages) - 1,
        launches=passes,
    )


def rows_work(config: Sm80Config, D: int, Dv: int, p: Problem, gpu: Architecture) -> Work:
    """Return the work of sm80/rows.py: a step is a block's rows, with the state and half of the tokens of a chunk.
    Nothing overlaps with its first copy. For float16, states and P are tf32.
    """
    own, columns, half, n = config.rows, columns_of(Dv), p.dtype == "float16", min(config.chunk, p.Sk)
    rows, tokens, width = own.block_q, cdiv(n + own.block_q, 2), SM80_BOX * cdiv(D, SM80_BOX)
    products = [Product(rows, tokens, width, width > SM80_BOX * MOST_HELD)]
    products += [Product(rows, columns, tokens, False), Product(rows, columns, width, True)] * (1 + half)
    moved = 2 * tokens * (width + columns) + 4 * width * columns
    step = units(gpu, products, 0, rows * tokens * SCORE + width * columns, moved, (ROWS, 0))
    shared_bytes = own.shared_bytes(Shape(width // SM80_BOX, columns, 1, False, False))
    blocks = max(1, min(THREADS // own.threads, gpu.device.shared_memory_per_block // shared_bytes))
    return Work(
        step,
        waits(step, EXPOSED, blocks, times=TILE_WAITS * tokens / own.block_kv + SLICE_WAITS * width / SLICE),
        {1: p.B * p.H * cdiv(p.Sk, rows) * cdiv(Dv, columns)},
        p.B * p.H * 4 * (p.Sk * (D + Dv) + cdiv(p.Sk, n) * D * Dv),
        blocks,
        2 * (rows * width + own.block_kv * (width + columns)),
        ahead=0,
    )
