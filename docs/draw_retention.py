"""The picture of dualops/cuda/retention/README.md, drawn from what the reference itself does.

    python docs/draw_retention.py            writes docs/retention_forms.png
    python docs/draw_retention.py FOLDER     writes it there

Nothing here is measured.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it is run as a script

from docs.draw_attention import BLUE, HERE, ORANGE, draw, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

S = 192  # tokens: three chunks of the reference
LOG2_GAMMA = -0.02


def weights() -> np.ndarray:
    """gamma^(i - j) of query i and key j, 0 where it is not seen, by the reference's own decay. [S, S]"""
    from dualops.reference.retention_forms import Decay

    return Decay(np.array([LOG2_GAMMA])).between(S, S)[0][0]


def pairs(form: str) -> np.ndarray:
    """Return which scores q_i . k_j are computed; other tokens are seen through a state. [S, S]"""
    from dualops.reference.retention_forms import _chunks

    tokens = np.arange(S)
    if form == "parallel":
        part = np.zeros(S)
    elif form == "chunk":
        part = np.concatenate([np.full(tokens[places].size, n) for n, (*_, places) in enumerate(_chunks(S))])
    else:
        part = tokens
    return (part[:, None] == part) & (tokens[:, None] >= tokens)


def draw_forms() -> Figure:
    from matplotlib.colors import to_rgb

    figure, seen = new_figure(9, 3.5), weights()
    for axes, form in zip(figure.subplots(1, 3), ("parallel", "chunk", "recurrent")):
        made = pairs(form)[..., None]
        colour = np.where(made, to_rgb(ORANGE), to_rgb(BLUE))
        axes.imshow(1 - seen[..., None] * (1 - colour), interpolation="nearest")
        axes.set_title(form, fontsize=11)
        axes.set_xlabel("token of the key")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.grid(False)
    figure.axes[0].set_ylabel("token of the query")
    figure.suptitle(
        "A score for each pair (orange), or a state that knows those before (blue); paler: faded", fontsize=11
    )
    return figure


PICTURES = {"retention_forms.png": draw_forms}

if __name__ == "__main__":
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")  # before anything imports Numba
    for written in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE, PICTURES):
        print(written)
