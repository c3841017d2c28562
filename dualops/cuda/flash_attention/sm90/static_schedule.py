"""Pieces of work that are all alike, and those that are not: of these a block draws the next one when it is done."""

from __future__ import annotations

from ....spec import ArrayMeta, Problem
from ...launch.device_words import build_writer
from ...launch.step import Step
from ..arguments import Variant, is_varlen
from .config import BLOCK_MASK, Sm90Config


def is_static(config: Sm90Config, variant: Variant) -> bool:
    """Whether each has all keys of a sequence, and all sequences as many."""
    limits = {"band", BLOCK_MASK} & {option.name for option, _ in variant.having.variants}
    return not (config.split or variant.varlen or limits)


def counter_of(problem: Problem, alike: bool) -> dict[str, ArrayMeta]:
    """The array that counts how many pieces were drawn; in varlen by each of two launches."""
    count = 1 + is_varlen(problem)
    return {} if alike else {"counter": ArrayMeta((count,), "int64", (1,), problem.arrays["q"].device, 0)}


def word_of(config: Sm90Config, variant: Variant) -> int:
    """Which of the counter's words a launch has: 1 where it splits keys of varlen, beside another launch's 0."""
    return int(config.split and variant.varlen)


def cleared(count: int) -> Step:
    """The launch that clears so many of the counter's words."""
    return Step(build_writer(count), (1,), ("counter", 0, (0,) * count))


def after_counter(step: Step, alike: bool) -> list[Step]:
    """A launch whose blocks draw from the counter, after that which clears it."""
    return [step] if alike else [cleared(1), step]
