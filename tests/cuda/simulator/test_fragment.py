"""Who owns what, against the ISA's figures and against the twins of the instructions that have it so."""

from collections import Counter
from contextlib import suppress

import numpy as np
import pytest

from dualops.cuda.ptx.mma import mma_m16n8k8_tf32, mma_m16n8k16
from dualops.cuda.tile.fragment import accumulator, left_16bit, left_tf32, right_16bit, right_tf32
from tests.cuda import warp_product as kernels
from tests.cuda.warp_product import KINDS, launch, problem

from .tensor_cores import bf16_bits, f32_words, held, warp_product, words

LAYOUTS = [  # place, threads, elements of each, shape
    pytest.param(accumulator, 32, 4, (16, 8), id="accumulator"),
    pytest.param(accumulator, 32, 32, (16, 64), id="accumulators side by side"),
    pytest.param(accumulator, 128, 64, (64, 128), id="a warpgroup's"),
    pytest.param(left_16bit, 32, 8, (16, 16), id="left_16bit"),
    pytest.param(left_16bit, 32, 32, (16, 64), id="left_16bit along K"),
    pytest.param(right_16bit, 32, 4, (16, 8), id="right_16bit"),
    pytest.param(right_16bit, 32, 8, (32, 8), id="right_16bit along K"),
    pytest.param(left_tf32, 32, 4, (16, 8), id="left_tf32"),
    pytest.param(right_tf32, 32, 2, (8, 8), id="right_tf32"),
]


@pytest.mark.parametrize(("place", "threads", "count", "shape"), LAYOUTS)
def test_every_element_has_one_owner(place, threads, count, shape):
    owners = Counter(place(thread, element) for thread in range(threads) for element in range(count))
    assert owners == dict.fromkeys(np.ndindex(shape), 1)


@pytest.mark.parametrize(
    ("place", "lane", "places"),
    [  # read off the figures
        (accumulator, 0, [(0, 0), (0, 1), (8, 0), (8, 1)]),
        (accumulator, 31, [(7, 6), (7, 7), (15, 6), (15, 7)]),
        (accumulator, 5, [(1, 2), (1, 3), (9, 2), (9, 3), (1, 10), (1, 11), (9, 10), (9, 11)]),  # wgmma: d0..d7
        (accumulator, 127, [(55, 6), (55, 7), (63, 6), (63, 7), (55, 14)]),
        (left_16bit, 0, [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9)]),
        (left_16bit, 31, [(7, 6), (7, 7), (15, 6), (15, 7), (7, 14), (7, 15), (15, 14), (15, 15)]),
        (right_16bit, 0, [(0, 0), (1, 0), (8, 0), (9, 0)]),
        (right_16bit, 7, [(6, 1), (7, 1), (14, 1), (15, 1)]),
        (left_tf32, 6, [(1, 2), (9, 2), (1, 6), (9, 6)]),
        (right_tf32, 6, [(2, 1), (6, 1)]),
    ],
)
def test_figures(place, lane, places):
    assert [place(lane, element) for element in range(len(places))] == places


@pytest.mark.parametrize("first", [0, 8])
def test_a_packed_accumulator_is_the_next_left_factor(first):
    """Attention's probabilities: accumulators side by side, packed in pairs, are A of the product along K."""
    for lane in range(32):
        for element in range(8):
            row, column = accumulator(lane, first + element)
            assert left_16bit(lane, first + element) == (row, column)


@pytest.mark.parametrize(
    ("mma", "depth", "left", "right", "packed"),
    [
        pytest.param(mma_m16n8k16("bf16"), 16, left_16bit, right_16bit, lambda held: words(held, bf16_bits), id="bf16"),
        pytest.param(mma_m16n8k8_tf32, 8, left_tf32, right_tf32, f32_words, id="tf32"),
    ],
)
def test_products(mma, depth, left, right, packed):
    rng = np.random.default_rng(depth)
    a, b = rng.integers(-50, 50, (16, depth)), rng.integers(-50, 50, (depth, 8))
    lefts, rights = packed(held(a, left, depth // 2)), packed(held(b, right, depth // 4))
    assert warp_product(mma, lefts, rights, np.zeros((16, 8))).tolist() == (a @ b).tolist()


@pytest.mark.parametrize(("dtype", "transposed"), KINDS)
def test_a_kernel_that_copies_loads_and_multiplies(dtype, transposed, order):
    a, b, expected = problem(dtype, transposed)
    y = np.zeros((16, 8), np.float32)
    launch(dtype, transposed, [y, a, b])
    assert y.tolist() == expected.tolist()


@pytest.mark.parametrize("dropped", ["cp_async_commit", "cp_async_wait_group", "bar_warp_sync"])
def test_what_it_waits_for_is_needed(dropped, order, monkeypatch):
    monkeypatch.setattr(kernels, dropped, lambda *_: None)
    a, b, expected = problem("bf16", False)
    y = np.zeros((16, 8), np.float32)
    with suppress(RuntimeError):  # copies that are in flight at the end
        launch("bf16", False, [y, a, b])
    assert y.tolist() != expected.tolist()
