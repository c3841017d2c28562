"""docs/draw_*.py: what their pictures show against brute force and the kernels' words, and that they draw them."""

import json
import re
from collections.abc import Mapping
from functools import cache, partial
from itertools import pairwise
from math import exp, log
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from docs import draw_attention as draw, draw_attention_sm90, draw_matmul, draw_retention, draw_sharing, draw_softmax
from dualops.reference import flash_attention
from tests.pictures import hold_pictures
from tests.processes import ROOT, printed

python = partial(printed, NUMBA_ENABLE_CUDASIM="1")
# a script, as it is run by hand, and then what a test asks the code
RUN = """
import json, runpy
import {0} as draw
runpy.run_path(draw.__file__, run_name="__main__")
{1}
"""
KERNELS = ROOT / "dualops" / "cuda"
PAGES = {
    draw: KERNELS / "flash_attention" / "README.md",
    draw_attention_sm90: KERNELS / "flash_attention" / "README.md",
}
PAGES |= {draw_matmul: KERNELS / "matmul" / "README.md", draw_retention: KERNELS / "retention" / "README.md"}
PAGES |= {draw_softmax: KERNELS / "softmax" / "README.md"}
PAGES |= {draw_sharing: ROOT / "docs" / "pages" / "tutorials" / "context_parallel.md"}
ASKED = {
    draw_attention_sm90: """
print(json.dumps({"spans": draw.schedule(), "pieces": {title: draw.pieces(title) for title in draw.MASKS}}))
""",
    draw_matmul: """
owners = {title: held.tolist() for title, held in draw.fragments().items()}
print(json.dumps({"owners": owners, "recorded": {name: draw.recorded(name) for name in draw.STEPS}}))
""",
    draw_retention: """
print(json.dumps({form: draw.pairs(form).sum(axis=1).tolist() for form in ("parallel", "chunk", "recurrent")}))
""",
    draw_softmax: """
found = {name: draw.reads(step) for name, step in draw.steps_of_a_warp().items()}
reads = {name: [x.tolist() if hasattr(x, "tolist") else x for x in one] for name, one in found.items()}
print(json.dumps({"reads": reads, "moments": [draw.tree_moments(), draw.shuffle_moments()]}))
""",
}


def drawn_by(script: Any) -> Any:
    """What the script prints of what is asked; what it drew was compared with what is committed."""
    with TemporaryDirectory() as folder:
        lines = python("-c", RUN.format(script.__name__, ASKED.get(script, "print('{}')")), folder).splitlines()
        hold_pictures(lines[:-1], script.PICTURES, PAGES[script])
    return json.loads(lines[-1])


drawn: Any = cache(drawn_by)


@pytest.mark.parametrize("script", PAGES, ids=lambda script: script.__name__)
def test_every_picture_is_drawn_and_the_committed_one_in_size(script):
    drawn(script)


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


def test_who_does_how_much():
    spans = [draw_attention_sm90.Span(*span) for span in drawn(draw_attention_sm90)["spans"]]
    count = {what: sum(span.what == what for span in spans) for what in ("q", "k", "v", "qk", "pv", "softmax", "store")}
    tiles, work = (
        draw_attention_sm90.PIECES * draw_attention_sm90.TILES,
        draw_attention_sm90.PIECES * draw_attention_sm90.TILES * draw_attention_sm90.WARPGROUPS,
    )
    assert count == {
        "q": draw_attention_sm90.PIECES,
        "k": tiles,
        "v": tiles,
        "qk": work,
        "pv": work,
        "softmax": work,
        "store": draw_attention_sm90.PIECES * draw_attention_sm90.WARPGROUPS,
    }


