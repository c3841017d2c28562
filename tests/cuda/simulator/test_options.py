"""Options in a tile: ranges at the ends of 32 bits, a user's integers of 64, and dropout's weights, four a call."""

from typing import Any

import numpy as np
import pytest

from dualops.cuda import simulator
from dualops.cuda.compiler.backend import cuda, f32, i32
from dualops.cuda.flash_attention.options import Having, OptionChain, chain_of
from dualops.cuda.flash_attention.tiles import Scores, Where, score_tile
from dualops.cuda.tile.products import LANES, THREADS, mma_abt
from dualops.cuda.tile.shared import Shared
from dualops.spec.attention import BAND, DROPOUT, MASK_MOD, UNBOUNDED, At, Option, OptionVariant, Verbs
from dualops.spec.attention.band import Args as Band
from dualops.spec.attention.dropout import Args as Dropout, Facts
from dualops.spec.attention.function import UserFunction
from dualops.spec.attention.option import MOST_BOUND, Parts
from tests import philox

MOST = 2**31 - 1  # keys or queries that a sequence may have
SIDES = (0, 1, 20, MOST - 1, UNBOUNDED)
SEED, SHARE = -7, 0.3  # of dropout
DROPPED = round(philox.DRAWS * SHARE)
DROPOUT_ARGS = Dropout(SEED, 4, DROPPED * (2**16 + 1), f32(2**15 / (2**15 - DROPPED)))
# rows and columns of scores that a thread has, and whether rows are keys
TILES = pytest.mark.parametrize(
    ("rows", "columns", "transposed"), [(1, 1, False), (1, 1, True), (2, 1, False), (1, 3, True), (1, 2, False)]
)
pytestmark = pytest.mark.filterwarnings("error")  # NumPy's, of what passes 32 bits


def make_prefix(v: Verbs, facts: Any) -> Parts:
    """Causal but for the first keys, which all see: a mask that is a range and no band."""
    integer, larger, where = v.integer, v.larger, v.where

    @v.verb
    def keys(args, i, opposite, Sk):
        return integer(0), larger(integer(args[0]), integer(opposite + 1))

    @v.verb
    def queries(args, j, opposite, Sq):
        return where(j < args[0], integer(0), integer(opposite)), integer(Sq)

    return Parts(keys=keys, queries=queries)


PREFIX = Option("prefix", (), (), lambda problem: True, lambda problem: (0,), make_prefix)


def chain_with(*options: tuple[Any, Any]) -> OptionChain:
    return chain_of(Having(tuple(OptionVariant(*each) for each in options), None), "float32")


@pytest.mark.parametrize("count", [1, 16, MOST])
@pytest.mark.parametrize("before", SIDES)
@pytest.mark.parametrize("after", SIDES)
def test_ranges_do_not_pass_32_bits(before, after, count):
    chain = chain_with((BAND, True))
    for opposite in (-MOST, 1 - MOST, -17, -1, 0, 1, 15, MOST - 1):
        if opposite < count:
            expected = range(max(opposite - before, 0), min(opposite + after + 1, count))
            where = (i32(0), i32(opposite), i32(count))
            for found in (chain.keys((Band(before, after),), *where), chain.queries((Band(after, before),), *where)):
                assert range(*found) == expected


