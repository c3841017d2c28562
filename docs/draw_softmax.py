"""The pictures of dualops/cuda/softmax/README.md, drawn from what the kernels do in the simulator.

    python docs/draw_softmax.py            writes docs/softmax_*.png
    python docs/draw_softmax.py FOLDER     writes them there

A picture is a function that asks the code, and another that draws the answer. Nothing here is measured.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it is run as a script

from docs.draw_attention import BLUE, GREY, HERE, ORANGE, draw, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dualops.cuda.launch.step import Step

PALE = "#f6d9bd"


# --- who reads what ------------------------------------------------------------------------------

M, N, SHOWN = 32, 128, 8  # rows of x, their float32 elements, rows in the picture
SECTOR = 8  # elements in 32 bytes, of which memory sends all or nothing
THREAD = 5


class Reads(NamedTuple):
    """What the threads of the first block read of x. [M, N]"""

    first: np.ndarray  # bool: by the first load of its warp
    fetched: np.ndarray  # bool: in a sector that this load touches
    own: np.ndarray  # bool: by thread THREAD
    times: int  # that an element is read
    loads: int  # of a thread


def steps_of_a_warp() -> dict[str, Step]:
    """The launches of all steps for x, with blocks of one warp."""
    from dualops.cuda.rows.reread import LongRowsConfig
    from dualops.cuda.softmax.naive import NaiveConfig
    from examples.ladder.softmax import STEPS
    from examples.ladder.softmax.kernels import KeepConfig, ReadAgainConfig

    configs = {
        "thread_a_row": NaiveConfig(32),
        "tree": ReadAgainConfig(32, "tree"),
        "shuffles": ReadAgainConfig(32, "shuffles"),
        "registers": KeepConfig(32, N // 32, False),
        "vectors": KeepConfig(32, N // 128, True),
        "online": LongRowsConfig(32, N // 128),
    }
    return {name: STEPS[name].launch(configs[name], "float32", M, N) for name in STEPS}


def reads(step: Step) -> Reads:
    """Run the first block on an x that notes who reads it. Needs the simulator."""
    from dualops.cuda import simulator
    from dualops.cuda.launch.step import flat, leaves, nested

    require_simulator("reads")
    seen: list[tuple[int, int, int]] = []  # thread, element, elements of this load

    class Watched(simulator.Pointer):
        def __getitem__(self, index: int) -> Any:
            seen.append((simulator.current().tid, index, 1))
            return super().__getitem__(index)

        def first(self, index: int, count: int) -> int:
            seen.append((simulator.current().tid, index, count))
            return super().first(index, count)

    x = flat(np.random.default_rng(0).standard_normal((M, N), np.float32), "x")
    arrays = {"x": Watched(x.data, "x"), "y": flat(np.empty((M, N), np.float32), "y")}
    args = nested(step.args, (arrays.get(arg) if isinstance(arg, str) else arg for arg in leaves(step.args)))
    simulator.launch(step.kernel.function, (1,), (step.kernel.threads,), args)

    first, own, times = (np.zeros(M * N, int) for _ in "abc")
    started = set()
    for thread, index, count in seen:
        taken = slice(index, index + count)
        times[taken] += 1
        own[taken] |= thread == THREAD
        first[taken] |= thread not in started
        started.add(thread)
    fetched = np.repeat(first.reshape(-1, SECTOR).any(axis=1), SECTOR)
    first, fetched, own = (array.astype(bool).reshape(M, N) for array in (first, fetched, own))
    (often,) = set(times[times > 0].tolist())
    return Reads(first, fetched, own, often, sum(thread == THREAD for thread, _, _ in seen))


def draw_reads() -> Figure:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    found = {name: reads(step) for name, step in steps_of_a_warp().items()}
    same_reads: dict[bytes, list[str]] = {}  # steps that read the same places
    for name, one in found.items():
        same_reads.setdefault(one.first.tobytes() + one.own.tobytes(), []).append(name)
    figure = new_figure(9, 1.6 * len(same_reads) + 0.7)
    colours = ListedColormap([GREY, BLUE, PALE, ORANGE])
    panels = figure.subplots(len(same_reads), 1)
    for axes, names in zip(panels, same_reads.values()):
        one = found[names[0]]
        kinds = np.where(one.own, 1, np.where(one.first, 3, np.where(one.fetched, 2, 0)))[:SHOWN]
        axes.imshow(kinds, cmap=colours, vmin=0, vmax=3, aspect="auto", interpolation="nearest")
        grid_of(axes, range(0, N + 1, SECTOR), range(SHOWN + 1))
        often = ", ".join(str(found[name].times) for name in names)
        asked, sectors = int(one.first.sum()), int(one.fetched.sum()) // SECTOR
        title = (
            f"{', '.join(names)}: a load of a warp is {asked} elements, from {sectors} sectors. Readings of x: {often}"
        )
        axes.set_title(title, fontsize=10)
        axes.set_ylabel("row")
    panels[-1].set_xlabel(f"column; the lines are {4 * SECTOR} bytes apart")
    labels = (f"thread {THREAD}'s elements", "comes along, and was not asked for", "the first load of the first warp")
    patches = [Patch(color=colour, label=label) for colour, label in zip((BLUE, PALE, ORANGE), labels)]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.suptitle(f"Who reads what: float32, the first {SHOWN} of {M} rows, a block is one warp", fontsize=12)
    return figure


def grid_of(axes: Axes, columns: range, rows: range) -> None:
    """White lines between cells, at these borders."""
    axes.set_xticks([place - 0.5 for place in columns], ["" if place % 32 else str(place) for place in columns])
    axes.set_yticks([place - 0.5 for place in rows], ["" for _ in rows])
    axes.grid(color="white", linewidth=1.2)
    axes.tick_params(length=0)


# --- how threads agree ---------------------------------------------------------------------------

THREADS = 64  # two warps


class Moment(NamedTuple):
    """After a step of the way: how many threads' numbers are in what each has just made, 0 for an idle thread."""

    text: str
    holds: list[int]
    barrier: bool  # all wait for all before the next


