"""The picture of docs/pages/tutorials/context_parallel.md: who holds which tokens, drawn from what `shard` does.

    python docs/draw_sharing.py            writes docs/context_parallel_tokens.png
    python docs/draw_sharing.py FOLDER     writes it there

Nothing here is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it is run as a script

from docs.draw_attention import BLUE, GREEN, HERE, ORANGE, draw, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDS = (0, 1152, 1402, 2048)  # documents of eight chunks, of one, and of five
RANKS = 4
COLOURS = (BLUE, ORANGE, GREEN, "#a14d7b")


def owners(balance: str) -> np.ndarray:
    """The rank that has each token. [T]"""
    from dualops.torch_bridge.distributed.layout import layout_of

    layout = layout_of(ENDS, RANKS, balance)
    found = np.full(layout.total, -1)
    for rank, rows in enumerate(layout.rows):
        found[rows] = rank
    return found


def seen() -> np.ndarray:
    """Whether a query sees a key: no later one, of its document. [T, T]"""
    tokens = np.arange(ENDS[-1])
    document = np.searchsorted(ENDS, tokens, side="right")
    return (tokens[:, None] >= tokens) & (document[:, None] == document)


def shares(balance: str) -> list[float]:
    """Of the pairs that are seen, the share that each rank computes."""
    pairs = seen().sum(axis=1)
    return [float(pairs[owners(balance) == rank].sum() / pairs.sum()) for rank in range(RANKS)]


def draw_tokens() -> Figure:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    figure, visible = new_figure(9, 5.4), seen()[..., None]
    colours = np.array([to_rgb(colour) for colour in COLOURS])
    for axes, balance in zip(figure.subplots(1, 2), ("head_tail", "contiguous")):
        row = colours[owners(balance)]  # [T, 3]
        axes.imshow(np.where(visible, row[:, None], 0.15 * row[:, None] + 0.85), interpolation="nearest")
        axes.set_title(f'balance="{balance}"', fontsize=11)
        axes.set_xlabel("keys, gathered from all ranks")
        axes.set_xticks([end - 0.5 for end in ENDS], [str(end) for end in ENDS])
        axes.set_yticks([end - 0.5 for end in ENDS], [str(end) for end in ENDS])
        labels = [f"rank {rank}: {share:.0%} of the pairs" for rank, share in enumerate(shares(balance))]
        legend = [Patch(color=colour, label=label) for colour, label in zip(COLOURS, labels)]
        axes.legend(handles=legend, loc="upper right", fontsize=8.5)
    figure.axes[0].set_ylabel("queries, each on the rank of its colour")
    figure.suptitle("Three documents on four ranks: full colour where a query sees a key", fontsize=11)
    return figure


PICTURES = {"context_parallel_tokens.png": draw_tokens}

if __name__ == "__main__":
    for written in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE, PICTURES):
        print(written)
