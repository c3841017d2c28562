"""dbias of attention on Hopper's tensor cores: dS, summed over the axes that the bias is broadcast on.

A block has a tile of the bias, 64 rows for each consumer warpgroup by BLOCK_KV columns. It computes dS of every tile of
scores that the tile was added to, one after another (`bias_tile_scheduler`), so that every sum has one owner and one
order. Then it takes the next tile of the bias.

    producer, two threads                      consumers
    for each tile of the bias, for each tile   for each tile of the bias:
    of scores that it was added to:            3  its words, each thread its own; totals [64, BLOCK_KV] = 0
    1  one loads Q, then dO, if they are       for each tile of scores:
       not those of the previous tile          4  scores [64, BLOCK_KV] = Q @ K.T
    2  one loads K, then V, in the same way    5  dP [64, BLOCK_KV] = dO @ V.T, overlapped with 6
                                               6  scores through the options, the bias among them;
                                                  P = exp2(scores - lse)
                                               7  totals += P * (weight * dP - delta), except masked elements
                                               8  dbias = totals, summed over rows or columns if the bias has one

A tile of scores has two products of all that is loaded for it, and as many exponentials as scores, so the threads'
arithmetic is the limit. Warpgroups take turns to start 4 and 5, so that each one's 6 and 7 overlap the other's
products. If options take the registers that dP would have meanwhile (`DbiasConfig.overlap`), 5 comes after 6, without
turns. lse and delta of the next tile's rows are read while products run. If all scores of a warp count, which products
of two of them show, no score is tested for a mask.

totals are plain sums of float32. Of n terms they are off by at most n * 2**-24 of the terms' sum, and by its root if
roundings go either way: they reach 2**-12, half a last place of dbias in 16 bits, only if that many terms all round to
one side. Parts, for a bias of few tiles, are added with compensation (`dbias_sums`).

Loads: a ring of stages for queries holds Q and dO in turn, another for keys K and V. One kind may stay for the next
tile of scores: K and V for other heads of the group and, if the bias has one row, for other queries; Q and dO for other
keys if it has one column. So one ring is filled for every tile of scores, number i, the other for each change, number
`kept`.

Masked elements do not count, whatever V, K and dO hold there; nor do queries beyond the last.

Shared memory: `DbiasConfig.tiles`, 2 * stages * (BLOCK_Q + BLOCK_KV) * max(D, Dv) bytes, and the bias's tile.
Registers: BLOCK_KV / 2 scores, as many of dP and totals, and about 40.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ....spec import ArrayMeta, Problem
from ....spec.attention import broadcast_strides
from ....spec.meta import Strided, contiguous_strides, itemsize
from ...compiler.backend import Kernel, Members, Noun, builds, cuda, i32, kernel, members, noun, types, u8, u32, verb
from ...launch.arrays import cdiv
from ...launch.device import Device
from ...launch.step import Step
from ...launch.tensor_map import Mapped
from ...launch.views import by_token, strided
from ...tile.boxes import prefetch_maps
from ...tile.roles import roles
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.warpgroup import ROWS, my_warpgroup, warpgroup_mma
from ..arguments import Variant, size_types, sizes, statistic_type, variant
from ..fragment_scores import fragment_scores
from ..options import chain_of, having
from ..score_gradients import rows_of_queries
from ..tiles import Where
from .arguments import MAPS_TYPE, boxed_maps, lines_of, maps_of
from .bias import bias_registers, in_words
from .bias_tile_scheduler import BiasExtent, Broadcast, bias_walk, pieces_of, visits_of_tile
from .config import SLACK, padded, widths
from .dbias_sums import PLACES, THREADS, bias_sums, build_dbias_sum, gradient_of_bias
from .dq_config import DbiasConfig, dbias_configs
from .loads import ring_of_lines
from .schedule import turns


class BiasWork(NamedTuple):
    """How large a problem is, and how its scores are computed."""

    extent: Any  # `BiasExtent`
    scale: Any
    options: Any


class Mine(NamedTuple):
    """What a thread multiplies with."""

    smem: Any
    bars: Any
    warpgroup: Any
    row: Any  # its first
    words: Any  # of the bias
    scores: Any
    d_probs: Any
    totals: Any
    base: Any  # of the exponents of two rows
    delta: Any
    next_lse: Any  # of the next tile's rows
    next_delta: Any


def bias_work_type(variant: Variant) -> Any:
    """Return the type of `BiasWork`."""
    *_, scale, _, options = size_types(variant)
    return types.NamedTuple((types.NamedUniTuple(i32, len(BiasExtent._fields), BiasExtent), scale, options), BiasWork)


@noun
def dbias_loads(config: DbiasConfig, variant: Variant, one: Broadcast) -> Members:
    """The verbs of both rings, in the order of a walk."""
    tiles = config.tiles(*widths(variant))
    ranged = any(option.name == "band" for option, _ in variant.having.variants)
    chain = chain_of(in_words(variant.having), variant.dtype)
    walk = bias_walk(config.block_q, config.block_kv, one, chain, ranged=ranged)
    ring = partial(ring_of_lines, stages=config.stages, warps=4 * config.consumers, walk=walk)
    queries = ring((tiles.q, tiles.do), 0, tiles.query_bytes, of_keys=False, stays=one.column)
    keys = ring((tiles.k, tiles.v), tiles.keys_at, tiles.key_bytes, of_keys=True, stays=not one.column)

    @verb
    def barriers():
        """Return the barriers of queries, and of keys; once in a kernel, by all threads."""
        return queries.barriers(), keys.barriers()

    @verb
    def start(bars, maps):
        """Prefetch the maps, and make the barriers ready; by all threads."""
        if cuda.threadIdx.x == 0:
            queries.init(bars[0])
            keys.init(bars[1])
        prefetch_maps(maps, 1)
        queries.start()

    @verb
    def produce(smem, bars, maps, work, offset):
        """Load all tiles of a block; by the producer warpgroup."""
        if cuda.threadIdx.x % 128 == 0:
            queries.bring(smem, (maps.q, maps.do), bars[0], work.extent, offset, work.options)
        elif cuda.threadIdx.x % 128 == 32:
            keys.bring(smem, (maps.k, maps.v), bars[1], work.extent, offset, work.options)

    return members(locals(), queries=queries, keys=keys, walk=walk, next=queries.next)


@noun
def dbias_tiles(config: DbiasConfig, variant: Variant, load: Noun) -> Members:
    """The verbs of tiles of scores. fillings: of queries, and of keys."""
    tiles, OVERLAP = config.tiles(*widths(variant)), config.overlap
    chain, turn = chain_of(in_words(variant.having), variant.dtype), turns(config.consumers if OVERLAP else 1)
    qk, dov = warpgroup_mma(variant.dtype, tiles.q, tiles.k), warpgroup_mma(variant.dtype, tiles.do, tiles.v)
    own = bias_registers(variant, config.block_kv, 128 * config.consumers)
    score = fragment_scores(chain, config.block_kv, mark_hidden=True, word=own.word)
    wait_scores = qk.wait_but_one if OVERLAP else qk.wait
    gradient, rows, queries, keys = gradient_of_bias(qk.size), rows_of_queries(qk.size), load.queries, load.keys

    @verb
    def mine(smem, bars, words, warpgroup):
        """Return `Mine`; once in a kernel. words: of this noun."""
        scores, d_probs, totals = qk.fragment(), dov.fragment(), qk.fragment()
        base, delta, next_lse, next_delta = rows.pair(), rows.pair(), rows.pair(), rows.pair()
        row = i32(ROWS * warpgroup)
        return Mine(smem, bars, warpgroup, row, words, scores, d_probs, totals, base, delta, next_lse, next_delta)

    @verb
    def read(mine, lse, delta, visit):
        """Start to read lse and delta of a tile's rows."""
        rows.read(mine.next_lse, lse, visit, mine.row)
        rows.read(mine.next_delta, delta, visit, mine.row)

    @verb
    def _start_d_probs(mine, fillings):
        do_at, v_at = queries.second(mine.bars[0], fillings[0]), keys.second(mine.bars[1], fillings[1])
        dov.start(mine.d_probs, mine.smem, do_at, v_at, mine.warpgroup)  # dP = dO @ V.T

    @verb
    def start(mine, fillings):
        """Start the products of a tile, once its rows are read."""
        gradient.bases(mine.base, mine.next_lse)
        mine.delta[0], mine.delta[1] = mine.next_delta[0], mine.next_delta[1]
        q_at, k_at = queries.first(mine.bars[0], fillings[0]), keys.first(mine.bars[1], fillings[1])
        turn.take(mine.warpgroup)
        qk.start(mine.scores, mine.smem, q_at, k_at, mine.warpgroup)  # scores = Q @ K.T
        if OVERLAP:
            _start_d_probs(mine, fillings)
        turn.give(mine.warpgroup)

    @verb
    def add(mine, fillings, last, where, work):
        """Add dS of a tile to totals. last: lines that stayed are read for the last time."""
        wait_scores(mine.scores)
        queries.release_first(mine.bars[0], fillings[0], last)
        keys.release_first(mine.bars[1], fillings[1], last)
        seen = score.sees(score.ask(work.options, where))
        score.finish_held(mine.scores, mine.words, work.options, work.scale, where, seen)
        all_count = gradient.all_count(mine.scores, where, mine.base)
        gradient.probabilities(mine.scores, where, mine.base, all_count)
        if not OVERLAP:
            _start_d_probs(mine, fillings)
        dov.wait(mine.d_probs)
        queries.release_second(mine.bars[0], fillings[0], last)
        keys.release_second(mine.bars[1], fillings[1], last)
        score.weigh(mine.d_probs, work.options, where)
        gradient.add(mine.totals, mine.scores, mine.d_probs, mine.delta, all_count)

    return members(locals(), words=own.words, fill=own.fill, clear=gradient.clear, turn=turn, size=qk.size)


