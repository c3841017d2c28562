"""Kernels with one step of their protocol wrong, derived from the kernels. The simulator must reject them to the last.

This file lists only what can be wrong with an operand, by the operand's name. sites.py records the steps of the
unchanged kernel while it runs. Then each recorded step is mutated: it is left out, waits for the other parity, counts
one more or less, uses the next mbarrier or the next stage, announces or copies 16 bytes more or less, and so on.
problems.py has a small problem for every kernel that waits. harmless.py lists the few equivalent mutants, with reasons.

    python -m tests.wrong                        all mutants, a line per problem
    python -m tests.wrong softmax_ring           those of kernels whose name contains this
    python -m tests.wrong --share 6              one in six of the mutants to be killed, and of the orders, as in CI
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from dualops.cuda import simulator
from dualops.cuda.simulator import Deadlock, Pointer
from tests.checks import Rejected
from tests.shares import share_of
from tests.wrong.harmless import NEVER, reason
from tests.wrong.problems import Problem
from tests.wrong.remembered import remembered
from tests.wrong.sites import NUMBERS, Change, Seen, Site, Watch

ORDERS = (
    ("forward", 0),
    ("reversed", 0),
    ("awaited", 0),
    ("lagging", 0),
    ("lagging", 1),
    ("lagging", 2),  # the loading warps, if two warpgroups multiply
    ("straggling", 0),
    *(("shuffled", seed) for seed in range(8)),
    ("scattered", 0),
)
NOTED = 2  # the first orders: together they reach all steps of the unchanged kernel
WRONG = (Rejected, Deadlock, IndexError, OverflowError, RuntimeError)  # the errors that reject a mutant


@dataclass(frozen=True)
class Mutant:
    """A step that is changed."""

    site: Site
    path: str  # the verbs that lead to the step; #2 if the kernel reaches it by a second path
    what: str
    change: Change

    def __str__(self) -> str:
        return f"{self.site.kernel.co_name}:{self.site.line} {self.path}: {self.what}"


@dataclass(frozen=True)
class Verdict:
    """The outcome for a mutant."""

    acted: bool  # whether it did anything different from the kernel, in any order
    reason: str | None  # why it was rejected; None if it was not


@contextmanager
def prepared(problem: Problem, orders: Sequence[tuple[str, int]] = ORDERS) -> Iterator[list[Mutant]]:
    """Yield the mutants of a problem; inside the with statement they can be judged.

    First runs the unchanged kernel in each of these orders, and records its steps in the first ones. Raises its errors.
    """
    with problem.prepared(), remembered(problem.kernel):
        watch = Watch({problem.kernel})
        for number, (order, seed) in enumerate(orders):
            with simulator.order(order, seed), watch.launches() if number < NOTED else nullcontext():
                problem.run()
        yield list(_mutants(watch.seen or {}))


def verdict(problem: Problem, mutant: Mutant, kills: Counter[tuple[str, int]]) -> Verdict:
    """Run the mutant in each order of threads until one rejects it, and count the kill. Orders with most kills come
    first.
    """
    watch = Watch({problem.kernel}, mutant.site, mutant.change)
    with watch.launches():
        for order, seed in sorted(ORDERS, key=kills.__getitem__, reverse=True):
            with simulator.order(order, seed):
                try:
                    problem.run()
                except WRONG as error:
                    kills[order, seed] += 1
                    return Verdict(watch.acted, f"{type(error).__name__}: {error}")
    return Verdict(watch.acted, None)


@dataclass(frozen=True)
class Tally:
    """How many mutants of a problem were killed, and which were not."""

    problem: str
    killed: int
    harmless: int  # survived as listed in harmless.py
    wrong: tuple[str, ...]  # survived without being listed, or listed but killed

    @property
    def line(self) -> str:
        return f"{self.problem}: {self.killed} killed, {self.harmless} harmless by reason, {len(self.wrong)} wrong"


def judged(problem: Problem, sample: int | None = None, seed: int = 0, share: int = 1) -> Tally:
    """Run the problem's mutants.

    sample: run only this many, and the unchanged kernel in only two orders. share: run one in `share` of the mutants
    that must be killed (see `shares`), and the unchanged kernel in two orders and one in `share` of the others.
    """
    killed, harmless, wrong = 0, 0, []
    kills = Counter[tuple[str, int]]()
    others = share_of(ORDERS[NOTED:], share, str(problem)) if sample is None else ()
    with prepared(problem, (*ORDERS[:NOTED], *others)) as mutants:
        if bool(mutants) == (problem.kernel in NEVER):
            wrong.append(f"{problem}: {len(mutants)} mutants")
        if sample is not None and sample < len(mutants):
            mutants = random.Random(seed).sample(mutants, sample)
        if share > 1:
            mortal = [mutant for mutant in mutants if _excuse(problem, mutant) is None]
            mutants = share_of(mortal, share)
        for mutant in mutants:
            found = verdict(problem, mutant, kills)
            excuse = _excuse(problem, mutant)
            if (found.reason is None) != (excuse is not None):
                outcome = "survived" if found.acted else "did what the kernel does"
                wrong.append(f"{mutant}: {outcome if found.reason is None else f'not harmless, {found.reason}'}")
            elif excuse is not None:
                harmless += 1
            else:
                killed += 1
    return Tally(str(problem), killed, harmless, tuple(wrong))


def _excuse(problem: Problem, mutant: Mutant) -> str | None:
    """Return why the mutant is equivalent to the kernel; None if it is not."""
    return reason(problem.kernel, problem.case.name, f"{mutant.path}: {mutant.what}")


def _mutants(seen: dict[Site, Seen]) -> Iterator[Mutant]:
    ways: dict[str, list[Site]] = {}
    for site in sorted(seen, key=lambda site: [at for _, at in site.calls]):
        ways.setdefault(str(site), []).append(site)
    others = {number for each in seen.values() if "number" in each.parameters for number in each.values("number")}
    for text, sites in ways.items():
        for nth, site in enumerate(sites, 1):
            path = f"{text}#{nth}" if len(sites) > 1 else text
            changes = _numbered(seen[site]) if seen[site].verb else _wrong(seen[site], others)
            for what, change in changes:
                yield Mutant(site, path, what, change)


def _numbered(seen: Seen) -> Iterator[tuple[str, Change]]:
    """Yield changes of a verb that has a number: it gets that of the next copy, stage or row."""
    for name in seen.parameters:
        if name in NUMBERS:
            yield f"{name} + 1", partial(_more, name=name, more=1)


def _wrong(seen: Seen, numbers: set[int]) -> Iterator[tuple[str, Change]]:
    """Yield the changes of an instruction. numbers: those of the block's numbered barriers."""
    yield "left out", lambda operands: None
    for name in seen.parameters:
        if name == "parity":
            yield "parity inverted", lambda operands: {**operands, "parity": operands["parity"] ^ 1}
        elif name == "count":
            yield "count + 1", partial(_more, name=name, more=1)
            yield "count - 1", partial(_more, name=name, more=-1)
        elif name == "nbytes":
            yield "nbytes + 16", partial(_more, name=name, more=16)
            yield "nbytes - 16", partial(_more, name=name, more=-16)
        elif name == "threads":
            yield "a warp more", partial(_more, name=name, more=32)
            yield "a warp less", partial(_more, name=name, more=-32)
        elif name == "number" and numbers - {min(seen.values(name))}:
            other = min(numbers - {max(seen.values(name))})
            yield "the number of another barrier", partial(_one, index=name, at=other)
        elif name == "rank" and len({int(rank) for rank in seen.values(name)}) > 1:
            yield "to block 0 alone", lambda operands: {**operands, "rank": 0}
    yield from _places(seen)