@TILES
@pytest.mark.parametrize("longer", [False, True])
def test_masks_of_the_last_tile(rows, columns, transposed, longer):
    """Of a sequence that is short, or so long that its last tile has the last numbers of 32 bits."""
    left, right = 5, 2
    chain, tiles = chain_with((BAND, True)), tiles_of(rows, columns)
    block_q, block_kv = tiles.sizes[::-1] if transposed else tiles.sizes
    Sq = block_q - 3
    Sk = (MOST // block_kv if longer else 1) * block_kv - 3
    n0 = (Sk - 1) // block_kv * block_kv
    offset = Sk - Sq
    where = Where(0, 0, 0, n0, Sq, Sk, offset)
    score = score_tile(chain, "float32", tiles.product, tiles.tile, transposed=transposed)
    found = scores_of(score, tiles, (Band(left, right),), where)
    i, j = np.arange(block_q)[:, None], n0 + np.arange(block_kv)
    seen = (i < Sq) & (j < Sk) & (j >= i + offset - left) & (j <= i + offset + right)
    assert seen.any() and not seen.all()
    np.testing.assert_array_equal(found.T if transposed else found, np.where(seen, 6, -np.inf))


@TILES
@pytest.mark.parametrize("window", [None, (4, 3)])
@pytest.mark.parametrize("offset", [-6, 0, 40])
def test_an_option_with_ranges_of_its_own(rows, columns, transposed, window, offset):
    """No kernel knows it: its ranges say which tiles are visited, which are full and what counts in the others."""
    tiles, prefix = tiles_of(rows, columns), 19
    chain = chain_with((PREFIX, True), *([(BAND, True)] if window else []))
    options = ((prefix,), *([Band(*window)] if window else []))
    block_q, block_kv = tiles.sizes[::-1] if transposed else tiles.sizes
    Sq, Sk = 2 * block_q + 5, 2 * block_kv + 7
    score = score_tile(chain, "float32", tiles.product, tiles.tile, transposed=transposed)
    i, j = np.arange(-(-Sq // block_q) * block_q)[:, None], np.arange(-(-Sk // block_kv) * block_kv)
    seen = (i < Sq) & (j < Sk) & ((j < prefix) | (j <= i + offset))
    if window:
        seen &= (j >= i + offset - window[0]) & (j <= i + offset + window[1])
    for m0 in range(0, Sq, block_q):
        first, end = chain.key_range(options, m0, min(m0 + block_q, Sq), offset, Sk)
        for n0 in range(0, Sk, block_kv):
            expected = seen[m0 : m0 + block_q, n0 : n0 + block_kv]
            q_first, q_end = chain.query_range(options, n0, min(n0 + block_kv, Sk), offset, Sq)
            visited = (n0 < end and n0 + block_kv > first, m0 < q_end and m0 + block_q > q_first)
            assert all(visited) or not expected.any()
            full = bool(chain.full(options, m0, m0 + block_q, n0, n0 + block_kv, offset, Sq, Sk))
            assert full == expected.all()
            found = scores_of(score, tiles, options, Where(0, 0, m0, n0, Sq, Sk, offset))
            np.testing.assert_array_equal(found.T if transposed else found, np.where(expected, 6, -np.inf))


@TILES
def test_one_call_of_philox_gives_eight_weights(rows, columns, transposed, order):
    """All of the tile's places are written, though their owners have just written others to them."""
    tiles = tiles_of(rows, columns)
    block_q, block_kv = tiles.sizes[::-1] if transposed else tiles.sizes
    m0, n0 = 2 * block_q, 3 * block_kv
    Sq, Sk = m0 + block_q - 5, n0 + block_kv - 3
    asked: list[tuple[int, int]] = []
    right = chain_with((DROPOUT, Facts(False, False)))

    def weights(args, at):
        asked.append((int(at.i), int(at.j)))
        return right.weights(args, at)

    chain = right.but(weights=weights, picks=True)  # so that scores go through the tile
    score = score_tile(chain, "float32", tiles.product, tiles.tile, transposed=transposed)
    args = (DROPOUT_ARGS,)
    found = np.zeros(tiles.sizes)

    def kernel():
        smem = cuda.shared.array(0, f32, alignment=16)
        line, lane = divmod(cuda.threadIdx.x, LANES)
        for e in range(tiles.product.size):
            smem[score.at(e)] = f32(-1)
        score.weights(smem, args, Where(1, 2, m0, n0, Sq, Sk, 0))
        for e in range(tiles.product.size):
            found[line * rows + e // columns, lane + LANES * (e % columns)] = smem[score.at(e)]
            smem[score.at(e)] = f32(-1)

    simulator.launch(kernel, (1,), (THREADS,), (), shared_bytes=tiles.nbytes)
    expected = [[philox.weight(SEED, SHARE, 4 + 2, i, j) for j in range(n0, Sk)] for i in range(m0, Sq)]
    part = (found.T if transposed else found)[: Sq - m0, : Sk - n0]
    np.testing.assert_array_equal(part, np.array(expected, np.float32))
    corners = {(i // 16 * 16 + i % 8, j // 16 * 16 + j % 8 // 2 * 2) for i in range(m0, Sq) for j in range(n0, Sk)}
    assert len(asked) == len(corners) and set(asked) == corners


@pytest.mark.parametrize("share", [SHARE, 31 / 32, 0.99])
def test_the_weight_of_one_is_that_of_the_eight(share):
    dropped = round(philox.DRAWS * share)
    chain = chain_with((DROPOUT, Facts(False, dropped > MOST_BOUND)))
    scale = f32(philox.DRAWS / (philox.DRAWS - dropped))
    args = (Dropout(SEED, 4, dropped * (2**16 + 1), scale),)
    for i, j in np.ndindex(33, 19):
        found = chain.weight(args, At(1, 2, i32(i), i32(j), i32(i), f32(i - j), j & 1))
        assert found == f32(philox.weight(SEED, share, 4 + 2, i, j))


def test_integers_of_a_user_are_not_cut():
    far = UserFunction(lambda b, h, i, j: i * j == 70000 * 70001, ("b", "h", "i", "j"))
    chain = chain_with((MASK_MOD, far))
    for i, seen in ((70000, True), (69999, False)):
        assert bool(chain.pick(((0,),), At(0, 0, i32(i), i32(70001), i32(i), f32(i - 70001), 1))) is seen


class tiles_of:
    """A tile of scores in shared memory, for threads with this number of rows and columns."""

    def __init__(self, rows: int, columns: int):
        self.sizes = LANES * rows, LANES * columns
        shared = Shared("float32", THREADS)
        q, k = (shared.tile(count, 4) for count in self.sizes)
        self.tile = shared.tile(*self.sizes)
        self.product = mma_abt(f32, q, k, rows, columns)
        self.nbytes = shared.nbytes


def scores_of(score: Scores, tiles: tiles_of, options: tuple[Any, ...], where: Where) -> np.ndarray:
    """What becomes of a tile of products that are all 3, with a scale of 2."""
    product, found = tiles.product, np.zeros(tiles.sizes)

    def kernel():
        smem = cuda.shared.array(0, f32, alignment=16)
        scores = product.fragment()
        for e in range(product.size):
            scores[e] = f32(3)
        score.finish(scores, smem, options, f32(2), where)
        line, lane = divmod(cuda.threadIdx.x, LANES)
        for e in range(product.size):
            found[line * product.rows + e // product.columns, lane + LANES * (e % product.columns)] = scores[e]

    simulator.launch(kernel, (1,), (THREADS,), (), shared_bytes=tiles.nbytes)
    return found
