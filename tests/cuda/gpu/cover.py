"""Which tests run where kernels are many: as few kernels as have all pairs of values that kernels are built with.

A build's arguments are values: a Config's fields, the dtype, a width, an option. Pairs are of two values of one build.
Most errors show with one value or with two together (Kuhn, Wallace, Gallo 2004,
https://doi.org/10.1109/TSE.2004.24), so a test is taken while it brings a pair that no other has. The rungs
naive and simt are plain code: of these each value is taken once. A test whose kernels others need runs
too: it costs no compiling.

A kernel also reads what it is not built with, such as the stride of a table per sequence. So a test's calls have facts,
too: which arrays they have, and how many axes of each are longer than 1.
"""

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
# new pairs that count as much as a new fact. With 700 kernels, tests have 92.9 % of all pairs and 1,019 of 1,123 facts.
# If a fact counts as 3 pairs, 93.5 % and 973; as 25, 90.2 % and 1,092
FACT = 6


def values_of(kernel: Kernel) -> frozenset[Value]:
    """The values that a kernel is built with."""
    build = kernel.made_by
    values = [*enumerate(build.args), *sorted(build.keywords.items())]  # type: ignore[union-attr]
    name = kernel.identity.partition("(")[0]
    return frozenset((name, *found) for place, value in values for found in _flat(str(place), value))


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


Facts = frozenset[tuple[Any, ...]]


def choose(
    needs: Mapping[str, frozenset[str]],
    kernels: Mapping[str, Kernel],
    given: Iterable[str],
    most: int,
    facts: Mapping[str, Facts] | None = None,
) -> Chosen:
    """The kernels given, and those of tests that are taken, the most new pairs and facts a kernel first, up to `most`
    kernels.

    needs: the kernels of each test. facts: what a test's calls have that no kernel is built with.
    """
    facts = facts or {}
    has = {name: covered_by(kernel) for name, kernel in kernels.items()}
    chosen, tests = set[str](), list[str]()
    seen, seen_facts = set[frozenset[Value]](), set[tuple[Any, ...]]()
    users: dict[str, list[str]] = {}
    for test, wanted in needs.items():
        for name in wanted:
            users.setdefault(name, []).append(test)

    def take(names: frozenset[str]) -> None:
        """Take kernels, and note what the tests have that need no others."""
        new = names - chosen
        chosen.update(new)
        seen.update(*(has[name] for name in new if name in has))
        for test in {test for name in new for test in users.get(name, ())}:
            if needs[test] <= chosen:
                seen_facts.update(facts.get(test, ()))

    def gain(test: str) -> float:
        new = needs[test] - chosen
        found = set[frozenset[Value]]().union(*(has[name] for name in new)) - seen
        new_facts = facts.get(test, frozenset()) - seen_facts
        return (FACT * len(new_facts) + len(found)) / len(new) if new else 0.0

    take(frozenset(given))
    # a gain only falls: what was best when it was last computed, and still is, is the best
    best = [(-float("inf"), test) for test in sorted(needs)]
    while best:
        _, test = heapq.heappop(best)
        found = gain(test)
        if found and best and found < -best[0][0]:
            heapq.heappush(best, (-found, test))
        elif found and len(chosen | needs[test]) <= most:
            take(needs[test])
            tests.append(test)
    every = set[frozenset[Value]]().union(*has.values())
    return Chosen(chosen, tests, len(seen) / len(every) if every else 1.0)
