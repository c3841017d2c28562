"""docs/draw_softmax.py: what its pictures show against what each step is said to do, and that it draws them."""

import re

import numpy as np

from docs import draw_softmax as draw
from tests.pictures import drawn as drawn, hold_pictures
from tests.processes import ROOT

PAGE = ROOT / "dualops" / "cuda" / "softmax" / "README.md"
ASK = """
found = {name: draw.reads(step) for name, step in draw.steps_of_a_warp().items()}
reads = {name: [x.tolist() if hasattr(x, "tolist") else x for x in one] for name, one in found.items()}
print(json.dumps({"reads": reads, "moments": [draw.tree_moments(), draw.shuffle_moments()]}))
"""


def test_every_picture_is_drawn_and_the_committed_one_in_size(drawn):
    hold_pictures(drawn["written"], draw.PICTURES, "softmax")


def test_who_reads_what(drawn):
    """By hand: of 32 rows of 128 float32, a block of one warp takes all, or the first."""
    row, column = np.divmod(np.arange(draw.M * draw.N), draw.N)
    four = column % 32 == draw.THREAD  # of a row, of thread 5
    expected = {
        "thread_a_row": (column == 0, row == draw.THREAD, 3, 3 * 128),
        "tree": ((row == 0) & (column < 32), (row == 0) & four, 3, 3 * 4),
        "shuffles": ((row == 0) & (column < 32), (row == 0) & four, 3, 3 * 4),
        "registers": ((row == 0) & (column < 32), (row == 0) & four, 1, 4),
        "vectors": (row == 0, (row == 0) & (column // 4 == draw.THREAD), 1, 1),
        "online": (row == 0, (row == 0) & (column // 4 == draw.THREAD), 2, 2),
    }
    assert drawn["reads"].keys() == expected.keys()
    for name, (first, own, times, loads) in expected.items():
        found = draw.Reads(*drawn["reads"][name])
        assert np.array_equal(np.ravel(found.first), first) and np.array_equal(np.ravel(found.own), own), name
        sectors = np.unique(np.flatnonzero(first) // 8)
        assert np.array_equal(np.flatnonzero(np.ravel(found.fetched)), np.ravel(8 * sectors[:, None] + np.arange(8)))
        assert (found.times, found.loads) == (times, loads), name


def test_the_pages_table_says_how_often_x_is_read(drawn):
    words = {"3 times": 3, "twice": 2, "once": 1}
    table = re.findall(r"^\| \[`(\w+)`\]\(.*?\) \| [^|]* \| [^|]* \| ([^|]*) \|", PAGE.read_text(), re.MULTILINE)
    assert {name: words[times] for name, times in table} == {name: one[3] for name, one in drawn["reads"].items()}


def test_how_threads_agree(drawn):
    tree, shuffles = ([draw.Moment(*moment) for moment in moments] for moments in drawn["moments"])
    for step, moment in enumerate(tree):  # 64 threads, then 32, 16, ... 1
        busy = 64 >> step
        assert moment.holds == [1 << step] * busy + [0] * (64 - busy) and moment.barrier
    assert len(tree) == 7
    for step, moment in enumerate(shuffles[:5]):
        assert moment.holds == [2 << step] * 64 and not moment.barrier
    store, last = shuffles[5:]
    assert store.holds == [32 if thread % 32 == 0 else 0 for thread in range(64)] and store.barrier
    assert last.holds == [64] * 64