def _places(seen: Seen) -> Iterator[tuple[str, Change]]:
    """Yield changes that move an array operand to another place of the same array."""
    first = seen.calls[0]
    for name, index in zip(seen.parameters, seen.parameters[1:], strict=False):
        array = first[name]
        if not isinstance(array, Pointer):
            continue
        if name == "bar":
            named = {int(at) for at in seen.values(index)}
            if len(named) > 1:
                yield "one mbarrier for all", partial(_one, index=index, at=min(named))
            if array.size > 1 and "count" not in seen.parameters:  # initialisation in another order is right too
                yield "the next mbarrier", partial(_next, array=name, index=index)
        elif "nbytes" in seen.parameters and any(call[name].key for call in seen.calls):
            yield f"{name}: the next stage", partial(_next, array=name, index=index, by_copy=True)
        else:
            yield f"{name}: 16 bytes behind", partial(_next, array=name, index=index, by=16 // array.itemsize)


def _more(operands: dict[str, Any], name: str, more: int) -> dict[str, Any]:
    return {**operands, name: operands[name] + more}


def _one(operands: dict[str, Any], index: str, at: int) -> dict[str, Any]:
    return {**operands, index: at}


def _next(operands: dict[str, Any], array: str, index: str, by: int = 1, by_copy: bool = False) -> dict[str, Any]:
    """Move an index, modulo the array's size; by_copy: by the size of the copy."""
    pointer, at = operands[array], int(operands[index])
    if by_copy:
        by = int(operands["nbytes"]) // pointer.itemsize
    after = (at + by) % pointer.size
    return {**operands, index: after}
