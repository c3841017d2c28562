"""Which tests run where kernels are many: as few kernels as have all pairs of values that kernels are built with.

A build's arguments are values: a Config's fields, the dtype, a width, an option. Pairs are of two values of one build.
Most errors show with one value or with two together (Kuhn, Wallace, Gallo 2004,
https://doi.org/10.1109/TSE.2004.24), so a test is taken while it brings a pair that no other has. The rungs
naive and simt are plain code: of these each value is taken once. A test whose kernels others need runs
too: it costs no compiling.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import combinations
from typing import Any, NamedTuple

from dualops.cuda.compiler.backend import Kernel
from dualops.cuda.flash_attention.options import Having
from dualops.spec.attention import OPTIONS

Value = tuple[str, ...]  # a build, then the place of an argument and its value
PLAIN = (".naive", ".simt")


def values_of(kernel: Kernel) -> frozenset[Value]:
    """The values that a kernel is built with."""
    build = kernel.made_by
    told = [*enumerate(build.args), *sorted(build.keywords.items())]  # type: ignore[union-attr]
    name = kernel.identity.partition("(")[0]
    return frozenset((name, *found) for place, value in told for found in _flat(str(place), value))


def _flat(place: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Having):
        there = {variant.option.name: repr(variant.facts) for variant in value.variants}
        yield from ((f"{place}.{option.name}", there.get(option.name, "")) for option in OPTIONS)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _flat(f"{place}.{field.name}", getattr(value, field.name))
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from _flat(f"{place}.{number}", each)
    else:
        yield place, repr(value)


def covered_by(kernel: Kernel) -> frozenset[frozenset[Value]]:
    """What a kernel's tests cover: its values and, unless its rung is plain, their pairs."""
    values = sorted(values_of(kernel))
    alone = {frozenset([value]) for value in values}
    plain = any(rung in kernel.identity.partition("(")[0] for rung in PLAIN)
    return frozenset(alone if plain else alone | {frozenset(pair) for pair in combinations(values, 2)})


class Chosen(NamedTuple):
    """The kernels that are compiled, the tests that they are taken for, and what share of all pairs they have."""

    kernels: set[str]
    tests: list[str]
    share: float


def choose(
    needs: Mapping[str, frozenset[str]], kernels: Mapping[str, Kernel], given: Iterable[str], most: int
) -> Chosen:
    """The kernels given, and those of tests that are taken, the most new pairs a kernel first, up to `most` kernels.

    needs: the kernels of each test.
    """
    has = {name: covered_by(kernel) for name, kernel in kernels.items()}
    chosen, tests = set(given), list[str]()
    seen = set[frozenset[Value]]().union(*(has[name] for name in chosen if name in has))

    def gain(test: str) -> float:
        new = needs[test] - chosen
        found = set[frozenset[Value]]().union(*(has[name] for name in new)) - seen
        return len(found) / len(new) if found else 0.0

    # a gain only falls: what was best when it was last looked at, and still is, is the best
    best = [(-float("inf"), test) for test in sorted(needs)]
    while best:
        _, test = heapq.heappop(best)
        found = gain(test)
        if found and best and found < -best[0][0]:
            heapq.heappush(best, (-found, test))
        elif found and len(chosen | needs[test]) <= most:
            seen.update(*(has[name] for name in needs[test]))
            chosen |= needs[test]
            tests.append(test)
    every = set[frozenset[Value]]().union(*has.values())
    return Chosen(chosen, tests, len(seen) / len(every) if every else 1.0)
