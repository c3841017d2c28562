"""Dropout: the words of Philox-4x32-7, what their halves decide over, and that nothing else moves them."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from dualops.reference import flash_attention, flash_attention_blocked
from tests.philox import DRAWS, KNOWN_ANSWERS, philox, weights
from tests.processes import ROOT

pytestmark = pytest.mark.filterwarnings("error")


def drawn(
    seed: Any,
    dropout_p: float,
    B: int = 1,
    H: int = 1,
    Sq: int = 1,
    Sk: int = 1,
    form: Any = flash_attention,
    **how: Any,
) -> np.ndarray:
    """The weights of all probabilities [B, H, Sq, Sk]: with equal scores and unit vectors as values they stand in o."""
    q, k = np.zeros((B, H, Sq, 1)), np.zeros((B, H, Sk, 1))
    v = np.broadcast_to(np.eye(Sk), (B, H, Sk, Sk))
    o = (form or flash_attention)(q, k, v, dropout_p=dropout_p, seed=seed, **how)
    assert isinstance(o, np.ndarray)
    return o * Sk


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_the_philox_that_is_compared_with(counter, key, expected):
    assert philox(counter, key) == expected


def test_a_probability_is_a_multiple_of_2_to_the_minus_15():
    """What stays is divided by the share that stays of those, so that the mean is 1."""
    assert np.all(drawn(3, 2**-17, Sq=64, Sk=64) == 1)
    found = drawn(3, 0.3, Sq=64, Sk=64)
    assert np.abs(found[found > 0] * (1 - round(0.3 * DRAWS) / DRAWS) - 1).max() < 1e-12
    found = drawn(3, 1 - 2**-20, Sq=64, Sk=64)
    assert np.all((found == 0) | (np.abs(found - DRAWS) < 1e-6))


SEEDS = [0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 0x243F6A8885A308D3]


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_are_those_of_the_written_rule(seed):
    for dropout_p in (0.1, 0.5, 0.999):
        expected = weights(seed, dropout_p, (2, 3, 37, 21))
        assert np.abs(drawn(seed, dropout_p, 2, 3, 37, 21) - expected).max() < 1e-12 * expected.max()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_in_an_array_is_the_same_seed(seed):
    assert np.array_equal(drawn(seed, 0.5, 1, 2, 20, 30), drawn(np.array(seed, np.int64), 0.5, 1, 2, 20, 30))
    assert np.array_equal(drawn(seed, 0.5, 1, 2, 20, 30), drawn(np.int64(seed), 0.5, 1, 2, 20, 30))


@pytest.mark.parametrize("dropout_p", [0.01, 0.3, 0.5, 0.9])
def test_the_share_that_is_dropped_and_the_mean(dropout_p):
    found = drawn(20240607, dropout_p, 2, 4, 128, 128)
    deviation = np.sqrt(dropout_p * (1 - dropout_p) / found.size)
    assert abs((found == 0).mean() - dropout_p) < 4 * deviation
    assert abs(found.mean() - 1) < 4 * deviation / (1 - dropout_p)
    for axis in range(4):  # no head, query or key is favoured
        others = tuple(other for other in range(4) if other != axis)
        shares = (found == 0).mean(axis=others)
        assert np.abs(shares - dropout_p).max() < 5 * deviation * np.sqrt(found.shape[axis])


def test_neighbours_and_seeds_have_nothing_to_do_with_one_another():
    one = drawn(5, 0.5, 1, 4, 128, 128) > 0
    samples = 4 * 112 * 112
    for b, c in product((0, 1, 2, 8, 16), repeat=2):
        if b or c:
            agree = (one[:, :, :112, :112] == one[:, :, b : 112 + b, c : 112 + c]).mean()
            assert abs(agree - 0.5) < 4 * 0.5 / np.sqrt(samples), (b, c)
    for other in (4, 6, -5, 5 + 2**32):
        agree = (one == (drawn(other, 0.5, 1, 4, 128, 128) > 0)).mean()
        assert abs(agree - 0.5) < 4 * 0.5 / np.sqrt(one.size), other


@pytest.mark.parametrize(("block_q", "block_kv"), [(64, 64), (16, 8), (5, 3), (1, 100)])
def test_weights_do_not_depend_on_tiles_or_masks(block_q, block_kv):
    expected = drawn(9, 0.4, 1, 2, 33, 21)
    tiled = drawn(9, 0.4, 1, 2, 33, 21, form=flash_attention_blocked, block_q=block_q, block_kv=block_kv)
    assert np.abs(tiled - expected).max() < 1e-12
    causal = drawn(9, 0.4, 1, 2, 33, 21, causal="top_left") > 0
    below = np.tril(np.ones((33, 21), bool))
    assert np.array_equal(causal, (expected > 0) & below)


def test_the_docs_say_what_a_probability_is_rounded_to():
    """What is less than half of 2**-15 drops nothing, and both public docstrings name that number."""
    rate = [1 - np.count_nonzero(drawn(1, p, Sq=400, Sk=400)) / 160_000 for p in (0.49 / DRAWS, 16 / DRAWS)]
    assert rate[0] == 0 and rate[1] == pytest.approx(16 / DRAWS, rel=0.5)
    text = f"rounded to a multiple of 2**-{DRAWS.bit_length() - 1}"
    for path in ("cuda/flash_attention/__init__.py", "torch_bridge/flash_attention.py"):
        assert text in " ".join((ROOT / "dualops" / path).read_text("utf-8").split()), path
