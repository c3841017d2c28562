"""The work of retention's kernels on both rungs. Forward is one pass, the gradient three."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

from ..cuda.launch.arrays import cdiv
from ..cuda.retention.sm80.config import (
    BOX as SM80_BOX,
    ROWS,
    SLICE,
    Shape,
    Sm80Config,
    Sm80Rows,
    Sm80States,
    boxes_of,
    columns_of,
)
from ..cuda.retention.sm80.pairs import NARROW
from ..cuda.retention.sm80.rows import MOST_HELD
from ..cuda.retention.sm90.config import BOX, CONSUMERS, KEY_WIDTH, Config, WideConfig, padded
from ..cuda.tile.split_bf16x3 import PARTS
from ..spec import Problem
from .architectures import Architecture
from .model import Estimate, Units, Work, copying, estimate_of
from .steps import Product, Softmax, resident, warp_step, warpgroup_step

# ordinary instructions, counted in the kernels' loops, of a number each: of a score its decay, whether it is seen, and
# half a conversion; of a key that goes to the state two conversions and its decay, and what its further parts cost; of
# the state its fade, half a conversion and half a store; of a result its decay, half a conversion and half a store
SCORE, KEY, KEY_IN_PARTS, STATE, RESULT = 4.5, 2.75, 6.0, 2.0, 2.0
STEPWISE, STEPWISE_SM80 = 2.0, 12.0  # more of a score that has the decays of its steps; of tables, and of their sums
# times that a step's threads wait, for a product each and then for barriers: of a pass, where only states are made, and
# of wide heads, where two products are waited for at once; of what chunks add on sm80, a state's rows, a tile of scores
NARROW_WAITS, ADDS_WAITS, WIDE_WAITS = 4 + 2, 1, 3 + 1
STATES_WAITS, SLICE_WAITS, PAIRS_WAITS = 1 + 1, 1 + 1, 2 + 1
EXPOSED = 1.0  # of a step's arithmetic what no product hides: each waits for the one before
# of the bandwidth what the walk from chunk to chunk reaches: 126 MB in 85 us of an H100, the 107 us that its page has
# less the 22 by which sm80's forward is faster since the walk counts in 32 bits
WALKED = 0.51
MOST_REGISTERS = 256  # of a thread: blocks with this many run at once, even if `min_blocks` is less


class Pass(NamedTuple):
    """Widths of its q and its v; whether it begins with a state that is given, and leaves one that is a result."""

    D: int
    Dv: int
    begins: bool
    ends: bool


class Chunk(NamedTuple):
    """A step, and how often a kernel has one like it."""

    units: Units
    waits: float
    times: int = 1

    @property
    def clocks(self) -> float:
        return max(self.units) + self.waits


def passes_of(p: Problem, backward: bool) -> list[Pass]:
    """o, or dq, dv and dk."""
    D, Dv, initial = int(p.D), int(p.Dv), "initial_state" in p.arrays
    if not backward:
        return [Pass(D, Dv, initial, bool(p.return_state))]
    given = "dstate" in p.arrays
    return [Pass(Dv, D, initial, False), Pass(D, Dv, given, initial), Pass(Dv, D, given, False)]


def _one_after_another(estimates: Iterable[Estimate]) -> Estimate:
    return reduce(add, estimates)


def _mean(chunks: Sequence[Chunk]) -> Chunk:
    """A step like all of them, on the whole."""
    times = sum(each.times for each in chunks)
    units = (sum(each.units[n] * each.times for each in chunks) / times for n in range(len(Units._fields)))
    return Chunk(Units(*units), sum(each.waits * each.times for each in chunks) / times, times)


# --- Hopper --------------------------------------------------------------------------------------


def sm90_estimate(config: Config, p: Problem, backward: bool, gpu: Architecture) -> Estimate:
    """Passes side by side where a block walks a sequence; else one after another, each behind the launches that find
    the states between segments.
    """
    passes = passes_of(p, backward)
    if config.segments == 1:
        return estimate_of(walk_work(config, passes, p, gpu), gpu)
    found = []
    for each in passes:
        added = config.segments if each.ends else config.segments - 1
        states = 4 * (added + config.segments) * p.B * p.H * each.D * each.Dv  # read and written
        found.append(estimate_of(walk_work(config, [each], p, gpu, looks=False), gpu))
        found += [copying(states / WALKED, gpu), estimate_of(walk_work(config, [each], p, gpu), gpu)]
    return _one_after_another(found)


def walk_work(config: Config, passes: Sequence[Pass], p: Problem, gpu: Architecture, *, looks: bool = True) -> Work:
    """Of sm90/chunks.py and sm90/wide.py, of passes that run side by side. looks: else nothing but states is made."""
    cut, heads, chunks = config.segments > 1, p.B * p.H, cdiv(p.Sk, config.chunk)
    each, memory, steps, chunk_range = cdiv(chunks, config.segments), 0, list[Chunk](), list[list[int]]()
    for one in passes:
        begins, finishes = (looks, not looks) if cut else (one.begins, one.ends)
        segments = config.segments if looks or one.ends else config.segments - 1  # nobody needs what the last one adds
        chunk_range.append([max(0, min(each, chunks - segment * each)) for segment in range(segments)])
        blocks = heads * config.slices(one.D, one.Dv)
        steps.append(_chunk(config, one, p, gpu, looks, finishes and one.ends)._replace(times=blocks))
        numbers = p.Sk * segments // config.segments * (one.D + one.Dv) * (1 + looks)
        memory += heads * (2 * numbers + 4 * (begins + finishes) * segments * one.D * one.Dv)
    mean, pieces = _mean(steps), Counter[int]()
    for step, counts in zip(steps, chunk_range, strict=True):
        for count in counts:  # converted to a number of mean steps
            pieces[count and max(1, round(count * step.clocks / mean.clocks))] += step.times
    widest = max(passes, key=lambda one: one.D)
    tiles, begins = _tile_bytes(config, widest), looks if cut else widest.begins
    state = 4 * widest.D * widest.Dv // config.slices(widest.D, widest.Dv)
    return Work(
        mean.units,
        mean.waits,
        pieces,
        memory,
        copied_bytes=sum(tiles[1:]),
        ahead=(config.stages_of(widest.D) if isinstance(config, WideConfig) else config.stages) - 1,
        begins_bytes=sum(tiles) + begins * state,
        launches=len(passes),
    )


def _tile_bytes(config: Config, one: Pass) -> tuple[int, int, int]:
    """Of a chunk's Q, K and V."""
    if isinstance(config, WideConfig):
        tiles = config.tiles(one.D)
        return tiles.q_tile.nbytes, tiles.q_tile.nbytes, tiles.v_tile.nbytes
    tiles = config.tiles(padded(one.Dv))
    return tiles.q.nbytes, tiles.k.nbytes, tiles.v.nbytes