@builds
def build_dbias(config: DbiasConfig, variant: Variant, one: Broadcast, to_dtype: str, vectors: bool) -> Kernel:
    """flash_attention_dbias_sm90(maps, to, lse, delta, work): `Maps`, dbias or its parts, `BiasWork`.

    to_dtype: of `to`. vectors: whether eight neighbours of a row may be stored at once.
    """
    role, load = roles(config.consumers), dbias_loads(config, variant, one)
    tiles = dbias_tiles(config, variant, load)
    sums = bias_sums(to_dtype, tiles.size, config.consumers, one, vectors=vectors)

    @kernel(
        MAPS_TYPE,
        strided(to_dtype, PLACES),
        *[statistic_type(variant)] * 2,
        bias_work_type(variant),
        threads=role.threads,
    )
    def flash_attention_dbias_sm90(maps, to, lse, delta, work):
        smem = cuda.shared.array(0, u8, alignment=1024)
        bars, words, extent = load.barriers(), tiles.words(), work.extent
        offset, warpgroup = i32(extent.aligned * (extent.Sk - extent.Sq)), my_warpgroup()
        load.start(bars, maps)
        if warpgroup == config.consumers:
            role.produce()
            load.produce(smem, bars, maps, work, offset)
        else:
            role.consume()
            mine = tiles.mine(smem, bars, words, warpgroup)
            i, kept = u32(0), u32(0)  # numbers of what passes, and of what stays
            number, numbers = load.walk.first_number(), load.walk.numbers(extent)
            tiles.turn.begin(warpgroup)
            while number < numbers:
                part = load.walk.part(number, extent)
                i, kept = u32(shfl_idx_i32(i32(i), 0, FULL_WARP)), u32(shfl_idx_i32(i32(kept), 0, FULL_WARP))
                tiles.clear(mine.totals)
                visit = load.walk.first(part, extent, offset, work.options)
                if visit.v < part.end:
                    tiles.read(mine, lse, delta, visit)
                    tiles.fill(words, work.options, part, extent)
                while visit.v < part.end:
                    fillings = (kept, i) if one.column else (i, kept)
                    m0 = i32(visit.m0 + mine.row)
                    where = Where(visit.b, visit.h, m0, visit.n0, extent.Sq, extent.Sk, offset)
                    tiles.start(mine, fillings)  # scores = Q @ K.T; dP = dO @ V.T
                    following = load.walk.after(visit, part, extent, offset, work.options)
                    last = following.v == part.end or not load.walk.stays(visit, following)
                    if following.v < part.end:
                        tiles.read(mine, lse, delta, following)
                    tiles.add(mine, fillings, last, where, work)  # totals += dS
                    i = load.next(i)
                    if last:
                        kept = load.next(kept)
                    visit = following
                sums.store(to, mine.totals, part, extent)
                number = load.walk.next_number(number)

    return flash_attention_dbias_sm90


