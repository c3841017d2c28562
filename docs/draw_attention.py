"""The pictures of dualops/cuda/flash_attention/README.md, drawn from what the code itself says.

    python docs/draw_attention.py            writes docs/flash_attention_*.png
    python docs/draw_attention.py FOLDER     writes them there

A picture is a function that asks the code, and another that draws the answer. Nothing here is measured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dualops.reference._attention import Options

HERE = Path(__file__).parent
BLOCK = 64  # queries and keys of a tile
DPI = 100
INK, GREY, ORANGE, BLUE, GREEN = "#222222", "#dddddd", "#e08a2e", "#2f6f9f", "#3d8a5f"


# --- the online softmax of one row ---------------------------------------------------------------


class Seen(NamedTuple):
    """What is known of a row after the keys before `end`; row_sum and acc are in units of exp(row_max)."""

    end: int
    row_max: float
    row_sum: float
    acc: float
    o: float


def one_row(Sk: int = 8 * BLOCK) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [1, 1, 1, 64], k [1, 1, Sk, 64] and v [1, 1, Sk, 1], normal; q is three times as long, to spread the scores."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal(shape) for shape in ((1, 1, 1, 64), (1, 1, Sk, 64), (1, 1, Sk, 1)))
    return 3 * q, k, v


def scores_of(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The scores of one query. [Sk]"""
    return (q @ k.swapaxes(-1, -2))[0, 0, 0] / np.sqrt(q.shape[-1])


def online_states(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[Seen]:
    """A row of the blocked reference after each tile of keys: it is called with the keys so far and knows no others."""
    from dualops.reference import flash_attention_blocked

    states = []
    for end in range(BLOCK, k.shape[2] + 1, BLOCK):
        o, lse = flash_attention_blocked(q, k[:, :, :end], v[:, :, :end], block_kv=BLOCK, return_lse=True)
        row_max = scores_of(q, k[:, :, :end]).max()
        row_sum = exp(lse.item() - row_max)
        states.append(Seen(end, row_max, row_sum, o.item() * row_sum, o.item()))
    return states


def draw_online_softmax() -> Figure:
    q, k, v = one_row()
    states, scores = online_states(q, k, v), scores_of(q, k)
    figure = new_figure(9, 6.4)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(1.5, 1, 1))
    ends = [0, *(state.end for state in states)]

    def stairs(axes: Axes, field: str, **style: Any) -> None:
        axes.stairs([getattr(state, field) for state in states], ends, baseline=None, linewidth=2.2, **style)

    top.plot(scores, ".", color="#999999", markersize=4, label="scores")
    stairs(top, "row_max", color=ORANGE, label="row_max, after the tile")
    stairs(middle, "row_sum", color=BLUE, label="row_sum, in units of exp(row_max); x: rescale, where that rose")
    stairs(bottom, "acc", color=GREEN, label="acc = row_sum * result, in the same units")
    stairs(bottom, "o", color=INK, linestyle="--", label="acc / row_sum: the softmax-weighted mean of v so far")
    for before, after in pairwise(states):
        if after.row_max > before.row_max:
            rescale = exp(before.row_max - after.row_max)
            middle.annotate(f"x {rescale:.2f}", (before.end + 4, after.row_sum), color=BLUE, va="bottom", fontsize=9)
    for axes, corner in ((top, "upper left"), (middle, "upper right"), (bottom, "upper right")):
        axes.set_xticks(ends)
        axes.grid(axis="x", alpha=0.6)
        axes.legend(loc=corner, fontsize=9, framealpha=0.9)
        axes.margins(x=0, y=0.35)
    bottom.set_xlabel(f"key; a tile has {BLOCK}")
    top.set_title("Online softmax: one query, one tile of keys after another")
    return figure


# --- which tiles are visited ---------------------------------------------------------------------

SKIPPED, BOUNDARY, FULL = range(3)
KINDS = ("skipped: never visited", "boundary: cut by the mask, which is applied", "full: all is seen, no mask is asked")
KIND_COLOURS = (GREY, ORANGE, BLUE)


def same_document(b: Any, h: Any, i: Any, j: Any) -> Any:
    """A mask_mod: three documents in one sequence, none of which sees another."""
    return ((i >= 150) == (j >= 150)) & ((i >= 330) == (j >= 330))


