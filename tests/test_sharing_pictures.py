"""docs/draw_sharing.py: what its picture shows against a rule of its own, and that it draws it."""

import numpy as np
import pytest

from docs import draw_sharing as draw
from tests.pictures import hold_pictures, python
from tests.processes import ROOT


def test_the_script_draws_the_picture_of_the_page(tmp_path):
    written = python(str(ROOT / "docs" / "draw_sharing.py"), str(tmp_path)).split()
    hold_pictures(written, draw.PICTURES, page=ROOT / "docs" / "pages" / "tutorials" / "context_parallel.md")


def test_head_and_tail_of_each_document():
    """1152 tokens are nine tiles in eight chunks. 646 tokens have 134 in the last of five chunks, 250 are whole.

    The first rank of a document gets its last chunk.
    """
    expected = [rank for rank in (0, 0, 1, 2, 3, 3, 2, 1, 0) for _ in range(128)] + [2] * 250
    for rank, length in ((1, 128), (0, 128), (3, 128), (2, 128), (1, 134)):
        expected += [rank] * length
    assert draw.owners("head_tail").tolist() == expected
    runs = ((0, 512), (1, 512), (2, 506), (3, 518))  # 1536 is 134 tokens into the last document: 128 are a tile
    assert draw.owners("contiguous").tolist() == [rank for rank, length in runs for _ in range(length)]


def test_head_and_tail_is_even():
    even, uneven = (np.array(draw.shares(balance)) for balance in ("head_tail", "contiguous"))
    assert even.sum() == pytest.approx(1) == uneven.sum()
    assert even.max() - even.min() < 0.1 < uneven.max() - uneven.min()
    assert draw.seen().sum() == sum(n * (n + 1) // 2 for n in (1152, 250, 646))
