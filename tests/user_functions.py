"""Functions as users write them, for the tests of all places where they run."""

import math
from collections.abc import Callable
from math import tanh
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

ALPHA = 0.125
WINDOW = 3
SLOPES = (0.5, 0.25)
GRID = np.array([[0.5, -1.0, 2.0], [0.125, 3.0, -0.25]])
CONFIG = SimpleNamespace(cap=2.5, window=4)
NO_BOUND = None

SCORE, MASK = ("score", "b", "h", "i", "j"), ("b", "h", "i", "j")
SCORE_MODS: dict[str, FunctionType] = {}  # differentiable but for kinks, for scores in (0.1, 0.9) and small integers
MASK_MODS: dict[str, FunctionType] = {}


def score_mod(function: Any) -> Any:
    SCORE_MODS[function.__name__] = function
    return function


def mask_mod(function: Any) -> Any:
    MASK_MODS[function.__name__] = function
    return function


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def gate(x: float, strength: float = 0.75) -> float:
    return x * sigmoid(strength * x)


def falling(steepness: float) -> Callable[..., float]:
    """A function with a variable of its own."""

    def inner(score, b, h, i, j):
        return score - steepness * abs(i - j)

    return inner


SCORE_MODS["closure"] = falling(0.3)
SCORE_MODS["inline"], SCORE_MODS["inline_too"] = (lambda score, b, h, i, j: score * 2), (lambda s, *_: s**3 - 1)
halved = lambda score, b, h, i, j: score / (2 + i)  # noqa: E731
SCORE_MODS["lambda_of_a_lambda"] = lambda score, b, h, i, j: 3 * halved(score * score, b, h, i, j)
SCORE_MODS["defaults"] = lambda score, b, h, i, j, slope=0.1, *, shift=2: score * slope + shift
# part of a call whose lines are no Python by themselves
SCORE_MODS.update(
    keyword=lambda score, b, h, i, j: (
        -score
        + 2.5 * i
    )
)  # fmt: skip


@score_mod
def identity(score, b, h, i, j):
    """Nothing but a docstring."""
    return score


@score_mod
def constant(score, b, h, i, j):
    return 7


@score_mod
def integers(score, b, h, i, j):
    distance = i - j
    return score + 0.1 * distance + (i * j) / 7 + i // (j + 1) + (i % 3) * ALPHA + distance**2 + 2.0 ** -(h + 1)


@score_mod
def global_numbers(score, b, h, i, j):
    return score * ALPHA + WINDOW + math.pi * CONFIG.cap * score + CONFIG.window


@score_mod
def tables(score, b, h, i, j):
    return score * SLOPES[h] + GRID[b, i % 3] * score + sum_of(score)


def sum_of(score):
    total = 0
    for slope in SLOPES:
        total += slope * score
    return total


@score_mod
def quotient(score, b, h, i, j):
    return (1 + score * score) / (2 - score) + 3 / score - score / 4


@score_mod
def powers(score, b, h, i, j):
    return score**4 + score**-2 + score**0.5 + 2**score + score**score + (score + 1) ** (i + 1) + pow(score, 3)


@score_mod
def softcap(score, b, h, i, j):
    return CONFIG.cap * tanh(score / CONFIG.cap)


@score_mod
def functions_of_math(score, b, h, i, j):
    x = math.exp(score) + math.log(score) + math.log2(score) * math.log10(score) + math.log1p(score)
    x += math.sqrt(score) * math.expm1(score) + math.exp2(score) + math.log(score, 3)
    x += math.asin(score) * math.acos(score) + math.atan(score) + math.sinh(score) - math.cosh(score)
    return x + math.erf(score) * math.erfc(score) + math.fabs(score - 0.95) + math.pow(score, 1.5)


@score_mod
def waves(score, b, h, i, j):
    return math.sin(3 * score) * math.cos(score + i) + math.tan(score)


@score_mod
def functions_of_numpy(score, b, h, i, j):
    x = np.where(score > 0.5, np.exp(score), np.sqrt(score) * np.log(score))
    x = x + np.clip(score, 0.3, 0.6) + np.maximum(score, 0.4) * np.minimum(score, i) + np.abs(score - 0.45)
    return x + np.square(score) + np.power(score, 2.5) + np.arctan(score) + np.tanh(x) + np.sign(i - j)


@score_mod
def clips(score, b, h, i, j):
    x = np.clip(score, None, 0.6) * np.clip(score, 0.3, None) + np.clip(score, a_min=NO_BOUND, a_max=0.5)
    return x + np.clip(a=score, a_min=0.4, a_max=None) - np.clip(i - j, None, a_max=2) * score + np.clip(i, 1, j + 1)


@score_mod
def branches(score, b, h, i, j):
    if i > j:
        slope = 0
    elif i == j:
        slope = 0.25
    else:
        slope = score * score
    if h == 1:
        return score
    return score - slope * (i - j) if b == 0 else slope * 2


@score_mod
def loops(score, b, h, i, j):
    total, factor = 0, 1
    for k in range(1, 5):
        if k == i:
            continue
        factor *= score
        total += factor / k
    while total > 1:
        total = total / 2
    return total


@score_mod
def swaps(score, b, h, i, j):
    x = y = score
    for _ in range(3):
        x, y = y, x + y * y
    return x * y


@score_mod
def reassigned(score, b, h, i, j):
    i += score
    j = j * 0.5
    score = score * i
    return score + j


@score_mod
def helpers(score, b, h, i, j):
    return gate(score) + gate(score * i, 0.5) * sigmoid(0.3) + sigmoid(h)


@score_mod
def extremes(score, b, h, i, j):
    return max(score, 0.4, score * score * i) + min(score, 1) + abs(score - 0.45) - abs(i - j) + max(i, j)


@score_mod
def steps(score, b, h, i, j):
    return score * math.floor(3 * score) + round(4 * score + i) + int(score * 10) * score + (score > 0.5) + score // 0.3


@score_mod
def logic(score, b, h, i, j):
    near = 0 <= i - j < 2 or (not i > j and j - i <= 1)
    return score * 1.5 if near and ~(i == 0) else score + near


@score_mod
def truth_values(score, b, h, i, j):
    either = (i > j) + (score > 0.5)
    return score * (1 + either) + (i > j) * (score > 0.3) * 2 - (either ^ True) / 3 + np.where(~either, score, 0)


@score_mod
def infinities(score, b, h, i, j):
    if score < -math.inf or score == float("inf"):
        return -float("inf")
    return max(score, float("-inf"), -np.inf)


@mask_mod
def causal(b, h, i, j):
    return i >= j


@mask_mod
def window(b, h, i, j):
    return abs(i - j) <= WINDOW and (j > 0 or i == 0)


@mask_mod
def blocks(b, h, i, j):
    if h % 2:
        return i // 2 == j // 2
    return (i - j) % CONFIG.window < 2


@mask_mod
def documents(b, h, i, j):
    return (DOCUMENTS[i % 6] == DOCUMENTS[j % 6]) & (i >= j) | (j == 0)


@mask_mod
def slanted(b, h, i, j):
    return np.logical_or(j * 0.3 < i, np.logical_not(b == 0))


@mask_mod
def everything(b, h, i, j):
    return True


DOCUMENTS = np.array([0, 0, 1, 1, 1, 2], np.int32)