def _chunk(config: Config, one: Pass, p: Problem, gpu: Architecture, looks: bool, in_parts: bool) -> Chunk:
    """A step: K.T @ V to the state, of which what decays comes from shared memory to registers; and Q @ K.T, Q @ state,
    P @ V. Of wide heads V decays, and each warpgroup has all keys, or half of them, and 64 columns.
    """
    n = config.chunk
    if isinstance(config, WideConfig):
        keys, columns, groups = config.keys(one.D), BOX, CONSUMERS
        to_state, decayed = Product(columns, keys, n, False), n * columns
    else:
        keys, columns, groups = KEY_WIDTH, padded(one.Dv), 1
        to_state, decayed = Product(keys, columns, n, False), n * keys
    q_bytes, *others = _tile_bytes(config, one)
    products = [to_state] * (PARTS if in_parts else 1)
    instructions = decayed * (KEY + in_parts * KEY_IN_PARTS) + keys * columns * STATE
    moved, waited = 2 * decayed, ADDS_WAITS
    if looks:
        products += [Product(n, n, keys, True), Product(n, columns, keys, True), Product(n, columns, n, False)]
        score = SCORE + (STEPWISE if "log_decay" in p.arrays else 0)
        instructions += n * n * score + n * columns * RESULT
        moved += 4 * n * columns + 2 * keys * columns
        waited = WIDE_WAITS if isinstance(config, WideConfig) else NARROW_WAITS
    softmax = Softmax(0, 0.0, round(groups * instructions))
    tiles = sum(others) + q_bytes * looks
    units = warpgroup_step(gpu, p.dtype, products * groups, softmax, groups * moved + tiles)
    return Chunk(units, softmax.waits(gpu, EXPOSED, CONSUMERS, products_waited_for=waited))


# --- before Hopper -------------------------------------------------------------------------------


def sm80_estimate(config: Sm80Config, p: Problem, backward: bool, gpu: Architecture) -> Estimate:
    """Passes one after another: what each chunk adds, the walk from chunk to chunk, the rows."""
    found = []
    for each in passes_of(p, backward):
        chunks = cdiv(p.Sk, config.chunk)
        if chunks > 1 or each.begins or each.ends:
            added = chunks if each.ends else chunks - 1
            if added:
                found.append(estimate_of(states_work(config, each, added, p, gpu), gpu))
            states = 4 * (added + chunks) * p.B * p.H * each.D * each.Dv  # read and written
            found.append(copying(states / WALKED, gpu))
        found.append(estimate_of(rows_work(config, each, p, gpu), gpu))
    return _one_after_another(found)


