"""Tiles of shared memory, how they are filled, and products of them: integers, so that results are exact."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from dualops.cuda import simulator
from dualops.cuda.compiler.backend import Namespace, cuda, f32, f64
from dualops.cuda.launch.step import flat
from dualops.cuda.tile.products import mma_ab, mma_abt, mma_atb
from dualops.cuda.tile.shared import PAD, Lines, Part, Shared
from dualops.cuda.tile.unrolled import nothing, unrolled
from dualops.cuda.tile.vector_load import vector_tile

LANES = 4
THREADS = LANES * LANES
DTYPES = {"float32": (f32, np.float32), "float64": (f64, np.float64)}


def run(function, shared, *arrays):
    arguments = [flat(array, f"array {i}") for i, array in enumerate(arrays)]
    simulator.launch(function, (1,), (THREADS,), arguments, shared_bytes=shared.nbytes)


@pytest.mark.parametrize("pad", [PAD, 0])
def test_places_of_a_tile(pad):
    shared = Shared("float32", THREADS)
    shared.vector(5)  # what comes behind it is aligned nevertheless
    tile = shared.tile(3, 6, stages=2, pad=pad)
    assert (tile.at, tile.width, tile.filled, tile.row, tile.size) == (8, 6, 8, 8 + pad, 3 * (8 + pad))
    assert [tile.place(r, c) for r in range(3) for c in (0, 5)] == [
        8 + r * (8 + pad) + c for r in range(3) for c in (0, 5)
    ]
    assert shared.nbytes == 4 * (8 + 2 * tile.size)


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 4), ("float32", 4), ("float64", 8)])
def test_nothing_overlaps(dtype, itemsize):
    rng = np.random.default_rng(0)
    shared, owners = Shared(dtype, THREADS), Counter()
    for _ in range(20):
        rows, width, stages = rng.integers(1, 9, 3).tolist()
        tile = shared.tile(rows, width, int(rng.choice([1, 4, 64])), stages=stages)
        places = [tile.place(r, c) + s * tile.size for s in range(stages) for r in range(rows) for c in range(width)]
        owners.update(places)
        first = shared.vector(width)
        owners.update(range(first, first + width))
        assert not tile.at % 4 and not first % 4 and not tile.row % 4
    assert max(owners.values()) == 1 and max(owners) * itemsize < shared.nbytes


def test_tiles_that_take_turns():
    shared = Shared("float32", THREADS)
    first = shared.tile(4, 4)
    long = shared.tile(2, 4)
    short = shared.tile(1, 4, over=long)
    longest = shared.tile(3, 4, over=short)
    assert long.at == short.at == longest.at == first.size
    assert shared.tile(1, 4).at == first.size + longest.size


def test_a_tile_over_one_that_is_not_the_latest():
    shared = Shared("float32", THREADS)
    first = shared.tile(4, 4)
    shared.vector(3)
    with pytest.raises(ValueError, match="a tile at 0 is not the latest, which is at 32"):
        shared.tile(4, 4, over=first)


def filled(shared, load, x, *rest):
    """Shared memory after `load` of what `rest` says of x, and what the threads returned."""
    image, returned = np.zeros(shared.count), np.zeros(THREADS)
    record = Part if len(rest) == 5 else Lines

    def fills(image, returned, x):
        smem = cuda.shared.array(0, f32, alignment=16)
        if cuda.threadIdx.x == 0:
            for i in range(shared.count):
                smem[i] = f32(2)  # the weights; and what nobody loads stays
        cuda.syncthreads()
        returned[cuda.threadIdx.x] = load(smem, record(x, *rest))
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            for i in range(shared.count):
                image[i] = smem[i]

    run(fills, shared, image, returned, x)
    return image, returned


def rows_of(image, tile):
    return image[tile.at : tile.at + tile.size].reshape(tile.rows, tile.row)


def test_load_fills_rows_with_zeros(order):
    shared = Shared("float32", THREADS)
    tile = shared.tile(5, 6, 8)
    x = np.arange(40, dtype=np.float32).reshape(4, 10)
    image, returned = filled(shared, tile.load, x, 1, 10, 3)
    got = rows_of(image, tile)
    assert got[:3, :6].tolist() == x[:3, 1:7].tolist()
    assert not got[3:, :8].any() and not got[:, 6:8].any() and (got[:, 8:] == 2).all()
    assert not returned.any()
    x[1, 3] = np.nan
    assert filled(shared, tile.load, x, 1, 10, 3)[1].sum() == 1
    assert not filled(shared, tile.load, x, 1, 10, 1)[1].any()  # a line beyond the end


@pytest.mark.parametrize("aligned", [False, True])
def test_load_by_vectors(aligned, order):
    shared = Shared("float32", THREADS)
    weights, tile = shared.vector(6), vector_tile(shared, 6, 8, aligned=aligned, weighted=True, checked=True)
    x = np.arange(48, dtype=np.float32).reshape(4, 12)
    image, returned = filled(shared, tile.load, x, 4, 12, 3, 4, weights)
    got = rows_of(image, tile)
    assert got[:3, :4].tolist() == (2 * x[:3, 4:8]).tolist()
    assert not got[3:, :8].any() and not got[:, 4:8].any() and (got[:, 8:] == 2).all() and not returned.any()
    x[2, 7] = np.inf
    assert filled(shared, tile.load, x, 4, 12, 3, 4, weights)[1].sum() == 1
    assert not filled(shared, tile.load, x, 4, 12, 2, 4, weights)[1].any()


def product(shared, mma, add, number, *tiles):
    """The result of `add(mma, out, smem)` for a cleared fragment, as an array; tiles: (tile, values)."""
    image = np.full(shared.count, np.nan)  # outside the tiles nothing may be read
    for tile, values in tiles:
        for (r, c), value in np.ndenumerate(values):
            image[tile.place(r, c)] = value
        if tile.filled > values.shape[1]:
            rows_of(image, tile)[:, values.shape[1] : tile.filled] = 0
    result = np.full((LANES * mma.rows, LANES * mma.columns), np.nan)

    def multiplies(result, image):
        smem = cuda.shared.array(0, number, alignment=16)
        if cuda.threadIdx.x == 0:
            for i in range(shared.count):
                smem[i] = number(image[i])
        cuda.syncthreads()
        out = mma.fragment()
        mma.clear(out)
        add(mma, out, smem)
        for i in range(mma.rows):
            for c in range(mma.columns):
                row = cuda.threadIdx.x // LANES * mma.rows + i
                result[row * LANES * mma.columns + mma.column(c)] = out[i * mma.columns + c]

    run(multiplies, shared, result, image)
    return result


def integers(*shape):
    return np.random.default_rng(sum(shape)).integers(-9, 10, shape).astype(float)


def whole(mma, out, smem):
    mma.add(out, smem)


def twice(mma, out, smem):
    mma.add(out, smem)
    mma.add(out, smem)


# attention's products are unrolled and of 16 lanes, retention's are looped, of 16 or 8, and may have two neighbours
FAMILIES = pytest.mark.parametrize("looped", [False, True], ids=["attention", "retention"])
NUMBERS = pytest.mark.parametrize("dtype", DTYPES)


@FAMILIES
@NUMBERS
def test_abt(looped, dtype, order):
    shared = Shared(dtype, THREADS)
    a, b = shared.tile(LANES * 2, 6), shared.tile(LANES * 3, 6)
    mma = mma_abt(DTYPES[dtype][0], a, b, 2, 3, LANES, looped=looped)
    A, B = integers(8, 6), integers(12, 6)
    assert product(shared, mma, whole, DTYPES[dtype][0], (a, A), (b, B)).tolist() == (A @ B.T).tolist()
    assert product(shared, mma, twice, DTYPES[dtype][0], (a, A), (b, B)).tolist() == (2 * A @ B.T).tolist()


@FAMILIES
def test_a_part_of_abt_begins_at_the_given_place(looped):
    shared = Shared("float32", THREADS)
    a, b = shared.tile(LANES * 2, 8, stages=2), shared.tile(LANES, 8)
    mma = mma_abt(f32, a, b, 2, 1, LANES, looped=looped)
    A, B = integers(8, 8), integers(4, 8)
    second = SimpleNamespace(**{**vars(a), "at": a.at + a.size, "place": lambda r, c: a.size + a.place(r, c)})

    def four(mma, out, smem):
        mma.add_part(out, smem, a.at + a.size, 4)

    got = product(shared, mma, four, f32, (second, A), (b, B))
    assert got.tolist() == (A[:, :4] @ B[:, :4].T).tolist()


@FAMILIES
@NUMBERS
@pytest.mark.parametrize(("near", "groups"), [(4, 1), (4, 2), (2, 3)])
def test_ab(looped, dtype, near, groups, order):
    width = LANES * near * groups
    shared = Shared(dtype, THREADS)
    a, b = shared.tile(LANES * 2, 8), shared.tile(8, width - 1, LANES * near)  # filled with zeros
    mma = mma_ab(DTYPES[dtype][0], a, b, 2, near, LANES, looped=looped)
    A, B = integers(8, 8), integers(8, width - 1)
    assert (mma.rows, mma.columns, mma.size) == (2, near * groups, 2 * near * groups)
    for add, times in ((whole, 1), (twice, 2)):
        got = product(shared, mma, add, DTYPES[dtype][0], (a, A), (b, B))
        assert got[:, :-1].tolist() == (times * A @ B).tolist() and not got[:, -1].any()


@FAMILIES
def test_what_does_not_count_is_left_out_of_ab(looped):
    shared = Shared("float32", THREADS)
    a, b = shared.tile(LANES * 2, 8), shared.tile(8, LANES * 4)
    mma = mma_ab(f32, a, b, 2, 4, LANES, looped=looped)
    A, B = integers(8, 8), integers(8, 16)
    A[A == 0] = 1
    B[2, 3], B[5, 1] = np.nan, np.inf
    A[:6, 2], A[1:, 5] = -0.0, -0.0

    def counted(mma, out, smem):
        mma.add_counted(out, smem, 6)

    got = product(shared, mma, counted, f32, (a, A), (b, B))
    counts = ~((A == 0) & np.signbit(A))[:, :6]
    with np.errstate(invalid="ignore"):
        expected = sum(np.where(counts[:, n, None], A[:, n, None] * B[n], 0) for n in range(6))
    np.testing.assert_array_equal(got, expected)
    assert np.isnan(got[6:, 3]).all() and np.isinf(got[0, 1]) and np.isfinite(got[1:6]).all()


@NUMBERS
@pytest.mark.parametrize(("rows", "near", "groups"), [(4, 4, 2), (2, 2, 1)])
def test_atb(dtype, rows, near, groups, order):
    shared = Shared(dtype, THREADS)
    a, b = shared.tile(5, LANES * rows), shared.tile(5, LANES * near * groups)
    mma = mma_atb(DTYPES[dtype][0], a, b, rows, near, LANES)
    A, B = integers(5, LANES * rows), integers(5, LANES * near * groups)
    for add, times in ((whole, 1), (twice, 2)):
        assert product(shared, mma, add, DTYPES[dtype][0], (a, A), (b, B)).tolist() == (times * A.T @ B).tolist()


def test_products_that_do_not_fit():
    shared = Shared("float32", THREADS)
    a, b = shared.tile(8, 8), shared.tile(8, 12)
    with pytest.raises(ValueError, match=r"A @ B\.T: B has 8 rows, expected 4 x 3"):
        mma_abt(f32, a, b, 2, 3, LANES)
    with pytest.raises(ValueError, match="rows have 12 numbers, expected a multiple of 16"):
        mma_ab(f32, a, b, 2, 4, LANES)


def test_a_noun_has_the_members_of_its_kind():
    class Plain(Namespace):
        rows: int

    class Special(Plain):
        columns: int

    assert Special(rows=1, columns=2).but(rows=3).rows == 3
    assert "columns" not in Plain.__annotations__
    with pytest.raises(TypeError, match="Special: rows given or declared, expected both"):
        Special(columns=2)


def test_unrolled_verbs_are_called_for_each_row_of_numbers():
    @unrolled([(1, 2), (3, 4)])
    def add(to, a, b):
        to.append((a, b))

    @unrolled(())
    def add_none(to, a):
        to.append(a)

    found: list[tuple[int, int]] = []
    add(found)
    add_none(found)
    nothing(2)(found, 0)
    assert add.__name__ == "add"
    assert found == [(1, 2), (3, 4)]
