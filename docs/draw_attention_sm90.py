"""The pictures of the Hopper rung in dualops/cuda/flash_attention/README.md, drawn from what the kernel does.

    python docs/draw_attention_sm90.py            writes docs/attention_sm90_*.png
    python docs/draw_attention_sm90.py FOLDER     writes them there

A picture is a function that asks the code, and another that draws the answer. Nothing here is measured.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it is run as a script

from docs.draw_attention import BLUE, GREEN, GREY, HERE, ORANGE, draw, new_figure
from docs.draw_matmul import after
from docs.draw_softmax import PALE, require_simulator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# --- who does what, when -------------------------------------------------------------------------

TILES, PIECES, WARPGROUPS = 5, 2, 2  # tiles of keys in a piece of work, such pieces, and who multiplies
STAGES = {"q": 2, "k": 2, "v": 2}
# how long they are taken to last: a tile's copy, a product, a tile's softmax, the end of a piece
LASTS = {"copy": 1.5, "qk": 1.0, "pv": 1.0, "softmax": 1.8, "store": 1.2}


class Event(NamedTuple):
    """What a warpgroup did, and with which filling, or with how many products allowed in flight."""

    warpgroup: int
    what: str
    number: int = 0


class Span(NamedTuple):
    """What took time: where, what, the how manieth of its kind in this place, from when to when."""

    place: str
    what: str
    warpgroup: int
    number: int
    begin: float
    end: float


@cache
def recorded() -> list[Event]:
    """What the first thread of each warpgroup of a block does. Needs the simulator."""
    import ml_dtypes

    from dualops import cuda
    from dualops.cuda import flash_attention as operator, simulator
    from dualops.cuda.flash_attention import sm90
    from dualops.cuda.flash_attention.sm90 import forward, loads, output
    from dualops.cuda.flash_attention.sm90.config import Sm90Config
    from dualops.cuda.launch.operation import OPERATIONS

    require_simulator("recorded")
    events: list[Event] = []

    def noted(noun: Any, **verbs: tuple[str, Callable[..., int]]) -> Any:
        def noting(verb: Callable[..., Any], what: str, number: Callable[..., int]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                thread = simulator.current().tid
                if thread % 128 == 0:
                    events.append(Event(thread // 128, what, int(number(*args))))
                return verb(*args)

            return call

        return noun.but(**{name: noting(getattr(noun, name), *event) for name, event in verbs.items()})

    names = iter(STAGES)

    def pipe(made: Any) -> Any:
        name = next(names)
        return noted(
            made,
            acquire=(f"{name} copy", lambda bars, i: i),
            wait=(f"{name} arrived", lambda bars, i: i),
            release=(f"{name} left", lambda bars, i: i),
        )

    def nothing(*args: Any) -> int:
        return 0

    def one(*args: Any) -> int:
        return 1

    untaken = forward.turns(1)  # of the first tile of a work item

    def turns(turn: Any) -> Any:
        if turn is untaken:
            return turn
        return noted(turn, begin=("begin", nothing), take=("take", nothing), give=("give", nothing))

    nouns: dict[tuple[Any, str], Callable[[Any], Any]] = {
        (loads, "pipeline"): pipe,
        (forward, "register_a"): lambda mma: noted(
            mma, start=("qk", nothing), wait=("finish", nothing), wait_but_one=("finish", one)
        ),
        (forward, "register_mma"): lambda mma: noted(mma, add=("pv", nothing), wait=("finish", nothing)),
        (forward, "softmax_rows"): lambda rows: noted(rows, exp2=("softmax", nothing)),
        (forward, "turns"): turns,
        (output, "output_of"): lambda made: noted(made, store=("store", nothing)),
    }
    config = Sm90Config(WARPGROUPS, 16, held=True)
    with ExitStack() as stack:
        for (module, name), made in nouns.items():
            stack.enter_context(mock.patch.object(module, name, after(getattr(module, name), made)))
        instead = {"configs": lambda *_: iter([(config, "small")]), "build_forward": unwrap(sm90.build_forward)}
        stack.enter_context(mock.patch.multiple(sm90, **instead))
        for operation in OPERATIONS[operator.__name__.rpartition(".")[2]]:
            stack.enter_context(mock.patch.multiple(operation, plans={}, families={}))
        q, k = (np.ones((1, 1, S, 64), ml_dtypes.bfloat16) for S in (PIECES * config.block_q, TILES * config.block_kv))
        cuda.flash_attention(q, k, k, kernel="sm90")
    return events


class Replay:
    """When it happens, if all lasts as LASTS says and the tensor cores multiply one product at a time."""

    def __init__(self, events: Sequence[Event]):
        self.coming = {who: [e for e in events if e.warpgroup == who] for who in range(WARPGROUPS + 1)}
        self.clock = dict.fromkeys(self.coming, 0.0)
        self.landed: dict[tuple[str, int], float] = {}
        self.left: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.turns: dict[int, list[float]] = defaultdict(list)
        self.products: dict[int, list[float]] = defaultdict(list)  # when a warpgroup's end
        self.busy = 0.0  # the tensor cores, until then
        self.spans: list[Span] = []

    def run(self) -> list[Span]:
        while any(self.coming.values()):
            ready = [(when, who) for who, coming in self.coming.items() if coming and (when := self.when(coming[0]))]
            if not ready:
                raise RuntimeError(f"nobody goes on: {self.coming}")
            _, who = min(ready)
            self.take(self.coming[who].pop(0))
        return self.spans

    def when(self, event: Event) -> tuple[float] | None:
        """When it can happen, None if that is not known yet."""
        who, what, number = event
        pipe, _, step = what.partition(" ")
        needs = 0.0
        if step == "copy" and number >= STAGES[pipe]:
            left = self.left[pipe, number - STAGES[pipe]]
            if len(left) < WARPGROUPS:
                return None
            needs = max(left)
        elif step == "arrived":
            if (pipe, number) not in self.landed:
                return None
            needs = self.landed[pipe, number]
        elif what == "take":
            if not self.turns[who]:
                return None
            needs = self.turns[who][0]
        elif what == "finish" and len(self.products[who]) > number:
            needs = self.products[who][-1 - number]
        return (max(self.clock[who], needs),)

    def take(self, event: Event) -> None:
        who, what, number = event
        found = self.when(event)
        assert found is not None
        now = self.clock[who] = found[0]
        pipe, _, step = what.partition(" ")
        if step == "copy":
            self.landed[pipe, number] = now + LASTS["copy"]
            self.add(f"{pipe.upper()}, stage {number % STAGES[pipe]}", pipe, who, number, now, LASTS["copy"])
        elif step == "left":
            self.left[pipe, number].append(now)
        elif what in ("qk", "pv"):
            begin = max(now, self.busy)
            self.busy = begin + LASTS[what]
            self.products[who].append(self.busy)
            self.add("tensor cores", what, who, self.number(what, who), begin, LASTS[what])
        elif what in ("softmax", "store"):
            self.clock[who] = now + LASTS[what]
            self.add(f"warpgroup {who}", what, who, self.number(what, who), now, LASTS[what])
        elif what == "begin" and who == WARPGROUPS - 1:
            self.turns[0].append(now)
        elif what == "take":
            self.turns[who].pop(0)
        elif what == "give":
            self.turns[(who + 1) % WARPGROUPS].append(now)

    def number(self, what: str, who: int) -> int:
        """How many there were before."""
        return sum(span.what == what and span.warpgroup == who for span in self.spans)

    def add(self, place: str, what: str, who: int, number: int, begin: float, lasts: float) -> None:
        self.spans.append(Span(place, what, who, number, begin, begin + lasts))


PLACES = (
    "Q, stage 0",
    "Q, stage 1",
    "K, stage 0",
    "K, stage 1",
    "V, stage 0",
    "V, stage 1",
    "tensor cores",
    "warpgroup 0",
)


def schedule() -> list[Span]:
    return Replay(recorded()).run()


def draw_schedule() -> Figure:
    from matplotlib.patches import Patch

    figure = new_figure(10, 3.6)
    rows = [*PLACES, *(f"warpgroup {number}" for number in range(1, WARPGROUPS))]
    axes = figure.subplots()
    for place, what, who, number, begin, end in schedule():
        colour = BLUE if what in STAGES else (ORANGE, GREEN)[who]
        row, light = rows.index(place), what in ("pv", "store")
        axes.barh(row, end - begin - 0.05, left=begin, height=0.8, color=colour, alpha=0.6 if light else 1.0)
        letter = {"qk": "S", "pv": "O", "softmax": "P", "store": "o"}.get(what, "")
        shown = number if what in ("store", "q") else number % TILES
        axes.text((begin + end) / 2, row, f"{letter}{shown}", ha="center", va="center", fontsize=6.5, color="white")
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.4)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.set_xlabel("time, in products of a warpgroup and a tile")
    named = {"copies": BLUE, "warpgroup 0": ORANGE, "warpgroup 1": GREEN}
    patches = [Patch(color=colour, label=label) for label, colour in named.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.suptitle(
        "S = Q @ K.T of a tile of keys, P its softmax, O += P @ V, o the end of a piece of work", fontsize=10
    )
    return figure


# --- the walk ------------------------------------------------------------------------------------

HEADS, LENGTH, BLOCKS = 2, 1024, 5  # BLOCKS: that run at once, in the picture
MASKS: dict[str, dict[str, Any]] = {"causal=True": {"causal": True}}
MASKS["causal=True, window=(255, 0)"] = {"causal": True, "window": (255, 0)}


class Piece(NamedTuple):
    """A piece of work: its head, its first query, and the tiles of keys that it has."""

    head: int
    m0: int
    first: int
    tiles: int


@cache
def pieces(title: str) -> tuple[list[Piece], int, int]:
    """All pieces of a mask in the order in which they are drawn, as the kernel's own verbs number them; and the sizes
    of a tile. Needs the simulator.
    """
    from dualops.cuda.flash_attention.arguments import sizes, variant
    from dualops.cuda.flash_attention.sm90.config import configs
    from dualops.cuda.flash_attention.tile_scheduler import tiled_work, walk_by_queries
    from dualops.spec import ArrayMeta, flash_attention as SPEC
    from dualops.spec.meta import contiguous_strides

    require_simulator("pieces")
    shape = (1, HEADS, LENGTH, 128)
    meta = ArrayMeta(shape, "bfloat16", contiguous_strides(shape), "cuda:0", 0)
    problem = SPEC.bind(dict.fromkeys("qkv", meta), MASKS[title])
    config, _ = next(configs(128, 128, ["band"]))
    walk = walk_by_queries(config, variant(problem))
    work = tiled_work(problem, HEADS, sizes(problem))
    tasks = [walk.task(number, work) for number in range(walk.total(work.extent))]
    drawn = [Piece(task.h, task.m0, task.first, int(task.count)) for task in tasks]
    return drawn, config.block_q, config.block_kv


def drawn_from_counter(lengths: Sequence[int], blocks: int) -> Iterator[tuple[int, int, int]]:
    """Yield (block, piece, start) if the first idle block draws the next piece, and a tile takes 1."""
    free = [0] * blocks
    for piece, length in enumerate(lengths):
        block = min(range(blocks), key=free.__getitem__)
        yield block, piece, free[block]
        free[block] += length


def draw_walk() -> Figure:
    figure = new_figure(10, 6.4)
    axes = figure.subplots(2, 2, width_ratios=(1, 1.5))
    for (left, right), title in zip(axes, MASKS):
        drawn, block_q, block_kv = pieces(title)
        order = [number for number, piece in enumerate(drawn) if piece.head == 0]
        grid = np.zeros((LENGTH // block_q, LENGTH // block_kv))
        for number in order:
            piece = drawn[number]
            grid[piece.m0 // block_q, piece.first : piece.first + piece.tiles] = 1
            for step in range(piece.tiles):
                key = piece.first + piece.tiles - 1 - step
                left.text(key, piece.m0 // block_q, str(step), ha="center", va="center", fontsize=7, color="white")
        left.imshow(np.where(grid == 1, 1.0, 0.0), cmap=_colours(GREY, BLUE), vmin=0, vmax=1, aspect="auto")
        left.set_yticks(range(len(grid)), [f"piece {number}" for number in sorted(order, reverse=True)], fontsize=8)
        left.set_xticks(range(grid.shape[1]), [str(tile * block_kv) for tile in range(grid.shape[1])], fontsize=7)
        left.set_title(f"{title}: tiles of head 0, in their order", fontsize=9)
        left.tick_params(length=0)
        _draw_blocks(right, drawn)
    axes[1][0].set_xlabel("first key of a tile")
    axes[1][1].set_xlabel("time, in tiles")
    figure.suptitle(f"The longest pieces first, {HEADS} heads, {BLOCKS} blocks at once", fontsize=11)
    return figure


def _draw_blocks(axes: Axes, drawn: Sequence[Piece]) -> None:
    """Who draws which piece when."""
    for block, piece, begin in drawn_from_counter([piece.tiles for piece in drawn], BLOCKS):
        length, colour = drawn[piece].tiles, (ORANGE, PALE)[drawn[piece].head]
        axes.barh(block, length - 0.1, left=begin, height=0.8, color=colour)
        axes.text(begin + length / 2, block, str(piece), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(BLOCKS), [f"block {block}" for block in range(BLOCKS)], fontsize=8)
    axes.invert_yaxis()
    axes.set_title("pieces, drawn from a counter; colours: heads", fontsize=9)
    axes.tick_params(length=0)


def _colours(*names: str) -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap(names)


# --- all of them ---------------------------------------------------------------------------------

PICTURES = {"attention_sm90_schedule.png": draw_schedule, "attention_sm90_walk.png": draw_walk}

if __name__ == "__main__":
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")  # before anything imports Numba
    for written in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE, PICTURES):
        print(written)
