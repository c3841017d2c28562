"""Lion's tables of tensors: what is kept from call to call, and what is written when addresses are others."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda import simulator
from dualops.cuda.launch import device_words
from dualops.cuda.lion import lists as lists_module, of_lists, tables

from .test_lion import Lists, all_same, numbers

pytestmark = pytest.mark.usefixtures("forgotten")


def test_tables_are_found_again_by_their_addresses(launched):
    lists: Lists = [[numbers(30, seed=10 * j + i) for i in range(3)] for j in range(3)]
    other: Lists = [[x.copy() for x in each] for each in lists]
    for each in (lists, other, lists, other):
        dualops.cuda.lion(*each, lr=0.1)
    assert launched.count("write_words") == 2
    for lr in (0.2, 0.3):
        dualops.cuda.lion(*lists, lr=lr, betas=(0.5, lr), weight_decay=lr)
    assert launched.count("write_words") == 2  # neither lr nor the other numbers are in a table
    assert (len(of_lists.ready), len(of_lists.bounds)) == (2, 1)


def test_another_layout_at_the_same_addresses_is_seen():
    """As memory that was freed and given to tensors of another shape, dtype or order of axes."""
    memory = [np.zeros(48, np.float32) for _ in range(3)]
    views: list[Callable[[np.ndarray], np.ndarray]] = [
        lambda x: x,
        lambda x: x[:30],
        lambda x: x.reshape(6, 8),
        lambda x: x.reshape(6, 8).T,
        lambda x: x.view(np.float64),
        lambda x: x.view(np.float16)[:40],
        lambda x: x[::2],
    ]
    for turn, view in enumerate(views * 2):
        lists: Lists = [[view(x)] for x in memory]
        for i, each in enumerate(lists):
            each[0][...] = numbers(each[0].shape, each[0].dtype, seed=3 * turn + i)
        expected = reference.lion(*lists, lr=0.1)
        assert all_same(dualops.cuda.lion(*lists, lr=0.1), expected), turn


def small_lists(seed: int) -> Lists:
    """Lists of sixty small tensors, whose table has 540 words."""
    return [[numbers(1 + i % 5, seed=1000 * seed + 10 * i + j) for i in range(60)] for j in range(3)]


def moved(lists: Lists, places: Any, offset: int = 0) -> Lists:
    """The same values, those at `places` (list, tensor) at other addresses, `offset` elements off 16 bytes."""
    others = [list(each) for each in lists]
    for j, i in places:
        memory = np.empty(others[j][i].size + 8, others[j][i].dtype)
        first = -(memory.ctypes.data // memory.itemsize) % 4 + offset
        others[j][i] = memory[first : first + others[j][i].size]
        others[j][i][...] = lists[j][i]
    return others


def stepped(lists: Lists) -> None:
    """A step, which is the reference's."""
    expected = reference.lion(*lists, lr=0.1, weight_decay=0.1)
    assert all_same(dualops.cuda.lion(*lists, lr=0.1, weight_decay=0.1), expected)


def test_new_gradients_are_one_column_and_nothing_is_bound_again(launched, monkeypatch):
    first = small_lists(0)
    stepped(first)
    assert launched.count("write_words") == 3  # of 256 words each
    monkeypatch.setattr(lists_module, "bind_list", None)
    for turn in range(1, 4):
        stepped([first[0], small_lists(turn)[1], first[2]])
        assert launched.count("write_words") == 3 + turn
    stepped(first)
    assert launched.count("write_words") == 6  # its own table is as it was


def test_some_new_addresses(launched):
    rng = np.random.default_rng(5)
    calls = [small_lists(9)]
    stepped(calls[0])
    for count in (1, 20):
        places = zip(rng.integers(0, 3, count), rng.permutation(60)[:count], strict=True)
        calls.append(moved(calls[-1], places))
        stepped(calls[-1])
    seen = launched.count("write_words")
    for lists in (*calls, *reversed(calls)):  # older tables were not written to
        stepped(lists)
    assert launched.count("write_words") == seen


def test_new_addresses_that_are_aligned_otherwise():
    """Where groups begin, and with it which block does what, changes with addresses too."""
    lists: Lists = [[numbers(200 + i, seed=10 * j + i) for i in range(4)] for j in range(3)]
    everything = [(j, i) for j in range(3) for i in range(4)]
    lists = moved(lists, everything)
    for places, offset in ((everything, 3), ([(1, 2), (0, 3)], 1), (everything, 0)):
        stepped(lists)
        lists = moved(lists, places, offset)
    stepped(lists)
    assert (len(of_lists.ready), len(of_lists.bounds)) == (4, 1)


@pytest.mark.parametrize("kept", [True, False])
def test_overlaps_among_new_addresses_are_refused(kept, launched):
    lists = small_lists(3)
    if kept:
        stepped(lists)
    seen = len(launched)
    p, g, m = ([*each] for each in lists)
    shared = np.zeros(8, np.float32)
    for wrong, message in (
        ([p, [*g[:7], p[7], *g[8:]], m], "params[7] overlaps grads[7]"),
        ([p, [*g[:12], m[17], *g[13:]], m], "momenta[17] overlaps grads[12]"),
        ([[*p[:4], shared[:5], *p[5:]], [*g[:9], shared[3:], *g[10:]], m], "params[4] overlaps grads[9]"),
        ([[*p[:4], shared[:5], *p[5:]], g, [*m[:9], shared[3:], *m[10:]]], "params[4] overlaps momenta[9]"),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=re.escape(f"lion: {message} in memory, expected memory of its own")):
                dualops.cuda.lion(*wrong, lr=0.1)
    assert len(launched) == seen
    stepped([p, [*g[:12], g[17], *g[13:]], m])  # reads may share


def test_what_is_written_of_a_table():
    def written(changed: list[int], size: int) -> list[int]:
        return list(tables.pieces(np.array(changed, int), size))

    W = device_words.WORDS
    assert written([], W) == []
    assert written([*range(W)], W) == [0]
    assert written([W - 1], W) == [0] and written([2 * W], 3 * W) == [2 * W] and written([3 * W - 1], 3 * W) == [2 * W]
    assert written([5, 5 + W - 1], 3 * W) == [5] and written([5, 5 + W], 3 * W) == [5, 5 + W]
    assert written([*range(3 * W + 1)], 3 * W + 1) == [0, W, 2 * W, 2 * W + 1]


def test_words_are_written_where_they_belong():
    table = np.zeros(7, np.int64)
    device_words.build_writer(3)[1, 1](simulator.Pointer(table, "table"), 2, (2**40, -1, 5))
    assert table.tolist() == [0, 0, 2**40, -1, 5, 0, 0]
    assert (
        8 * len(device_words.build_writer(device_words.WORDS).argtypes[2]) + 16 <= 4096
    )  # bytes of arguments that a launch takes


def test_the_oldest_tables_are_forgotten(monkeypatch):
    monkeypatch.setattr(lists_module, "MOST_KEPT", 3)
    calls: list[Lists] = [[[numbers(10 + i, seed=j)] for j in range(3)] for i in range(5)]
    for lists in calls:
        dualops.cuda.lion(*lists, lr=0.1)
        assert len(of_lists.ready) <= 3 and len(of_lists.bounds) <= 3
    expected = reference.lion(*calls[0], lr=0.1)
    assert all_same(dualops.cuda.lion(*calls[0], lr=0.1), expected)
