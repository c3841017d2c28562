"""matmul's rung on tensor cores: where slices lie, who loads what of them, each Config, each way to read a factor."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest

from dualops.cuda.compiler.backend import cuda, f32, u16, u32
from dualops.cuda.launch.device import known
from dualops.cuda.matmul import sm80
from dualops.cuda.matmul.loading import Reading
from dualops.cuda.matmul.product import Variant, forward_product
from dualops.cuda.matmul.sm80 import Sm80Config
from dualops.cuda.matmul.sm80_copies import slice_copies
from dualops.cuda.matmul.tiled import reading
from dualops.cuda.tile.fragment import accumulator, left_16bit, left_tf32, right_16bit, right_tf32
from dualops.cuda.tile.warp_mma import FactorSlice, fragments
from dualops.cuda.tile.warp_rows import WarpRowsLayout, warp_rows
from dualops.spec import OPERATORS, ArrayMeta, Case
from dualops.spec.matmul import shapes_of
from tests.checks import check
from tests.problems import Layout

from .asynchronous import run
from .test_matmul import launch

SPEC = OPERATORS["matmul"]
CONFIGS = [config for config, _ in sm80.TILES]
OF_TF32, OF_PARTS = ([config for config, _ in tiles] for tiles in (sm80.TF32_TILES, sm80.PARTS_TILES))
SMALL = CONFIGS[-1]
DENSE = Layout.dense(2)
SHIFTED = Layout((0, 1), (0, 3), misalignment=1)
STEPPED = Layout((0, 1), (0, 0), step=2)


def padded(gap: int) -> Layout:
    return Layout((0, 1), (0, gap))


# --- slices in shared memory -------------------------------------------------------------------------

SLICES = [
    FactorSlice(along, rows, config.block_k, config.itemsize)
    for along in ("depth", "row")
    for config in (*CONFIGS, *OF_TF32, *OF_PARTS)
    for rows in {config.block_m, config.block_n}
]
every_slice = pytest.mark.parametrize("slices", sorted(set(SLICES), key=str), ids=str)


def wavefronts(addresses: Iterable[int], nbytes: int) -> int:
    """How often shared memory is asked for what lanes want at once: 32 banks of 4 bytes; `nbytes` of each lane."""
    banks: dict[int, set[int]] = {}
    for address in addresses:
        for word in range(address // 4, (address + nbytes) // 4):
            banks.setdefault(word % 32, set()).add(word)
    return max(map(len, banks.values()))


@every_slice
def test_every_element_of_a_slice_has_a_place_of_its_own(slices):
    places = {slices.place(line, column) for line in range(slices.lines) for column in range(slices.line)}
    assert places == set(range(slices.size))


@every_slice
def test_eight_lines_of_a_matrix_meet_no_bank_twice(slices):
    for first in range(0, slices.lines, 8):
        for column in range(0, slices.line, slices.matrix):
            addresses = [slices.itemsize * slices.place(first + line, column) for line in range(8)]
            assert all(address % 16 == 0 for address in addresses)
            assert not slices.by_matrices or wavefronts(addresses, 16) == 1


@pytest.mark.parametrize("rows", sorted({slices.rows for slices in SLICES if not slices.by_matrices}))
def test_words_of_four_lines_meet_no_bank_twice(rows):
    """Of float32 along rows a lane loads element [lane % 4, lane // 4] of four steps and eight rows."""
    slices = FactorSlice("row", rows, 16, 4)
    for first in range(0, slices.lines, 4):
        for column in range(0, slices.line, 8):
            places = [slices.place(first + lane % 4, column + lane // 4) for lane in range(32)]
            assert wavefronts([4 * place for place in places], 4) == 1


@every_slice
@pytest.mark.parametrize("nbytes", [16, 8, 4])
def test_neighbouring_copies_meet_no_bank_twice(slices, nbytes):
    """Eight threads that copy 16 bytes each, sixteen of 8 and 32 of 4: what is written to shared memory at once."""
    at_once, vector = 128 // nbytes, nbytes // slices.itemsize
    units = [(line, column) for line in range(slices.lines) for column in range(0, slices.line, vector)]
    for first in range(0, len(units), at_once):
        addresses = [slices.itemsize * slices.place(*unit) for unit in units[first : first + at_once]]
        assert wavefronts(addresses, nbytes) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("k", 64, 32), "along is 'k', expected 'depth' or 'row'"),
        (("depth", 64, 16), "a slice of 64 rows by 16 steps along depth, expected lines of 32"),
        (("depth", 64, 96), "a slice of 64 rows by 96 steps along depth, expected lines of 32"),
        (("row", 96, 32), "a slice of 96 rows by 32 steps along row, expected lines of 32"),
        (("row", 64, 48), "a slice of 64 rows by 48 steps along row, expected lines of 32"),
        (
            ("depth", 64, 48, 4),
            "a slice of 64 rows by 48 steps along depth, expected lines of 16 or of multiples of 32",
        ),
        (("row", 48, 16, 4), "a slice of 48 rows by 16 steps along row, expected lines of multiples of 32"),
    ],
)
def test_a_slice_that_no_swizzle_has(given, message):
    with pytest.raises(ValueError, match=message):
        FactorSlice(*given)


