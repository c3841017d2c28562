"""docs/draw_attention_sm90.py: what its pictures show against what the kernel must do, and that it draws them."""

from itertools import pairwise

import pytest

from docs import draw_attention_sm90 as draw
from tests.pictures import drawn as drawn, hold_pictures

ASK = """
print(json.dumps({"spans": draw.schedule(), "pieces": {title: draw.pieces(title) for title in draw.MASKS}}))
"""


def test_every_picture_is_drawn_and_the_committed_one_in_size(drawn):
    hold_pictures(drawn["written"], draw.PICTURES, "flash_attention")


def test_who_does_how_much(drawn):
    spans = [draw.Span(*span) for span in drawn["spans"]]
    count = {what: sum(span.what == what for span in spans) for what in ("q", "k", "v", "qk", "pv", "softmax", "store")}
    tiles, work = draw.PIECES * draw.TILES, draw.PIECES * draw.TILES * draw.WARPGROUPS
    assert count == {
        "q": draw.PIECES,
        "k": tiles,
        "v": tiles,
        "qk": work,
        "pv": work,
        "softmax": work,
        "store": draw.PIECES * draw.WARPGROUPS,
    }


def test_nothing_begins_before_what_it_needs(drawn):
    spans = {(span.what, span.warpgroup, span.number): span for span in (draw.Span(*each) for each in drawn["spans"])}
    products = sorted((span for span in spans.values() if span.place == "tensor cores"), key=lambda span: span.begin)
    assert all(one.end <= other.begin + 1e-9 for one, other in pairwise(products))
    copies = {key[0::2]: span for key, span in spans.items() if key[0] in draw.STAGES}
    for who in range(draw.WARPGROUPS):
        for n in range(draw.PIECES * draw.TILES):
            scores, probs, result = (spans[what, who, n] for what in ("qk", "softmax", "pv"))
            assert copies["k", n].end <= scores.begin and scores.end <= probs.begin and probs.end <= result.begin
            assert copies["v", n].end <= result.begin and copies["q", n // draw.TILES].end <= scores.begin


def test_one_warpgroups_products_overlap_the_others_softmax(drawn):
    spans = [draw.Span(*span) for span in drawn["spans"]]
    products = [span for span in spans if span.place == "tensor cores"]
    for span in spans:
        if span.what == "softmax" and span.number % draw.TILES:  # all may have a piece's first tile at once
            others = [product for product in products if product.warpgroup != span.warpgroup]
            assert any(other.begin < span.end and span.begin < other.end for other in others)


@pytest.mark.parametrize("title", draw.MASKS)
def test_pieces_have_each_tile_that_is_seen_and_the_longest_come_first(drawn, title):
    pieces, block_q, block_kv = drawn["pieces"][title]
    found = [draw.Piece(*piece) for piece in pieces]
    left = draw.MASKS[title].get("window", (draw.LENGTH, 0))[0]
    for piece in found:
        last = min(piece.m0 + block_q, draw.LENGTH) - 1
        first = max(0, piece.m0 - left) // block_kv
        assert (piece.first, piece.first + piece.tiles) == (first, last // block_kv + 1)
    assert len(found) == draw.HEADS * -(-draw.LENGTH // block_q)
    lengths = [piece.tiles for piece in found]
    if "window" not in draw.MASKS[title]:
        assert lengths == sorted(lengths, reverse=True)
