"""docs/draw_retention.py: what its picture shows against the forms themselves, and that it draws it."""

import numpy as np

from docs import draw_retention as draw
from tests.pictures import drawn as drawn, hold_pictures

ASK = """
print(json.dumps({form: draw.pairs(form).sum(axis=1).tolist() for form in ("parallel", "chunk", "recurrent")}))
"""


def test_the_picture_is_drawn_and_the_committed_one_in_size(drawn):
    hold_pictures(drawn["written"], draw.PICTURES, "retention")


def test_how_many_scores_a_query_has(drawn):
    tokens = np.arange(draw.S)
    for form, expected in (("parallel", tokens + 1), ("chunk", tokens % 64 + 1), ("recurrent", tokens * 0 + 1)):
        assert drawn[form] == expected.tolist()