MASKS: dict[str, tuple[int, int, dict[str, Any]]] = {  # title -> Sq, Sk, parameters
    "causal=True": (512, 512, {"causal": True}),
    'causal="top_left", Sq < Sk': (320, 512, {"causal": "top_left"}),
    "causal=True, window=(150, 0)": (512, 512, {"causal": True, "window": (150, 0)}),
    "causal=True, mask_mod: own document": (512, 512, {"causal": True, "mask_mod": same_document}),
}


def options_for(Sq: int, Sk: int, params: Mapping[str, Any]) -> Options:
    """The composed option records of a call with these parameters and one head."""
    from dualops.reference._attention import options_of
    from dualops.spec import ArrayMeta, flash_attention as SPEC

    arrays = {name: np.zeros((1, 1, S, 1)) for name, S in (("q", Sq), ("k", Sk), ("v", Sk))}
    return options_of(SPEC.bind({name: ArrayMeta.of_numpy(x) for name, x in arrays.items()}, params), arrays)


def tile_kinds(options: Options, block_q: int = BLOCK, block_kv: int = BLOCK) -> np.ndarray:
    """What simt_forward.py does with each tile of scores: SKIPPED, BOUNDARY or FULL. [tiles of q, tiles of k]"""
    Sq, Sk = options.problem.Sq, options.problem.Sk
    kinds = np.full((-(-Sq // block_q), -(-Sk // block_kv)), SKIPPED)
    for m0 in range(0, Sq, block_q):
        first, end = options.key_range(m0, min(m0 + block_q, Sq))
        for n0 in range(first // block_kv * block_kv, end, block_kv):
            m1, n1 = m0 + block_q, n0 + block_kv
            whole = options.chain.full(options.args, m0, m1, n0, n1, options.offset, Sq, Sk)
            kinds[m0 // block_q, n0 // block_kv] = FULL if whole else BOUNDARY
    return kinds


def visible_pairs(options: Options) -> np.ndarray:
    """Return whether each query sees each key, from the option's own functions. [Sq, Sk]"""
    shape = (1, 1, options.problem.Sq, options.problem.Sk)
    return np.broadcast_to(options.chain.visible(options.args, options.everywhere()), shape)[0, 0]


def draw_tiles() -> Figure:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    figure = new_figure(8.2, 8.4)
    colours = np.array([to_rgb(colour) for colour in KIND_COLOURS])
    for axes, (title, (Sq, Sk, params)) in zip(figure.subplots(2, 2).flat, MASKS.items()):
        options = options_for(Sq, Sk, params)
        kinds = tile_kinds(options)
        pixels = colours[np.kron(kinds, np.ones((BLOCK, BLOCK), int))[:Sq, :Sk]]  # [Sq, Sk, 3]
        unseen = ~visible_pairs(options) & (pixels != colours[SKIPPED]).any(axis=-1)
        pixels[unseen] = 0.3 * pixels[unseen] + 0.7
        axes.imshow(pixels, interpolation="nearest")
        for axis, S in ((axes.xaxis, Sk), (axes.yaxis, Sq)):
            borders = range(0, S + 1, BLOCK)
            axis.set_ticks([border - 0.5 for border in borders], ["" if x // BLOCK % 2 else str(x) for x in borders])
        axes.grid(color="white", linewidth=1.5)
        counts = ", ".join(f"{(kinds == kind).sum()} {KINDS[kind].split(':')[0]}" for kind in range(3))
        axes.set_title(f"{title}\n{counts}", fontsize=10)
        axes.set(xlabel="key", ylabel="query")
    patches = [Patch(color=colour, label=label) for colour, label in zip(KIND_COLOURS, KINDS)]
    pale = Patch(color=0.3 * colours[BOUNDARY] + 0.7, label="pale: computed, and not seen")
    figure.legend(handles=[*patches, pale], loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


# --- who owns what of a tile ---------------------------------------------------------------------

TILE_ROWS, TILE_COLUMNS = 4, 4  # scores of a thread
SHOWN = {83: ORANGE, 84: BLUE, 200: GREEN}  # threads whose elements are picked out


def owners(tile_rows: int = TILE_ROWS, tile_columns: int = TILE_COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """The thread that holds each element: of a tile of scores, and of 64 columns of a result. Needs the simulator.

    The kernels' own verbs multiply matrices whose product at row r and column c is r * columns + c. So each thread
    finds in its registers where they stand.
    """
    from dualops.cuda import simulator
    from dualops.cuda.compiler.backend import SIMULATED, cuda, f32
    from dualops.cuda.launch.step import flat
    from dualops.cuda.tile.products import LANES, THREADS, mma_ab, mma_abt
    from dualops.cuda.tile.shared import Lines, Shared

    if not SIMULATED:
        raise RuntimeError("owners: set NUMBA_ENABLE_CUDASIM=1 before Python starts")
    rows, columns, width, depth = LANES * tile_rows, LANES * tile_columns, 64, 4
    shared = Shared("float32", THREADS)
    q_tile, k_tile, v_tile = shared.tile(rows, depth), shared.tile(columns, depth), shared.tile(depth, width, 64)
    qk, pv = mma_abt(f32, q_tile, k_tile, tile_rows, tile_columns), mma_ab(f32, q_tile, v_tile, tile_rows)

    def ask(scores_owner: Any, result_owner: Any, left: Any, keys: Any, values: Any) -> None:
        smem = cuda.shared.array(0, f32, alignment=16)
        q_tile.load(smem, Lines(left, 0, depth, rows))
        k_tile.load(smem, Lines(keys, 0, depth, columns))
        v_tile.load(smem, Lines(values, 0, width, depth))
        cuda.syncthreads()
        for product, owner in ((qk, scores_owner), (pv, result_owner)):
            frag = product.fragment()
            product.clear(frag)
            product.add(frag, smem)
            for e in range(product.size):
                owner[int(frag[e])] = cuda.threadIdx.x

    def coordinates(count: int, step: float, *, first: bool) -> np.ndarray:
        """Rows (number, step), or with `first` (step, number), and zeros. [count, depth]"""
        made = np.zeros((count, depth), np.float32)
        made[:, 0], made[:, 1] = (step, np.arange(count)) if first else (np.arange(count), step)
        return made

    found = np.full((rows, columns), -1, np.int32), np.full((rows, width), -1, np.int32)
    given = (
        coordinates(rows, 1, first=False),
        coordinates(columns, columns, first=True),
        np.ascontiguousarray(coordinates(width, width, first=True).T),
    )
    places = [flat(x, name) for x, name in zip((*found, *given), ("scores", "result", "left", "keys", "values"))]
    simulator.launch(ask, (1,), (THREADS,), places, shared_bytes=shared.nbytes)
    return found


def draw_owners() -> Figure:
    from matplotlib.colors import ListedColormap

    figure = new_figure(9, 5.2)
    bands = ListedColormap(["0.97", "0.88"])
    titles = "scores = Q @ K.T", "acc += P @ V, its first 64 columns"
    for axes, owner, title in zip(figure.subplots(1, 2), owners(), titles):
        axes.imshow(owner // 32 % 2, cmap=bands, interpolation="nearest")
        for thread, colour in SHOWN.items():
            rows, columns = np.nonzero(owner == thread)
            label = f"{thread} = ({thread // 16}, {thread % 16}): rows {listed(rows)}, columns {listed(columns)}"
            axes.plot(columns, rows, "s", color=colour, markersize=3.4, label=label)
        axes.set_xticks(np.arange(0, 65, 16) - 0.5, range(0, 65, 16))
        axes.set_yticks(np.arange(0, 65, 8) - 0.5, range(0, 65, 8))
        axes.grid(alpha=0.7)
        axes.set(xlabel="column", ylabel="row")
        axes.set_title(title, fontsize=11)
        axes.legend(loc="upper center", fontsize=8, framealpha=1, title="thread = (line, lane)", title_fontsize=8)
    figure.suptitle("Who holds what of a 64 x 64 tile: 256 threads, 4 x 4 numbers each; a grey band is a warp")
    return figure


def listed(places: np.ndarray) -> str:
    """`20-23`, or one after another where they are apart."""
    found = sorted(set(places.tolist()))
    return f"{found[0]}-{found[-1]}" if found[-1] - found[0] < len(found) else ", ".join(map(str, found))


# --- memory against length -----------------------------------------------------------------------

LENGTHS = tuple(1 << power for power in range(9, 18))
SIZES = {"B": 1, "H": 16, "D": 64, "dtype": "bfloat16"}


class Memory(NamedTuple):
    """Bytes of a call: inputs and results, and the additional memory of each rung."""

    arrays: int
    extra: dict[str, int]  # by rung


def memory(S: int, *, backward: bool) -> Memory:
    """What plans for a call of length S say."""
    from dualops.cuda.launch.device import known
    from dualops.cuda.launch.operation import OPERATIONS
    from dualops.spec import ArrayMeta, flash_attention as SPEC
    from dualops.spec.meta import contiguous_strides

    B, H, D, dtype = SIZES.values()
    wide, rows = (B, H, S, D), (B, H, S)
    metas = {name: ArrayMeta(wide, dtype, contiguous_strides(wide), "cuda:0", 0) for name in ("q", "k", "v", "o", "do")}
    metas["lse"] = ArrayMeta(rows, "float32", contiguous_strides(rows), "cuda:0", 0)
    wanted = SPEC.gradient_inputs if backward else SPEC.inputs
    given = {entry.name: metas.get(entry.name) for entry in wanted}
    problem = (SPEC.bind_backward if backward else SPEC.bind)(given, {"return_lse": True})
    results = problem.outputs(SPEC.gradients if backward else None)
    choices = OPERATIONS[SPEC.name][backward].choices(problem, results, known("sm_90a"))
    extra: dict[str, int] = {}
    for choice in choices:  # of each rung the first, which a call takes
        extra.setdefault(choice.rung, sum(meta.nbytes for meta in choice.workspace.values()))
    return Memory(sum(meta.nbytes for meta in (*problem.arrays.values(), *results.values())), extra)


def draw_memory() -> Figure:
    figure = new_figure(9, 4.4)
    for axes, backward in zip(figure.subplots(1, 2, sharey=True), (False, True)):
        found = [memory(S, backward=backward) for S in LENGTHS]
        axes.plot(LENGTHS, [one.arrays for one in found], "--", color=INK, zorder=3, label="inputs and results")
        for rung, colour, marker in (("naive", ORANGE, "s"), ("simt", BLUE, "o")):
            whole = [one.arrays + one.extra[rung] for one in found]
            axes.plot(LENGTHS, whole, color=colour, marker=marker, label=f"and what {rung} needs in addition")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(LENGTHS, [f"{S // 1024}K" if S >= 1024 else str(S) for S in LENGTHS])
        powers = range(22, 44, 3)
        axes.set_yticks([2.0**power for power in powers], [binary(power) for power in powers])
        axes.set(title="gradient" if backward else "forward", xlabel="S = Sq = Sk")
        axes.grid(alpha=0.4)
        axes.legend(loc="upper left", fontsize=9)
    sizes = ", ".join(f"{name}={value}" for name, value in SIZES.items() if name != "dtype")
    figure.suptitle(f"Memory of a call, by the plans' own formulas: {sizes}, {SIZES['dtype']}")
    return figure


def binary(power: int) -> str:
    """2**power bytes."""
    return f"{1 << power % 10} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power // 10]}"


# --- all of them ---------------------------------------------------------------------------------

PICTURES = {
    "flash_attention_online_softmax.png": draw_online_softmax,
    "flash_attention_tiles.png": draw_tiles,
    "flash_attention_owners.png": draw_owners,
    "flash_attention_memory.png": draw_memory,
}


def new_figure(width: float, height: float) -> Figure:
    """White behind, whatever the reader's theme."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def draw(folder: Path, pictures: Mapping[str, Callable[[], Figure]] = PICTURES) -> Iterator[Path]:
    """Write every picture; yields where."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in pictures.items():
        make().savefig(folder / name, dpi=DPI, pil_kwargs={"optimize": True})
        yield folder / name


if __name__ == "__main__":
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")  # before anything imports Numba: `owners` runs a kernel
    sys.path.insert(0, str(HERE.parent))
    for written in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE):
        print(written)
