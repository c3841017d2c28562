"""The pictures of dualops/cuda/matmul/README.md, drawn from what the code itself says and does in the simulator.

    python docs/draw_matmul.py            writes docs/matmul_*.png
    python docs/draw_matmul.py FOLDER     writes them there

A picture is a function that asks the code, and another that draws the answer. Nothing here is measured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it is run as a script

from docs.draw_attention import BLUE, GREY, HERE, INK, ORANGE, draw, new_figure
from docs.draw_softmax import PALE, require_simulator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# --- who owns what -------------------------------------------------------------------------------

LANE = 5
COLUMNS = 16  # of a warpgroup's result, in the picture


def owners(place: Callable[[int, int], tuple[int, int]], threads: int, rows: int, columns: int) -> np.ndarray:
    """The thread that holds each element of a matrix, as `tile.fragment` says. [rows, columns]"""
    found = np.full((rows, columns), -1)
    for thread in range(threads):
        for element in range(rows * columns // threads):
            found[place(thread, element)] = thread
    return found


def fragments() -> dict[str, np.ndarray]:
    """The owners of what a product of a warp reads and makes, and of the result of one of a warpgroup."""
    from dualops.cuda.tile import fragment

    return {
        "a [16, 16]": owners(fragment.left_16bit, 32, 16, 16),
        "b [16, 8]": owners(fragment.right_16bit, 32, 16, 8),
        "acc [16, 8]": owners(fragment.accumulator, 32, 16, 8),
        f"acc [64, {COLUMNS}]": owners(fragment.accumulator, 128, 64, COLUMNS),
    }


def draw_owners() -> Figure:
    from matplotlib.colors import ListedColormap

    figure = new_figure(9, 5.2)
    found = fragments()
    for axes, (title, held) in zip(figure.subplots(1, 4, width_ratios=(16, 8, 8, 12)), found.items()):
        of_warps = held.max() >= 32
        shades = held // 32 % 2 if of_warps else held // 4 % 2
        axes.imshow(np.where(held == LANE, 2, shades), cmap=ListedColormap([GREY, PALE, ORANGE]), aspect="auto")
        if of_warps:
            texts = {(16 * warp + 7.5, COLUMNS / 2 - 0.5): f"warp {warp}" for warp in range(4)}
        else:  # a lane's elements come in pairs, which share a register
            down, right = (1, 2) if held[0, 0] == held[0, 1] else (2, 1)
            pairs = np.ndenumerate(held[::down, ::right])
            texts = {(down * (i + 0.5) - 0.5, right * (j + 0.5) - 0.5): str(lane) for (i, j), lane in pairs}
        for (row, column), text in texts.items():
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=INK)
        rows, columns = held.shape
        axes.set_xticks(
            np.arange(0, columns + 1, 8) - 0.5, [str(column) for column in range(0, columns + 1, 8)], fontsize=8
        )
        axes.set_yticks(np.arange(0, rows + 1, 8) - 0.5, [str(row) for row in range(0, rows + 1, 8)], fontsize=8)
        axes.grid(color="white", linewidth=0.8)
        axes.tick_params(length=0)
        axes.set_title(title, fontsize=10)
    heading = f"Which lane holds what of a product of a warp (left), and of a warpgroup; orange: lane {LANE}"
    figure.suptitle(heading, fontsize=11)
    return figure


# --- the pipeline over time ----------------------------------------------------------------------

SLICES = 8
COPY, PRODUCT, START = 2.0, 1.0, 0.25  # how long they are taken to last: a slice's copy, its product, to begin that
STEPS = ("tensor_cores", "copies_ahead", "boxes", "roles")


class Event(NamedTuple):
    """What a thread did: "copy", "multiply", ...; with which slice, or with how many allowed in flight."""

    thread: int
    what: str
    number: int


class Span(NamedTuple):
    """A copy or a product of a slice, from when to when."""

    what: str
    slice: int
    begin: float
    end: float


class Recorder:
    """Replaces an object's verbs by ones that record the calls of the first thread of each warpgroup."""

    def __init__(self):
        self.events: list[Event] = []

    def count(self, what: str) -> int:
        """How often this thread did that."""
        from dualops.cuda import simulator

        return sum(event[:2] == (simulator.current().tid, what) for event in self.events)

    def noting(self, verb: Callable[..., Any], what: str, number: Callable[..., Any]) -> Callable[..., Any]:
        """The verb, which notes `number` of what it is given."""
        from dualops.cuda import simulator

        def noted(*args: Any) -> Any:
            if (thread := simulator.current().tid) % 128 == 0:
                self.events.append(Event(thread, what, int(number(*args))))
            return verb(*args)

        return noted

    def pipe(self, pipe: Any) -> Any:
        verbs = {"acquire": "copy", "wait": "arrived", "release": "release"}
        return pipe.but(**{name: self.noting(vars(pipe)[name], event, lambda _, i: i) for name, event in verbs.items()})

    def warpgroup_mma(self, mma: Any) -> Any:
        def next_slice(*_: Any) -> int:
            return self.count("multiply")

        return mma.but(
            start=self.noting(mma.start, "multiply", next_slice),
            add=self.noting(mma.add, "multiply", next_slice),
            wait=self.noting(mma.wait, "finish", lambda acc: 0),
            wait_but_one=self.noting(mma.wait_but_one, "finish", lambda acc: 1),
        )

    def slice_copies(self, copies: Any) -> Any:
        """A copy is noted when its source is asked for: a's and b's are two."""
        return copies.but(coming=self.noting(copies.coming, "half a copy", lambda part, terms, t: t))

    def warp_products(self, sums: Any, steps: int) -> Any:
        """A slice is `steps` products."""
        number = self.noting(sums.multiply, "step", lambda *_: self.count("step") // steps)
        return sums.but(multiply=number)


@cache
def recorded(name: str) -> tuple[int, list[Event]]:
    """How many stages a step has, and what its first block did in a product of SLICES slices.

    Tiles are as small as they go. Needs the simulator.
    """
    import ml_dtypes

    from dualops.cuda.matmul.sm80 import Sm80Config
    from dualops.cuda.matmul.sm90 import slices
    from dualops.cuda.matmul.sm90.config import Sm90Config
    from dualops.cuda.tile.warpgroup import warpgroup_mma
    from examples.ladder import matmul as ladder
    from examples.ladder.matmul import warpgroups, warps

    require_simulator("recorded")
    by_warps = {"tensor_cores": 1, "copies_ahead": 3}  # stages
    stages = by_warps.get(name, 4)
    config = Sm80Config(1, 2, 32, 32, 32, stages) if name in by_warps else Sm90Config(1, 64, stages, 64, group=1)
    note = Recorder()

    instead: list[tuple[Any, str, Callable[..., Any]]] = [
        (slices, "pipeline", after(slices.pipeline, note.pipe)),
        *((module, "warpgroup_mma", after(warpgroup_mma, note.warpgroup_mma)) for module in (slices, warpgroups)),
    ]
    if isinstance(config, Sm80Config):
        instead = [
            (warps, "slice_copies", after(warps.slice_copies, note.slice_copies)),
            (warps, "warp_products", after(warps.warp_products, partial(note.warp_products, steps=config.steps))),
            (warps, "cp_async_commit", note.noting(warps.cp_async_commit, "commit", lambda: 0)),
            (warps, "cp_async_wait_group", note.noting(warps.cp_async_wait_group, "arrived but", lambda n: n)),
        ]
    with ExitStack() as stack:
        for module, function, noted in instead:
            stack.enter_context(mock.patch.object(module, function, noted))
        launches: Any = ladder.STEPS[name].launches  # of what builds the kernel, here one that is not kept
        build = partial(launches.func, launches.args[0].__wrapped__)
        step = ladder.STEPS[name]._replace(config=config, launches=build)
        stack.enter_context(mock.patch.dict(ladder.STEPS, {name: step}))
        stack.enter_context(mock.patch.multiple(ladder.forward, plans={}, families={}))
        K = SLICES * config.block_k
        ladder.run_step(name, *(np.ones(shape, ml_dtypes.bfloat16) for shape in ((8, K), (K, 8))))
    return stages, list(by_slices(note.events))


def after(function: Callable[..., Any], made: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function that returns what is made of what the other returns."""
    return lambda *args, **named: made(function(*args, **named))


def by_slices(events: Iterable[Event]) -> Iterator[Event]:
    """The same events, where a copy or a product in several parts is one, and waits are for slices.

    What is committed is one slice after the other.
    """
    seen, committed = set(), 0
    for event in events:
        thread, what, number = event
        if what == "commit":
            committed += 1
        elif what == "arrived but":
            yield Event(thread, "arrived", committed - number - 1)
        elif what == "half a copy":
            if event not in seen:
                yield Event(thread, "copy", number)
        elif what == "step":  # the threads of a warp are held until it is over
            if event not in seen:
                yield from (
                    Event(thread, "multiply", number),
                    Event(thread, "finish", 0),
                    Event(thread, "release", number),
                )
        else:
            yield event
        seen.add(event)


def replayed(stages: int, events: Sequence[Event]) -> list[Span]:
    """When it happens, if copies and products last COPY, START and PRODUCT, and the tensor cores do one at a time."""
    waiting = {thread: [e for e in events if e.thread == thread] for thread in sorted({e.thread for e in events})}
    clock = dict.fromkeys(waiting, 0.0)
    landed: dict[int, float] = {}
    left = dict.fromkeys(range(-stages, 0), 0.0)
    products: list[float] = []
    spans: list[Span] = []
    while left_over := sum(map(len, waiting.values())):
        for thread, coming in waiting.items():
            while coming:
                what, number = coming[0][1:]
                needs = {"copy": (left, number - stages), "arrived": (landed, number)}.get(what)
                if needs is not None and needs[1] not in needs[0]:
                    break  # another thread must run first
                if needs is not None:
                    clock[thread] = max(clock[thread], needs[0][needs[1]])
                now = clock[thread]
                if what == "copy":
                    landed[number] = now + COPY
                    spans.append(Span(what, number, now, now + COPY))
                elif what == "multiply":
                    begin = max(now + START, products[-1] if products else 0.0)
                    products.append(begin + PRODUCT)
                    spans.append(Span(what, number, begin, begin + PRODUCT))
                elif what == "finish" and len(products) > number:
                    clock[thread] = max(now, products[-1 - number])
                elif what == "release":
                    left[number] = now
                coming.pop(0)
        if left_over == sum(map(len, waiting.values())):
            raise RuntimeError(f"nobody goes on: {waiting}")
    return spans


def draw_pipeline() -> Figure:
    figure = new_figure(9, 5.6)
    axes = figure.subplots(len(STEPS), 1, sharex=True, height_ratios=[recorded(name)[0] + 1.6 for name in STEPS])
    for one, name in zip(axes, STEPS):
        stages, events = recorded(name)
        for what, number, begin, end in replayed(stages, events):
            row, colour = (stages, ORANGE) if what == "multiply" else (number % stages, BLUE)
            one.barh(row, end - begin - 0.05, left=begin, height=0.8, color=colour)
            one.text((begin + end) / 2, row, str(number), ha="center", va="center", fontsize=7, color="white")
        labels = [f"stage {stage}" for stage in range(stages)]
        one.set_yticks(range(stages + 1), [*labels, "product"], fontsize=8)
        one.invert_yaxis()
        one.set_title(name, fontsize=10, loc="left")
        one.grid(axis="x", alpha=0.4)
        one.set_axisbelow(True)
        one.tick_params(length=0)
    axes[-1].set_xlabel("time, in products of a slice")
    figure.suptitle("Slices on their way (blue) and multiplied (orange)", fontsize=12)
    return figure


# --- all of them ---------------------------------------------------------------------------------

PICTURES = {"matmul_owners.png": draw_owners, "matmul_pipeline.png": draw_pipeline}

if __name__ == "__main__":
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")  # before anything imports Numba
    for written in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE, PICTURES):
        print(written)