def test_rows_that_are_no_part_of_a_box():
    with pytest.raises(
        ValueError, match="48 rows per warp, expected a multiple of 16 that fills boxes of 64 or parts them"
    ):
        fragments(FactorSlice("row", 192, 32), 48, left=True)


def test_a_slice_that_threads_cannot_share():
    with pytest.raises(
        ValueError, match=r"96 threads can't share FactorSlice\(along='depth', rows=64, depth=32, itemsize=2\)"
    ):
        slice_copies(Variant("bfloat16"), Sm80Config(3, 1, 32, 32, 32, 3), 64, Reading("depth", 8))


@pytest.mark.parametrize("left", [True, False], ids=["a", "b"])
@pytest.mark.parametrize(
    ("slices", "rows"),
    [
        (FactorSlice("depth", 64, 32), 32),
        (FactorSlice("depth", 128, 64), 64),
        (FactorSlice("row", 64, 32), 32),
        (FactorSlice("row", 256, 64), 64),
        (FactorSlice("row", 256, 32), 128),
        (FactorSlice("depth", 64, 16, 4), 32),
        (FactorSlice("depth", 128, 32, 4), 64),
        (FactorSlice("row", 64, 16, 4), 32),
        (FactorSlice("row", 128, 32, 4), 64),
    ],
    ids=str,
)
def test_a_lane_loads_what_it_owns(slices, rows, left):
    kind, halves = {2: u16, 4: u32}[slices.itemsize], 4 // slices.itemsize
    side, numbers = fragments(slices, rows, left), np.zeros(slices.size, f"u{slices.itemsize}")
    for row in range(slices.rows):
        for step in range(slices.depth):
            line, column = (row, step) if slices.along == "depth" else (step, row)
            numbers[slices.place(line, column)] = slices.depth * row + step
    first, steps, words = slices.rows - rows, slices.depth // slices.step, side.words
    of_left, of_right = (left_16bit, right_16bit) if halves == 2 else (left_tf32, right_tf32)

    def loads(y):
        smem, frag = cuda.shared.array(slices.size, kind, alignment=128), side.make()
        if cuda.threadIdx.x == 0:
            for i in range(slices.size):
                smem[i] = numbers[i]
        cuda.syncthreads()
        at = side.start(first)
        for step in range(steps):
            side.read(frag, step % 2, smem, at, step)
            for word in range(words):
                y[(cuda.threadIdx.x * steps + step) * words + word] = frag[step % 2 * words + word]

    y = np.zeros(32 * steps * words, np.int64)
    run(loads, y)
    found = y.reshape(32, steps, words)
    for lane, step, word, half in np.ndindex(32, steps, words, halves):
        if left:  # 16 rows have four words
            row, depth = of_left(lane, halves * (word % 4) + half)
            row += 16 * (word // 4)
        else:  # 8 columns have two
            depth, row = of_right(lane, halves * (word % 2) + half)
            row += 8 * (word // 2)
        expected = slices.depth * (first + row) + slices.step * step + depth
        assert found[lane, step, word] >> 16 * half & 0xFFFF == expected, (lane, step, word, half)


# --- sums in rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [32, 64])
def test_sums_become_rows(width, order):
    rows, tiles = warp_rows(32, width), width // 8

    def through_rows(y):
        smem, acc = cuda.shared.array(24 * width, f32, alignment=16), cuda.local.array(8 * tiles, f32)
        values = cuda.local.array(rows.columns, f32)
        for i in range(2):
            for element in range(4 * tiles):
                row, column = accumulator(cuda.threadIdx.x, element)
                acc[4 * tiles * i + element] = f32(width * (16 * i + row) + column)
        for i in range(2):
            rows.put(smem, acc, i)
            for row in range(rows.row(), 16, rows.apart):
                rows.take(values, smem, row)
                for j in range(rows.columns):
                    y[width * (16 * i + row) + rows.column() + j] = values[j]
            rows.release()

    y = np.zeros(32 * width)
    run(through_rows, y)
    assert y.tolist() == list(range(32 * width))


@pytest.mark.parametrize(("width", "most"), [(64, 1), (32, 2)])
def test_rows_of_sums_meet_few_banks_twice(width, most):
    layout = WarpRowsLayout(width)
    places = Counter(layout.place(row, column) for row in range(16) for column in range(width))
    assert set(places.values()) == {1} and max(places) < layout.size
    for half in range(2):  # of a warp, whose lanes write 8 bytes each
        written = [4 * layout.place(*accumulator(lane, 0)) for lane in range(16 * half, 16 * half + 16)]
        assert wavefronts(written, 8) == 1
    threads = width // 8
    for first in range(0, 32, 8):  # of a warp, whose lanes read 16 bytes each
        for part in (0, 4):
            lanes = range(first, first + 8)
            read = [4 * layout.place(lane // threads, 8 * (lane % threads) + part) for lane in lanes]
            assert wavefronts(read, 16) <= most


# --- Configs, and ways to read -----------------------------------------------------------------------


def hold(
    config: Sm80Config,
    dtype: str,
    sizes: tuple[int, int, int],
    layout: str,
    a: Layout,
    b: Layout,
    y: Layout,
    **params: Any,
) -> None:
    shapes, transposes = shapes_of(*sizes, layout=layout, bias=True)
    case = Case("config", dtype, shapes, {**transposes, "activation": "relu", **params})
    check(SPEC, case, partial(launch, config, by=sm80), layouts={"a": a, "b": b}, out_layout=y, ways=("given",))


@pytest.mark.parametrize(
    ("config", "layout"),
    [(config, ("nn", "nt", "tn", "tt")[place % 4]) for place, config in enumerate(CONFIGS)],
    ids=[f"{config.block_m}x{config.block_n}x{config.block_k}" for config in CONFIGS],
)
def test_configs(config, layout, order):
    """A ragged tile and two slices, the second ragged, 16 bytes at a time."""
    sizes = (config.block_m - 5, config.block_n - 8, config.block_k + 13)
    hold(config, "bfloat16", sizes, layout, padded(-sum(sizes) % 8 + 8), padded(8), DENSE)


@pytest.mark.parametrize(
    ("precision", "config", "layout", "a", "b"),
    [
        ("tf32", OF_TF32[2], "tn", padded(2), padded(8)),
        ("tf32", OF_TF32[3], "nn", STEPPED, padded(4)),
        ("3xtf32", OF_PARTS[1], "nt", padded(2), DENSE),
        ("3xtf32", OF_PARTS[2], "tt", SHIFTED, padded(4)),
    ],
    ids=lambda value: f"{value.block_m}x{value.block_n}" if isinstance(value, Sm80Config) else None,
)
def test_float32(precision, config, layout, a, b, order):
    """A ragged tile; two pieces and more slices than stages where the tile is small."""
    depth = 45 if config.block_m > 64 else config.block_k * (config.num_stages + 2) + 5
    sizes = (config.block_m - 5, config.block_n - 8, depth)
    hold(config, "float32", sizes, layout, a, b, DENSE, precision=precision)


def gap(length: int, vector: int) -> int:
    """So much behind rows of a length that `vector` elements are the most that are aligned."""
    return next(
        gap for gap in range(16) if (length + gap) % 16 == vector % 16 or (length + gap) % (2 * vector) == vector
    )


@pytest.mark.parametrize(
    ("layout", "a_vector", "b_vector"),
    [("nn", 8, 1), ("nn", 4, 2), ("nt", 2, 4), ("nt", 1, 8), ("tn", 8, 4), ("tn", 1, 8), ("tt", 2, 2), ("tt", 4, 1)],
)
def test_ways_to_read(layout, a_vector, b_vector):
    """Each factor either way round by 16, 8 and 4 bytes and through registers; more slices than stages."""
    sizes = (66, 38, 170) if layout[0] == "n" else (38, 66, 170)
    shapes, transposes = shapes_of(*sizes, layout=layout, bias=True)
    places = {name: padded(gap(shapes[name][1], vector)) for name, vector in (("a", a_vector), ("b", b_vector))}
    metas = {
        name: ArrayMeta(shape, "float16", places[name].strides(shape) if name in places else (1,), "cuda:0", 0)
        for name, shape in shapes.items()
    }
    problem = SPEC.bind(metas, transposes)
    product = forward_product(problem, metas | problem.outputs(SPEC.outputs))
    found = [reading(product, which, metas, "float16", sm80.VECTORS, whole=False) for which in "ab"]
    along = ["depth" if layout[0] == "n" else "row", "row" if layout[1] == "n" else "depth"]
    assert found == [Reading(along[0], a_vector), Reading(along[1], b_vector)]
    hold(SMALL, "float16", sizes, layout, places["a"], places["b"], DENSE)


@pytest.mark.parametrize("place", [SHIFTED, STEPPED, Layout((1, 0), (0, 0))], ids=["shifted", "stepped", "upright"])
def test_results_of_any_strides(place, order):
    other = STEPPED if place is STEPPED else SHIFTED
    hold(SMALL, "bfloat16", (35, 42, 40), "nn", other, other, place)


# --- which problems, which Configs -----------------------------------------------------------------


def chosen(arch: str, dtype: str, sizes: tuple[int, int, int], layout: str = "nt") -> list[Sm80Config]:
    shapes, transposes = shapes_of(*sizes, layout=layout)
    metas = {}
    for name, (rows, columns) in shapes.items():
        metas[name] = ArrayMeta((rows, columns), dtype, (columns, 1), "cuda:0", 0)
    problem = SPEC.bind(metas, transposes)
    return [choice.config for choice in sm80.RUNG.forward_choices(problem, problem.outputs(SPEC.outputs), known(arch))]


def test_configs_are_chosen_by_the_work_of_the_busiest_sm():
    best = chosen("sm_90a", "bfloat16", (4096, 4096, 4096))[0]
    assert (best.block_m, best.block_n, best.block_k) == (128, 256, 64)
    assert chosen("sm_90a", "bfloat16", (64, 64, 4096))[0] == SMALL
    skinny = chosen("sm_90a", "float16", (64, 32768, 4096))[0]
    assert (skinny.block_m, skinny.block_n) == (64, 128)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"])
def test_there_is_room_for_the_blocks_that_should_be_there(arch):
    for sizes in ((4096, 4096, 4096), (4096, 4095, 4097)):
        found = chosen(arch, "float16", sizes, "nn")
        assert found
        for config in found:
            assert config.min_blocks * config.shared_bytes("float16") <= known(arch).shared_memory_per_block


@pytest.mark.parametrize(("K", "most"), [(4096, 128), (4100, 64), (4098, 64), (4095, 64)])
def test_threads_with_many_small_copies_keep_fewer_sums(K, most):
    assert max(config.sums for config in chosen("sm_90a", "bfloat16", (4096, 4096, K))) == most


def test_other_dtypes_are_left_to_others():
    for dtype in ("float32", "float64"):
        assert not chosen("sm_90a", dtype, (64, 64, 64))
