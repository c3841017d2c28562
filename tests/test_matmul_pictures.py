"""docs/draw_matmul.py: what its pictures show against the steps' words, and that it draws them."""

from typing import Any

import numpy as np
import pytest

from docs import draw_matmul as draw
from tests.pictures import drawn as drawn, hold_pictures

ASK = """
owners = {title: held.tolist() for title, held in draw.fragments().items()}
print(json.dumps({"owners": owners, "recorded": {name: draw.recorded(name) for name in draw.STEPS}}))
"""


def test_every_picture_is_drawn_and_the_committed_one_in_size(drawn):
    hold_pictures(drawn["written"], draw.PICTURES, "matmul")


def test_every_element_has_an_owner_and_owners_have_as_many(drawn):
    for title, held in drawn["owners"].items():
        counts = np.bincount(np.ravel(held))
        assert len(counts) == (128 if "64" in title else 32) and len(set(counts)) == 1, title


def spans(drawn: Any, name: str) -> tuple[int, dict[int, draw.Span], dict[int, draw.Span]]:
    """A step's stages, copies and products, by slice."""
    stages, events = drawn["recorded"][name]
    found = draw.replayed(stages, [draw.Event(*event) for event in events])
    copies, products = ({span.slice: span for span in found if span.what == what} for what in ("copy", "multiply"))
    assert len(found) == 2 * draw.SLICES and copies.keys() == products.keys() == set(range(draw.SLICES))
    return stages, copies, products


@pytest.mark.parametrize("name", draw.STEPS)
def test_a_slice_is_multiplied_when_it_is_there_and_its_stage_filled_when_it_is_over(drawn, name):
    stages, copies, products = spans(drawn, name)
    for t in range(draw.SLICES):
        assert products[t].begin >= copies[t].end
        if t >= stages:
            assert copies[t].begin >= products[t - stages].end
        if t:
            assert products[t].begin >= products[t - 1].end


def test_what_each_step_gains(drawn):
    found = {name: spans(drawn, name) for name in draw.STEPS}
    between = {
        name: {products[t].begin - products[t - 1].end for t in range(1, draw.SLICES)}
        for name, (_, _, products) in found.items()
    }
    assert between["tensor_cores"] == {draw.COPY + draw.START}
    assert between["copies_ahead"] == between["boxes"] == {draw.START}  # to begin a product
    assert between["roles"] == {0.0}  # it begins together with the one before
    assert [found[name][0] for name in draw.STEPS] == [1, 3, 4, 4]


def test_who_fills(drawn):
    for name, (_, events) in drawn["recorded"].items():
        fills, multiplies = ({event[0] for event in events if event[1] == what} for what in ("copy", "multiply"))
        assert (fills == multiplies) == (name != "roles") and len(fills) == 1