def states_work(config: Sm80Config, one: Pass, chunks: int, p: Problem, gpu: Architecture) -> Work:
    """Of sm80/states.py: a warp has 16 rows of 64. float16's products are of tf32, at half the speed."""
    own, columns = config.states, columns_of(one.Dv)
    half, exact = p.dtype == "float16", one.ends or min(one.D, one.Dv) <= NARROW
    product = Product(SM80_BOX, columns, own.tokens, False), (ROWS, columns)
    times = (4 if half else PARTS) if exact else 1 + half
    keys, tile_bytes = own.tokens * SM80_BOX, 2 * own.tokens * (SM80_BOX + columns)
    softmax = Softmax(0, 0.0, round(keys * (KEY + exact * KEY_IN_PARTS) + SM80_BOX * columns))
    shared_bytes = own.shared_bytes(columns)
    blocks = _resident(own, shared_bytes, gpu)
    tiles = p.B * p.H * chunks * cdiv(one.D, SM80_BOX) * cdiv(one.Dv, columns)
    return Work(
        warp_step(gpu, [product] * times, softmax, tile_bytes + 2 * keys),
        softmax.waits(gpu, EXPOSED, blocks, products_waited_for=STATES_WAITS),
        {cdiv(min(config.chunk, p.Sk), own.tokens): tiles},
        p.B * p.H * (2 * p.Sk * (one.D + one.Dv) + 4 * chunks * one.D * one.Dv),
        blocks=blocks,
        copied_bytes=tile_bytes,
        begins_bytes=tile_bytes,
    )


def rows_work(config: Sm80Config, one: Pass, p: Problem, gpu: Architecture) -> Work:
    """Of sm80/rows.py: 32 rows of the state a step, then tiles of scores. States and P of float16 are tf32."""
    own, columns, half = config.rows, columns_of(one.Dv), p.dtype == "float16"
    shape = Shape(boxes_of(one.D), columns, 1, False, False)
    rows, keys, width = own.block_q, own.block_kv, SM80_BOX * shape.boxes
    plain = "log_decay" not in p.arrays
    held = plain and shape.boxes <= MOST_HELD
    slices = cdiv(one.D, SLICE) * (2 if min(one.D, one.Dv) <= NARROW else 1)
    shared_bytes = own.shared_bytes(shape)
    blocks = _resident(own, shared_bytes, gpu)

    of_state = Product(rows, columns, SLICE, True), (ROWS, columns)
    fill = Softmax(0, 0.0, SLICE * columns)
    units = warp_step(gpu, [of_state] * (1 + half), fill, 2 * SLICE * columns * (1 + half))
    state = Chunk(units, fill.waits(gpu, EXPOSED, blocks, products_waited_for=SLICE_WAITS))
    products = [(Product(rows, keys, width, not held), (ROWS, keys))]
    products += [(Product(rows, columns, keys, False), (ROWS, columns))] * (1 + half)
    scores, tile_bytes = _weighed(rows * keys, plain), 2 * keys * (width + columns)
    units = warp_step(gpu, products, scores, tile_bytes)
    pairs = Chunk(units, scores.waits(gpu, EXPOSED, blocks, products_waited_for=PAIRS_WAITS))

    pieces, counts, heads = Counter[int](), [0, 0], p.B * p.H * cdiv(one.Dv, columns)
    for first in range(0, p.Sk, rows):
        seen = slices if first >= config.chunk or one.begins else 0
        tiles = cdiv(min(first + rows, p.Sk) - first // config.chunk * config.chunk, keys)
        pieces[seen + tiles] += heads
        counts = [counts[0] + seen, counts[1] + tiles]
    mean = _mean([state._replace(times=counts[0]), pairs._replace(times=counts[1])])
    states = cdiv(p.Sk, config.chunk) * one.D * one.Dv
    return Work(
        mean.units,
        mean.waits,
        pieces,
        p.B * p.H * (4 * p.Sk * (one.D + one.Dv) + 4 * states),
        blocks=blocks,
        copied_bytes=tile_bytes,
        begins_bytes=2 * rows * width,
    )


def _resident(config: Sm80Rows | Sm80States, shared_bytes: int, gpu: Architecture) -> int:
    """Blocks that an SM has at once."""
    by_registers = gpu.registers_per_sm // (MOST_REGISTERS * config.threads)
    return resident(gpu, shared_bytes, max(config.min_blocks, by_registers))


def _weighed(scores: int, plain: bool) -> Softmax:
    """Of decays of steps each pair has an exponential."""
    return Softmax(0, 0.0, round(scores * SCORE)) if plain else Softmax(scores, SCORE + STEPWISE_SM80)
