"""docs/draw_sharing.py: what its picture shows against a rule of its own, and that it draws it."""

from __future__ import annotations

import pytest

from docs import draw_sharing as draw
from tests.pictures import hold_pictures, python
from tests.processes import ROOT

PAGE = ROOT / "docs" / "pages" / "tutorials" / "context_parallel.md"


def test_the_script_draws_the_picture_of_the_page(tmp_path):
    written = python(str(ROOT / "docs" / "draw_sharing.py"), str(tmp_path)).split()
    hold_pictures(written, draw.PICTURES, page=PAGE)


def test_head_and_tail_of_each_document():
    """Of 96 tokens 12 a chunk, of 16 two, of 48 six; the ranks in order, and back."""
    there_and_back = [0, 1, 2, 3, 3, 2, 1, 0]
    expected = [rank for chunk in (12, 2, 6) for rank in there_and_back for _ in range(chunk)]
    assert draw.owners("head_tail").tolist() == expected
    assert draw.owners("contiguous").tolist() == [rank for rank in range(4) for _ in range(40)]


def test_all_ranks_have_as_many_pairs():
    assert draw.shares("head_tail") == pytest.approx([0.25] * 4)
    assert draw.seen().sum() == sum(n * (n + 1) // 2 for n in (96, 16, 48))
