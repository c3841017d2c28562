"""Tiles of rows that come to shared memory as boxes, and a warp's products with them."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dualops.cuda.compiler.backend import cuda, f32, u16
from dualops.cuda.tile.async_copies import cp_async_commit, cp_async_wait_group
from dualops.cuda.tile.fragment import accumulator
from dualops.cuda.tile.shared import Lines
from dualops.cuda.tile.strips import strip_ab, strip_abt
from dualops.cuda.tile.tile_copies import tile_copies
from dualops.cuda.tile.warp_mma import FactorSlice

from .asynchronous import run

NUMBERS: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
ELEMENTS: dict[str, Any] = {"bfloat16": u16, "float16": u16, "float32": f32}


def random(dtype: str, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(NUMBERS[dtype])


def stored(x: np.ndarray) -> np.ndarray:
    """As in kernels: the bits of 16-bit numbers, float32 unchanged."""
    return (x.view(np.uint16) if x.itemsize == 2 else x).reshape(-1)


def laid_out(x: np.ndarray, box: FactorSlice) -> np.ndarray:
    """[lines, width] as boxes."""
    boxes = x.shape[1] // box.pitch
    found = np.empty(boxes * box.size, x.dtype)
    for line, column in np.ndindex(x.shape):
        found[column // box.pitch * box.size + box.place(line, column % box.pitch)] = x[line, column]
    return found


def widened(x: np.ndarray, box: FactorSlice) -> np.ndarray:
    """With zeros for the additional lines and columns of the boxes."""
    boxes = -(-x.shape[1] // box.pitch)
    return np.pad(x, ((0, box.lines - x.shape[0]), (0, boxes * box.pitch - x.shape[1])))


@pytest.mark.parametrize(
    ("dtype", "along", "vector", "width"),
    [
        ("bfloat16", "depth", 8, 128),
        ("bfloat16", "row", 8, 70),
        ("bfloat16", "depth", 4, 28),
        ("bfloat16", "row", 2, 66),
        ("bfloat16", "depth", 1, 33),
        ("float32", "depth", 4, 40),
        ("float32", "row", 4, 64),
        ("float32", "row", 2, 34),
        ("float32", "row", 1, 33),
    ],
)
def test_every_element_gets_to_its_place(dtype, along, vector, width):
    """Of rows that end within the tile; what is beyond them is 0."""
    kind, each = ELEMENTS[dtype], np.dtype(NUMBERS[dtype]).itemsize
    pitch = 32 if each == 4 or width <= 32 else 64
    box = FactorSlice("depth", 32, pitch, each) if along == "depth" else FactorSlice("row", pitch, 32, each)
    step, count, x = 160, 29, random(dtype, 32, 160)
    copies, room = tile_copies(box, width, vector, 128), -(-width // pitch) * box.size
    data = stored(x)

    def copied(y, source):
        smem = cuda.shared.array(room, kind, alignment=128)
        copies.load(smem, 0, Lines(source, 0, step, count))
        cp_async_commit()
        cp_async_wait_group(0)
        cuda.syncthreads()
        for e in range(cuda.threadIdx.x, room, 128):
            y[e] = smem[e]

    found = np.zeros(room, data.dtype)
    run(copied, found, data, threads=128)
    expected = stored(laid_out(widened(x[:count, :width], box), box))
    assert np.array_equal(found, expected)


def sums_of(acc: np.ndarray) -> np.ndarray:
    """[lanes, elements] of a warp as [16, columns]."""
    sums = np.zeros((16, 2 * acc.shape[1]))
    for lane, element in np.ndindex(acc.shape):
        sums[accumulator(lane, element)] = acc[lane, element]
    return sums


def bound_of(a: np.ndarray, b: np.ndarray) -> Any:
    """Of products that are exact."""
    return 2.0**-22 * (np.abs(a).astype(float) @ np.abs(b).astype(float)) + 1e-12


@pytest.mark.parametrize(("dtype", "width", "held"), [("bfloat16", 128, True), ("float16", 32, False)])
def test_rows_by_rows(dtype, width, held):
    kind, pitch = ELEMENTS[dtype], 32 if width <= 32 else 64
    a_box, b_box = FactorSlice("depth", 32, pitch), FactorSlice("depth", 32, pitch)
    a, b = random(dtype, 32, width), random(dtype, 32, width, seed=1)
    strip = strip_abt(dtype, a_box, b_box, width // pitch, held=held)
    data = np.concatenate([stored(laid_out(a, a_box)), stored(laid_out(b, b_box))])
    size, count, b_at = len(data), strip.size, a.size

    def multiply(y, source):
        smem = cuda.shared.array(size, kind, alignment=128)
        for e in range(cuda.threadIdx.x, size, 32):
            smem[e] = source[e]
        cuda.syncthreads()
        sums, place = strip.fragment(), strip.place(16, 0)
        frag = strip.hold(smem, place)
        for _ in range(2):  # what was there before does not count
            strip.multiply(sums, frag, smem, place, b_at)
        for e in range(count):
            y[cuda.threadIdx.x * count + e] = sums[e]

    found = np.zeros(32 * count)
    run(multiply, found, data)
    wanted = a[16:].astype(float) @ b.astype(float).T
    assert (np.abs(sums_of(found.reshape(32, count)) - wanted) <= bound_of(a[16:], b.T)).all()


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 128), ("float16", 32)])
def test_registers_by_lines(dtype, width):
    """A as sums lie; twice, so that the second product is added."""
    kind, pitch = ELEMENTS[dtype], 32 if width <= 32 else 64
    box = FactorSlice("row", pitch, 32)
    a, b = random(dtype, 16, 32), random(dtype, 32, width, seed=1)
    strip = strip_ab(dtype, box, width // pitch)
    data = stored(laid_out(b, box))
    size, count = len(data), strip.size

    def multiply(y, source):
        smem = cuda.shared.array(size, kind, alignment=128)
        for e in range(cuda.threadIdx.x, size, 32):
            smem[e] = source[e]
        cuda.syncthreads()
        values, frag, sums = cuda.local.array(16, f32), strip.left(), strip.fragment()
        for e in range(16):
            row, column = accumulator(int(cuda.threadIdx.x), e)
            values[e] = f32(a[row, column])
        strip.put(frag, values)
        for _ in range(2):
            strip.add(sums, frag, smem, 0)
        for e in range(count):
            y[cuda.threadIdx.x * count + e] = sums[e]

    found = np.zeros(32 * count)
    run(multiply, found, data)
    wanted = 2 * a.astype(float) @ b.astype(float)
    assert (np.abs(sums_of(found.reshape(32, count)) - wanted) <= 2 * bound_of(a, b)).all()


def test_what_is_refused():
    with pytest.raises(ValueError, match="96 threads can't share FactorSlice"):
        tile_copies(FactorSlice("depth", 32, 64), 64, 8, 96)
    with pytest.raises(ValueError, match=r"512 threads can't share .* in copies of 8"):
        tile_copies(FactorSlice("depth", 32, 64), 64, 8, 512)