def tree_moments() -> list[Moment]:
    """The sum of ones by tree, as the shared array sees it: what is written into it says how far a thread has come."""
    from dualops.cuda import simulator
    from dualops.cuda.compiler.backend import f64
    from examples.ladder.softmax.kernels import by_tree

    require_simulator("tree_moments")
    agree = by_tree(f64, THREADS)
    rounds: list[list[int]] = [[0] * THREADS for _ in range(THREADS.bit_length())]

    class Watched(simulator.Pointer):
        def __setitem__(self, index: int, value: float) -> None:
            rounds[int(value).bit_length() - 1][simulator.current().tid] = int(value)
            super().__setitem__(index, value)

    part = Watched(np.zeros(agree.size), "part")
    simulator.launch(lambda: agree.sum(1.0, part), (1,), (THREADS,), [])
    words = ["store"] + [f"add {THREADS >> step} away" for step in range(1, len(rounds))]
    return [Moment(text, holds, True) for text, holds in zip(words, rounds)]


def shuffle_moments() -> list[Moment]:
    """Return the same for shuffles: the lanes' numbers after each shuffle, the warps' results, and the end."""
    from dualops.cuda import simulator
    from dualops.cuda.compiler.backend import f64
    from dualops.cuda.tile.rows import lane_reductions
    from examples.ladder.softmax.kernels import by_shuffles

    require_simulator("shuffle_moments")
    agree = by_shuffles(f64, THREADS)

    def after(total: Any) -> list[int]:
        """What each thread gets from total(1)."""
        results = [0] * THREADS

        def ask() -> None:
            results[simulator.current().tid] = int(total(1.0))

        simulator.launch(ask, (1,), (THREADS,), [])
        return results

    lanes = [Moment(f"swap {1 << step} away", after(lane_reductions(f64, 2 << step).sum), False) for step in range(5)]
    left = [0] * THREADS

    class Watched(simulator.Pointer):
        def __setitem__(self, index: int, value: float) -> None:
            left[simulator.current().tid] = int(value)
            super().__setitem__(index, value)

    part = Watched(np.zeros(agree.size), "part")
    end = after(lambda one: agree.sum(one, part))
    return [*lanes, Moment("store", left, True), Moment("load and swap", end, False)]


def draw_agreement() -> Figure:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap, to_rgb

    levels = THREADS.bit_length()  # 1, 2, 4, ... THREADS
    blues = [tuple(1 - depth * (1 - np.array(to_rgb(BLUE)))) for depth in np.linspace(0.15, 1, levels)]
    colours, borders = ListedColormap([GREY, *blues]), BoundaryNorm(np.arange(levels + 2) - 0.5, levels + 1)
    figure = new_figure(9, 3.5)
    axes = figure.subplots(1, 2)
    for one, title, moments in zip(axes, ("tree", "shuffles"), (tree_moments(), shuffle_moments())):
        held = np.array([[count.bit_length() for count in moment.holds] for moment in moments])
        one.imshow(held, cmap=colours, norm=borders, aspect="auto")
        one.set_xticks(np.arange(0, THREADS + 1, 16) - 0.5, [str(thread) for thread in range(0, THREADS + 1, 16)])
        one.set_yticks(range(len(moments)), [moment.text for moment in moments])
        one.tick_params(length=0)
        for row, moment in enumerate(moments):
            one.axhline(row + 0.5, color=ORANGE if moment.barrier else "white", linewidth=2.4 if moment.barrier else 1)
        one.set_ylim(len(moments) - 0.42, -0.5)
        barriers = sum(moment.barrier for moment in moments)
        one.set_title(f"{title}: {barriers} barrier{'s' if barriers > 1 else ''}", fontsize=11)
        one.set_xlabel("thread")
    bar = figure.colorbar(ScalarMappable(borders, colours), ax=axes, ticks=range(levels + 1))
    bar.ax.set_yticklabels(["idle", *(str(1 << level) for level in range(levels))])
    bar.set_label("numbers in its sum")
    figure.suptitle(f"How {THREADS} threads add up; an orange line is a barrier", fontsize=12)
    return figure


# --- all of them ---------------------------------------------------------------------------------

PICTURES = {"softmax_reads.png": draw_reads, "softmax_agreement.png": draw_agreement}


def require_simulator(who: str) -> None:
    from dualops.cuda.compiler.backend import SIMULATED

    if not SIMULATED:
        raise RuntimeError(f"{who}: set NUMBA_ENABLE_CUDASIM=1 before Python starts")


if __name__ == "__main__":
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")  # before anything imports Numba
    for written in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE, PICTURES):
        print(written)
