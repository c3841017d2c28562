"""docs/draw_attention.py: what its pictures show against brute force, and that it draws them."""

import json
from collections.abc import Mapping
from itertools import pairwise
from math import exp, log
from typing import Any

import numpy as np
import pytest

from docs import draw_attention as draw, draw_attention_sm90, draw_matmul, draw_softmax
from dualops.reference import flash_attention
from tests.pictures import hold_pictures, python
from tests.processes import ROOT


def test_the_script_draws_every_picture_of_the_page(tmp_path):
    written = python(str(ROOT / "docs" / "draw_attention.py"), str(tmp_path)).split()
    hold_pictures(written, draw.PICTURES, "flash_attention")


class TestOnlineSoftmax:
    def test_each_state_follows_from_the_one_before(self):
        """The rule as the page writes it, one key after another where the reference computes tiles."""
        q, k, v = draw.one_row()
        scores, values = draw.scores_of(q, k), v[0, 0, :, 0]
        states = draw.online_states(q, k, v)
        assert [state.end for state in states] == list(range(64, 513, 64))
        row_max, row_sum, acc = -np.inf, 0.0, 0.0
        for begin, state in zip((0, *(state.end for state in states)), states):
            for score, value in zip(scores[begin : state.end], values[begin : state.end]):
                new_max = max(row_max, score)
                rescale, prob = exp(row_max - new_max), exp(score - new_max)
                row_max, row_sum, acc = new_max, row_sum * rescale + prob, acc * rescale + prob * value
            assert state[1:] == pytest.approx((row_max, row_sum, acc, acc / row_sum), rel=1e-12)

    def test_the_last_is_attention(self):
        q, k, v = draw.one_row()
        last = draw.online_states(q, k, v)[-1]
        o, lse = flash_attention(q, k, v, return_lse=True)
        assert last.o == pytest.approx(o.item(), rel=1e-12)
        assert last.row_max + log(last.row_sum) == pytest.approx(lse.item(), rel=1e-12)

    def test_it_shows_a_rescaling(self):
        states = draw.online_states(*draw.one_row())
        rose = [after.row_max > before.row_max for before, after in pairwise(states)]
        assert any(rose) and not all(rose)


def brute(Sq: int, Sk: int, params: Mapping[str, Any]) -> np.ndarray:
    """Whether each query sees each key, in Python, pair by pair."""
    offset = 0 if params.get("causal") == "top_left" else Sk - Sq
    left, _ = params.get("window", (Sk + Sq, 0))
    mod = params.get("mask_mod", lambda b, h, i, j: True)
    seen = [-left <= j - i - offset <= 0 and mod(0, 0, i, j) for i in range(Sq) for j in range(Sk)]
    return np.array(seen).reshape(Sq, Sk)


def seen_in_tiles(seen: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether any pair of a tile is seen, and whether all are there and seen. [tiles of q, tiles of k]"""
    (Sq, Sk), up = seen.shape, [(0, -size % block) for size in seen.shape]
    padded = np.pad(seen, up).reshape(-(-Sq // block), block, -(-Sk // block), block)
    return np.asarray(padded.any(axis=(1, 3))), np.asarray(padded.all(axis=(1, 3)))


MORE = {  # shapes that are no multiples, rows without a key, a window that skips on the left
    "ragged": (100, 130, {"causal": True}),
    "more queries": (200, 70, {"causal": True}),
    "top left, more queries": (200, 70, {"causal": "top_left"}),
    "narrow window": (250, 190, {"causal": True, "window": (3, 0)}),
}
BANDS = {title: case for title, case in (draw.MASKS | MORE).items() if "mask_mod" not in case[2]}


class TestTiles:
    @pytest.mark.parametrize("title", [*draw.MASKS, *MORE])
    def test_visible_pairs(self, title):
        Sq, Sk, params = (draw.MASKS | MORE)[title]
        assert np.array_equal(draw.visible_pairs(draw.options_for(Sq, Sk, params)), brute(Sq, Sk, params))

    @pytest.mark.parametrize("block", [64, 16])
    @pytest.mark.parametrize("title", BANDS)
    def test_of_causal_and_window_every_tile_is_what_its_pairs_say(self, title, block):
        Sq, Sk, params = BANDS[title]
        any_seen, all_seen = seen_in_tiles(brute(Sq, Sk, params), block)
        expected = np.where(all_seen, draw.FULL, np.where(any_seen, draw.BOUNDARY, draw.SKIPPED))
        assert np.array_equal(draw.tile_kinds(draw.options_for(Sq, Sk, params), block, block), expected)

    def test_a_mask_mod_leaves_what_is_skipped_and_makes_the_rest_a_boundary(self):
        ((Sq, Sk, params),) = (case for case in draw.MASKS.values() if "mask_mod" in case[2])
        kinds = draw.tile_kinds(draw.options_for(Sq, Sk, params))
        causal, _ = seen_in_tiles(brute(Sq, Sk, {"causal": True}), draw.BLOCK)
        assert np.array_equal(kinds, np.where(causal, draw.BOUNDARY, draw.SKIPPED))
        assert (kinds == draw.BOUNDARY).sum() > seen_in_tiles(brute(Sq, Sk, params), draw.BLOCK)[0].sum()


@pytest.mark.parametrize(("tile_rows", "tile_columns"), [(4, 4), (2, 3)])
def test_owners(tile_rows, tile_columns):
    """tiles.py's words: tile_rows rows from line * tile_rows on; columns lane + 16 * n, or four neighbours."""
    code = (
        "import json; from docs.draw_attention import owners; print(json.dumps([x.tolist() for x in owners({}, {})]))"
    )
    scores, result = map(np.array, json.loads(python("-c", code.format(tile_rows, tile_columns))))
    line = np.arange(16 * tile_rows)[:, None] // tile_rows
    assert np.array_equal(scores, 16 * line + np.arange(16 * tile_columns) % 16)
    assert np.array_equal(result, 16 * line + np.arange(64) // 4)


@pytest.mark.parametrize(
    "ask",
    [
        draw.owners,
        draw_attention_sm90.recorded,
        lambda: draw_matmul.recorded("roles"),
        draw_softmax.tree_moments,
        draw_softmax.shuffle_moments,
        lambda: draw_softmax.reads(draw_softmax.steps_of_a_warp()["tree"]),
    ],
)
def test_the_simulator_is_needed(monkeypatch, ask):
    monkeypatch.setattr("dualops.cuda.compiler.backend.SIMULATED", False)
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM"):
        ask()


class TestMemory:
    @pytest.mark.parametrize("S", [512, 1024, 131072])
    def test_formulas(self, S):
        """q, k, v, o in two bytes, lse in four; naive_forward.py's and naive_backward.py's own sums; delta as lse; of
        sm90's fused gradient dq in four bytes, a counter, and a flag for 128 queries."""
        rows, wide = 16 * S, 16 * S * 64
        forward, backward = (draw.memory(S, backward=backward) for backward in (False, True))
        assert forward == (4 * 2 * wide + 4 * rows, {"sm90": 0, "sm80": 0, "simt": 0, "naive": 4 * rows * (S + 1)})
        fused = 4 * wide + 8 * (1 + rows // 128)
        extra = {"sm90": 4 * rows + fused, "sm80": 4 * rows, "simt": 4 * rows, "naive": 4 * rows * (2 * S + 1)}
        assert backward == (8 * 2 * wide + 4 * rows, extra)

    @pytest.mark.parametrize(("power", "said"), [(0, "1 B"), (22, "4 MiB"), (37, "128 GiB"), (40, "1 TiB")])
    def test_binary(self, power, said):
        assert draw.binary(power) == said
