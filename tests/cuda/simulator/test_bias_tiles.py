"""Tiles of a bias: whose word is whose, both ways round, at its ends, and which biases come as boxes."""

from typing import Any

import numpy as np
import pytest

from dualops.cuda import simulator
from dualops.cuda.compiler.backend import cuda, i32, u8
from dualops.cuda.flash_attention.options import arguments, having
from dualops.cuda.flash_attention.sm90.bias import BiasPlace, bias_map, bias_tile, boxed_bias
from dualops.cuda.flash_attention.sm90.config import bias_operand
from dualops.cuda.launch.tensor_map import Maps
from dualops.cuda.tile.fragment import accumulator
from dualops.cuda.tile.pipeline import pipeline
from dualops.spec import OPERATORS, Problem
from dualops.spec.meta import ArrayMeta
from tests.cuda.simulator.attention import numbers

B, H, SQ, SK = 2, 3, 150, 200


def problem_of(bias: np.ndarray, B: int = B, H: int = H, Sq: int = SQ, Sk: int = SK) -> Problem:
    """Of a call with this bias."""
    shapes = {"q": (B, H, Sq, 8), "k": (B, H, Sk, 8), "v": (B, H, Sk, 8)}
    arrays = {**{name: numbers(*shape).astype(bias.dtype) for name, shape in shapes.items()}, "bias": bias}
    return OPERATORS["flash_attention"].bind({name: ArrayMeta.of_numpy(x) for name, x in arrays.items()}, {})


def words_of(bias: np.ndarray, queries: int, keys: int, place: BiasPlace, transposed: bool, stage: int) -> np.ndarray:
    """[threads, words, 2]: of two tiles, of which the first is somewhere else, the words of the second one's."""
    problem, operand, stages = problem_of(bias), bias_operand(queries, keys), 2
    readers, columns = (2 * keys, queries) if transposed else (128, keys)
    tile = bias_tile(having(problem), operand, 0, transposed=transposed)
    pipe, count, options = pipeline(stages, tile.nbytes, readers // 32), columns // 4, arguments(problem)
    (record,) = Maps([bias_map(problem, operand)], ["bias"]).simulated([bias])

    def kernel(y):
        smem, bars = cuda.shared.array(0, u8, alignment=1024), pipe.barriers()
        if cuda.threadIdx.x == 0:
            pipe.init(bars)
        pipe.start()
        if cuda.threadIdx.x == readers:
            for i in range(stage + 1):
                at = place if i == stage else BiasPlace(0, 0, 8, 8)
                tile.load(smem, pipe.acquire(bars, i), record.address, options, at, bars.full)
        if cuda.threadIdx.x < readers:
            words = tile.words()
            for i in range(stage + 1):
                held = tile.held(smem, pipe.wait(bars, i), words)
                for number in range(count):
                    y[cuda.threadIdx.x * count + number] = tile.word(held, i32(number))
                pipe.release(bars, i)

    y = np.zeros(readers * count, np.uint32)
    simulator.launch(kernel, (1,), (readers + 32,), [y], shared_bytes=stages * tile.nbytes)
    return y.view(bias.dtype).reshape(readers, count, 2).astype(np.float32)


def expected(bias: np.ndarray, queries: int, keys: int, place: BiasPlace, transposed: bool) -> np.ndarray:
    """The same by where accumulators stand."""
    whole = bias.reshape((1,) * (4 - bias.ndim) + bias.shape).astype(np.float32)
    head = whole[place.b % whole.shape[0], place.h % whole.shape[1]]
    tile = np.zeros((queries, keys), np.float32)
    there = head[place.m0 : place.m0 + queries, place.n0 : place.n0 + keys]
    tile[: there.shape[0], : there.shape[1]] = there
    scores = tile.T if transposed else tile[:64]
    found = np.zeros((2 * len(scores), scores.shape[1] // 4, 2), np.float32)
    for thread, number, e in np.ndindex(found.shape):
        row, column = accumulator(thread % 128, 4 * (number // 2) + 2 * (number % 2) + e)
        found[thread, number, e] = scores[thread // 128 * 64 + row, column]
    return found


TILES = [  # queries, keys, whether rows are keys
    (64, 128, False),
    (64, 96, False),
    (64, 80, False),
    (64, 16, False),
    (64, 128, True),
    (32, 128, True),
    (16, 64, True),
]
SHAPES = [(B, H, SQ, SK), (B, 1, SQ, SK), (1, H, SQ, SK), (SQ, SK)]
PLACES = [BiasPlace(1, 2, 64, 96), BiasPlace(0, 1, 128, 192), BiasPlace(1, 0, 144, 0)]


@pytest.mark.parametrize(("queries", "keys", "transposed"), TILES)
def test_words_are_of_the_scores_they_meet(queries, keys, transposed, order):
    """Within the bias and beyond its ends, where zeros come; of a bias that is broadcast over batch and heads."""
    for number, shape in enumerate(SHAPES):
        bias, place = numbers(*shape, seed=number), PLACES[number % len(PLACES)]
        found = words_of(bias, queries, keys, place, transposed, 3)
        assert np.array_equal(found, expected(bias, queries, keys, place, transposed)), shape


def test_float16():
    bias, place = numbers(SQ, SK).astype(np.float16), PLACES[0]
    assert np.array_equal(words_of(bias, 64, 32, place, False, 0), expected(bias, 64, 32, place, False))


def test_which_biases_come_as_boxes():
    bias = numbers(B, H, SQ, SK)
    assert boxed_bias(problem_of(bias)) is not None
    apart = numbers(B, H, SQ, SK + 8)[..., :SK]
    assert (found := boxed_bias(problem_of(apart))) is not None and found.strides[2] == SK + 8
    everywhere = np.broadcast_to(bias[:1, :1], bias.shape)
    assert (found := boxed_bias(problem_of(everywhere))) is not None and found.shape == (1, 1, SQ, SK)
    odd = numbers(B, H, SQ, 8 * 26)[..., :199]
    assert boxed_bias(problem_of(odd, Sk=199)) is not None
    refused: list[tuple[np.ndarray, dict[str, Any]]] = [
        (bias.astype(np.float32), {}),
        (bias[..., :1], {}),
        (bias[:, :, :1], {}),
        (np.broadcast_to(bias[:, :, :1], bias.shape), {}),
        (numbers(SQ, 4 * 51)[:, :SK], {}),
        (numbers(SQ, SK + 8)[:, 4 : 4 + SK], {}),
        (numbers(SK, SQ).T, {}),
        (numbers(SQ, 199), {"Sk": 199}),
    ]
    for other, sizes in refused:
        assert boxed_bias(problem_of(other, **sizes)) is None, (other.shape, other.strides)
    with pytest.raises(ValueError, match="no tensor map"):
        bias_map(problem_of(bias[:, :, :1]), bias_operand(64, 64))