PARTS = "dbias_parts"
NEAR = 8  # neighbours of a row that a thread stores
MOST_VISITS = 2**31 - 1  # numbers of 32 bits


def dbias_choice(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> tuple[DbiasConfig | None, str]:
    """Return the Config of a problem that dq's kernel takes, and a description; None and the reason if simt computes
    dbias.
    """
    p = problem
    if "dbias" not in results or not results["dbias"].size:
        return None, ""
    (D, Dv), options = widths(p), having(p).names
    for config, reason in dbias_configs(D, Dv, device.shared_memory_per_block - SLACK, options):
        if _visits(p, config) > MOST_VISITS:
            break
        return config, f"; dbias: {reason}"
    return None, "; dbias: on simt"


def shape_of(problem: Problem) -> tuple[Any, ...]:
    """Return the bias's sizes along B, H, Sq and Sk."""
    own = problem.arrays["bias"].shape
    return (*(1 for _ in range(4 - len(own))), *own)


def broadcast_of(problem: Problem) -> Broadcast:
    _, _, Sq, Sk = shape_of(problem)
    return Broadcast(Sq == 1, Sk == 1)


def _tiles(problem: Problem, config: DbiasConfig) -> Any:
    """Return how many tiles one batch of the bias has."""
    _, H, Sq, Sk = shape_of(problem)
    return H * cdiv(Sq, config.block_q) * cdiv(Sk, config.block_kv)


def _visits(problem: Problem, config: DbiasConfig) -> Any:
    p = problem
    tiles = cdiv(p.Sq, config.block_q), cdiv(p.Sk, config.block_kv)
    return visits_of_tile(p.B, p.H, *tiles, shape_of(p), broadcast_of(p))


def _pieces(problem: Problem, config: DbiasConfig) -> Any:
    return pieces_of(_tiles(problem, config), _visits(problem, config))


def _in_vectors(to: ArrayMeta, config: DbiasConfig) -> bool:
    """Return whether all neighbours that a thread stores together are aligned to 16 bytes."""
    *outer, step = to.strides
    apart = (to.pointer, *(stride * itemsize(to.dtype) for stride in outer))
    return (
        step == 1 and to.shape[-1] % NEAR == 0 and config.block_kv % (4 * NEAR) == 0 and not any(x % 16 for x in apart)
    )


def dbias_workspace(problem: Problem, config: DbiasConfig | None) -> dict[str, ArrayMeta]:
    """Return the parts of sums in float32, if there are several: of pieces, and of each warp if the bias has
    one row.
    """
    if config is None:
        return {}
    p, one, pieces = problem, broadcast_of(problem), _pieces(problem, config)
    if not one.row and pieces == 1:
        return {}
    shape = (pieces * (4 * config.consumers if one.row else 1), *shape_of(p))
    return {PARTS: ArrayMeta(shape, "float32", contiguous_strides(shape), p.arrays["q"].device, 0)}


def dbias_maps(problem: Problem, config: DbiasConfig | None) -> dict[str, Mapped]:
    """Return the tensor maps of the launch, by names of its own."""
    return boxed_maps(problem, problem.arrays, lines_of(config), "dbias_") if config else {}


def dbias_steps(problem: Problem, results: Mapping[str, ArrayMeta], config: DbiasConfig | None) -> Sequence[Step]:
    """Return the launches, after delta's: sums, or their parts and the sums of these."""
    if config is None:
        return []
    p, one, pieces, shape = problem, broadcast_of(problem), _pieces(problem, config), shape_of(problem)
    metas = {**p.arrays, **results}
    delta = p.arrays["lse"]
    dbias, found = Strided("dbias", (0, *broadcast_strides(results["dbias"]))), dbias_workspace(p, config)
    to, dtype = (Strided(PARTS, found[PARTS].strides), "float32") if found else (dbias, p.dtype)
    statistics = by_token(metas, "lse", False), Strided("delta", contiguous_strides(delta.shape))
    H, group, Sq, Sk, aligned, scale, _, options = sizes(p)
    B_bias, H_bias, Sq_bias, Sk_bias = shape
    extent = BiasExtent(B_bias, H_bias, Sq_bias, Sk_bias, pieces, p.B, H, group, Sq, Sk, aligned)
    args = (maps_of("dbias"), to, *statistics, BiasWork(extent, scale, options))
    blocks, shared_bytes = shape[0] * pieces * _tiles(p, config), config.shared_bytes(padded(p.D), padded(p.Dv))
    vectors = not (one.row or one.column) and _in_vectors(found.get(PARTS, results["dbias"]), config)
    build = build_dbias(config, variant(p), one, dtype, vectors)
    steps = [Step(build, (blocks,), args, shared_bytes, resident=True)]
    if found:
        size, lanes = results["dbias"].size, 32 if one.row or one.column else 1
        args = dbias, to, found[PARTS].shape[0], size, *shape[1:]
        steps.append(Step(build_dbias_sum(p.dtype, lanes), (cdiv(size * lanes, THREADS),), args))
    return steps
