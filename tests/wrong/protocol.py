"""softmax's ring kernels with one mistake in their protocol. The simulator must reject all of them.

A mutant replaces `ring`, `parts` or `start_cluster` while the kernel is built and run, with one verb changed. Mutants
only run in the simulator: on a GPU most of them hang, or give the right result by chance.
mutants.py derives the mutants with a single wrong step, for every kernel. Those of protocol_ring.py and
protocol_parts.py are other mistakes: two that fit together, a step too many, or a step that only some threads or stages
execute.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from dualops.cuda.compiler.backend import Kernel
from dualops.cuda.launch.step import flat
from dualops.cuda.rows import chunks, exchange
from dualops.cuda.rows.chunks import ChunksConfig
from dualops.cuda.rows.operator import RowArrays, Rows
from dualops.cuda.simulator import Deadlock
from dualops.cuda.softmax.operator import Softmax
from dualops.cuda.tile.ring import parts, ring, start_cluster
from dualops.spec import OPERATORS, Case
from dualops.spec.meta import Strided
from tests.checks import Rejected, check

DTYPE = "float64"
ROWS = 6  # all for one cluster
# each stage is filled several times, and there are enough stages for a warp to be a row ahead of another
CONFIG = ChunksConfig(warps=2, vectors=1, stages=4, cluster=1, chunks=2)

# patterns of the messages that reject mutants
NAN, VALUE = r"(y|dx): nan at", r"max error .* limit"
WRONG = f"{NAN}|{VALUE}"
STUCK = r"Deadlock: \d+ threads wait forever: block .* at mbarrier \d, phase \d: threads"
TOO_MANY = r"mbarrier \d: more than \d arrivals in phase \d"
NOT_THERE = r"mbarrier \d: used before it is initialised"


class Sizes(NamedTuple):
    """The sizes of the kernel that a mutant needs."""

    stages: int
    warps: int
    cluster: int

    @property
    def parts(self) -> int:
        """Number of pairs that are merged to a row's result."""
        return self.warps * self.cluster


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    name: str
    of: str  # "ring", "parts" or "start_cluster"
    change: Callable[[Any, Sizes], Any]  # (the right object) -> its replacement, or the replaced verbs
    reason: str  # a pattern of the message
    clusters: tuple[int, ...]


MUTANTS: dict[str, Mutant] = {}
DIRECTIONS = ("forward", "backward")


def add(
    name: str, of: str, change: Callable[[Any, Sizes], Any], reason: str, clusters: tuple[int, ...] = (1, 2)
) -> None:
    """Add a mutant for these cluster sizes."""
    MUTANTS[name] = Mutant(name, of, change, reason, clusters)


def mutant(
    of: str, reason: str, clusters: tuple[int, ...] = (1, 2)
) -> Callable[[Callable[[Any, Sizes], Any]], Callable[[Any, Sizes], Any]]:
    """Decorate a function that returns wrong verbs for the right ones: add a mutant of its name."""

    def decorate(change: Callable[[Any, Sizes], Any]) -> Callable[[Any, Sizes], Any]:
        add(change.__name__, of, change, reason, clusters)
        return change

    return decorate


@contextmanager
def mutated(one: Mutant | None, config: ChunksConfig, backward: bool) -> Iterator[Kernel]:
    """Yield the kernel, rebuilt with the mutant; None: without a mutant."""
    sizes = Sizes(config.stages, config.warps, config.cluster)

    def instead(of: str, right: Any) -> Any:
        if one is None or one.of != of:
            return right
        changed = one.change(right, sizes)
        return right.but(**changed) if isinstance(changed, dict) else changed

    replaced = {
        "ring": lambda *sizes: instead("ring", ring(*sizes)),
        "start_cluster": instead("start_cluster", start_cluster),
    }
    build: Any = chunks.build
    not_kept: Any = exchange.in_cluster
    replaced["in_cluster"] = not_kept.__wrapped__
    with (
        mock.patch.multiple(chunks, **replaced),
        mock.patch.object(exchange, "parts", lambda *sizes: instead("parts", parts(*sizes))),
    ):
        yield build.__wrapped__(config, Softmax(DTYPE, backward))


def rejection(one: Mutant | None, cluster: int, backward: bool) -> str | None:
    """Return why the mutant is rejected; None if it passes."""
    config = replace(CONFIG, cluster=cluster)
    names = ["dx", "y", "dy"] if backward else ["y", "x"]
    columns = config.kept(DTYPE)
    case = Case("protocol", DTYPE, {"x": (ROWS, columns)}, seed=cluster)

    with mutated(one, config, backward) as kernel:

        def run(*arrays: np.ndarray, out: np.ndarray) -> None:
            pointers = [flat(array, name) for name, array in zip(names, (out, *arrays), strict=True)]
            launch = kernel[cluster, kernel.threads, 0, config.staged(DTYPE, 2 if backward else 1).nbytes]
            y, *inputs = (Strided(pointer, (columns,)) for pointer in pointers)
            arrays = RowArrays(y, y, *inputs, *[y] * (2 - len(inputs)))
            launch(arrays, (), Rows(ROWS, columns, (ROWS,)), columns // cluster)

        try:
            check(OPERATORS["softmax"], case, run, backward=backward, ways=("given",))
        except (Rejected, IndexError, Deadlock, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return None