def test_nothing_begins_before_what_it_needs():
    spans = {
        (span.what, span.warpgroup, span.number): span
        for span in (draw_attention_sm90.Span(*each) for each in drawn(draw_attention_sm90)["spans"])
    }
    products = sorted((span for span in spans.values() if span.place == "tensor cores"), key=lambda span: span.begin)
    assert all(one.end <= other.begin + 1e-9 for one, other in pairwise(products))
    copies = {key[0::2]: span for key, span in spans.items() if key[0] in draw_attention_sm90.STAGES}
    for who in range(draw_attention_sm90.WARPGROUPS):
        for n in range(draw_attention_sm90.PIECES * draw_attention_sm90.TILES):
            scores, probs, result = (spans[what, who, n] for what in ("qk", "softmax", "pv"))
            assert copies["k", n].end <= scores.begin and scores.end <= probs.begin and probs.end <= result.begin
            assert (
                copies["v", n].end <= result.begin and copies["q", n // draw_attention_sm90.TILES].end <= scores.begin
            )


def test_one_warpgroups_products_overlap_the_others_softmax():
    spans = [draw_attention_sm90.Span(*span) for span in drawn(draw_attention_sm90)["spans"]]
    products = [span for span in spans if span.place == "tensor cores"]
    for span in spans:
        if (
            span.what == "softmax" and span.number % draw_attention_sm90.TILES
        ):  # all may have a piece's first tile at once
            others = [product for product in products if product.warpgroup != span.warpgroup]
            assert any(other.begin < span.end and span.begin < other.end for other in others)


@pytest.mark.parametrize("title", draw_attention_sm90.MASKS)
def test_pieces_have_each_tile_that_is_seen_and_the_longest_come_first(title):
    pieces, block_q, block_kv = drawn(draw_attention_sm90)["pieces"][title]
    found = [draw_attention_sm90.Piece(*piece) for piece in pieces]
    left = draw_attention_sm90.MASKS[title].get("window", (draw_attention_sm90.LENGTH, 0))[0]
    for piece in found:
        last = min(piece.m0 + block_q, draw_attention_sm90.LENGTH) - 1
        first = max(0, piece.m0 - left) // block_kv
        assert (piece.first, piece.first + piece.tiles) == (first, last // block_kv + 1)
    assert len(found) == draw_attention_sm90.HEADS * -(-draw_attention_sm90.LENGTH // block_q)
    lengths = [piece.tiles for piece in found]
    if "window" not in draw_attention_sm90.MASKS[title]:
        assert lengths == sorted(lengths, reverse=True)


def test_every_element_has_an_owner_and_owners_have_as_many():
    for title, held in drawn(draw_matmul)["owners"].items():
        counts = np.bincount(np.ravel(held))
        assert len(counts) == (128 if "64" in title else 32) and len(set(counts)) == 1, title


def spans(name: str) -> tuple[int, dict[int, draw_matmul.Span], dict[int, draw_matmul.Span]]:
    """A step's stages, copies and products, by slice."""
    stages, events = drawn(draw_matmul)["recorded"][name]
    found = draw_matmul.replayed(stages, [draw_matmul.Event(*event) for event in events])
    copies, products = ({span.slice: span for span in found if span.what == what} for what in ("copy", "multiply"))
    assert len(found) == 2 * draw_matmul.SLICES and copies.keys() == products.keys() == set(range(draw_matmul.SLICES))
    return stages, copies, products


@pytest.mark.parametrize("name", draw_matmul.STEPS)
def test_a_slice_is_multiplied_when_it_is_there_and_its_stage_filled_when_it_is_over(name):
    stages, copies, products = spans(name)
    for t in range(draw_matmul.SLICES):
        assert products[t].begin >= copies[t].end
        if t >= stages:
            assert copies[t].begin >= products[t - stages].end
        if t:
            assert products[t].begin >= products[t - 1].end


def test_what_each_step_gains():
    found = {name: spans(name) for name in draw_matmul.STEPS}
    between = {
        name: {products[t].begin - products[t - 1].end for t in range(1, draw_matmul.SLICES)}
        for name, (_, _, products) in found.items()
    }
    assert between["tensor_cores"] == {draw_matmul.COPY + draw_matmul.START}
    assert between["copies_ahead"] == between["boxes"] == {draw_matmul.START}  # to begin a product
    assert between["roles"] == {0.0}  # it begins together with the one before
    assert [found[name][0] for name in draw_matmul.STEPS] == [1, 3, 4, 4]


def test_who_fills():
    for name, (_, events) in drawn(draw_matmul)["recorded"].items():
        fills, multiplies = ({event[0] for event in events if event[1] == what} for what in ("copy", "multiply"))
        assert (fills == multiplies) == (name != "roles") and len(fills) == 1


def test_how_many_scores_a_query_has():
    tokens = np.arange(draw_retention.S)
    for form, expected in (("parallel", tokens + 1), ("chunk", tokens % 64 + 1), ("recurrent", tokens * 0 + 1)):
        assert drawn(draw_retention)[form] == expected.tolist()


def test_head_and_tail_of_each_document():
    """1152 tokens are nine tiles in eight chunks. 646 tokens have 134 in the last of five chunks, 250 are whole.

    The first rank of a document gets its last chunk.
    """
    expected = [rank for rank in (0, 0, 1, 2, 3, 3, 2, 1, 0) for _ in range(128)] + [2] * 250
    for rank, length in ((1, 128), (0, 128), (3, 128), (2, 128), (1, 134)):
        expected += [rank] * length
    assert draw_sharing.owners("head_tail").tolist() == expected
    runs = ((0, 512), (1, 512), (2, 506), (3, 518))  # 1536 is 134 tokens into the last document: 128 are a tile
    assert draw_sharing.owners("contiguous").tolist() == [rank for rank, length in runs for _ in range(length)]


def test_head_and_tail_is_even():
    even, uneven = (np.array(draw_sharing.shares(balance)) for balance in ("head_tail", "contiguous"))
    assert even.sum() == pytest.approx(1) == uneven.sum()
    assert even.max() - even.min() < 0.1 < uneven.max() - uneven.min()
    assert draw_sharing.seen().sum() == sum(n * (n + 1) // 2 for n in (1152, 250, 646))


def test_who_reads_what():
    """By hand: of 32 rows of 128 float32, a block of one warp takes all, or the first."""
    row, column = np.divmod(np.arange(draw_softmax.M * draw_softmax.N), draw_softmax.N)
    four = column % 32 == draw_softmax.THREAD  # of a row, of thread 5
    expected = {
        "thread_a_row": (column == 0, row == draw_softmax.THREAD, 3, 3 * 128),
        "tree": ((row == 0) & (column < 32), (row == 0) & four, 3, 3 * 4),
        "shuffles": ((row == 0) & (column < 32), (row == 0) & four, 3, 3 * 4),
        "registers": ((row == 0) & (column < 32), (row == 0) & four, 1, 4),
        "vectors": (row == 0, (row == 0) & (column // 4 == draw_softmax.THREAD), 1, 1),
        "online": (row == 0, (row == 0) & (column // 4 == draw_softmax.THREAD), 2, 2),
    }
    assert drawn(draw_softmax)["reads"].keys() == expected.keys()
    for name, (first, own, times, loads) in expected.items():
        found = draw_softmax.Reads(*drawn(draw_softmax)["reads"][name])
        assert np.array_equal(np.ravel(found.first), first) and np.array_equal(np.ravel(found.own), own), name
        sectors = np.unique(np.flatnonzero(first) // 8)
        assert np.array_equal(np.flatnonzero(np.ravel(found.fetched)), np.ravel(8 * sectors[:, None] + np.arange(8)))
        assert (found.times, found.loads) == (times, loads), name


def test_the_pages_table_says_how_often_x_is_read():
    words = {"3 times": 3, "twice": 2, "once": 1}
    table = re.findall(
        r"^\| \[`(\w+)`\]\(.*?\) \| [^|]* \| [^|]* \| ([^|]*) \|", PAGES[draw_softmax].read_text(), re.MULTILINE
    )
    assert {name: words[times] for name, times in table} == {
        name: one[3] for name, one in drawn(draw_softmax)["reads"].items()
    }


def test_how_threads_agree():
    tree, shuffles = (
        [draw_softmax.Moment(*moment) for moment in moments] for moments in drawn(draw_softmax)["moments"]
    )
    for step, moment in enumerate(tree):  # 64 threads, then 32, 16, ... 1
        busy = 64 >> step
        assert moment.holds == [1 << step] * busy + [0] * (64 - busy) and moment.barrier
    assert len(tree) == 7
    for step, moment in enumerate(shuffles[:5]):
        assert moment.holds == [2 << step] * 64 and not moment.barrier
    store, last = shuffles[5:]
    assert store.holds == [32 if thread % 32 == 0 else 0 for thread in range(64)] and store.barrier
    assert last.holds == [64] * 64
