"""Block masks: what makes them, and attention's sm90 rung, which visits what they list."""

import gc
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda import simulator
from dualops.cuda.flash_attention import block_masks, sm90
from dualops.cuda.flash_attention.arguments import variant
from dualops.cuda.flash_attention.sm90.config import Sm90Config
from dualops.cuda.flash_attention.sm90.forward import build_forward
from dualops.spec.attention.blocks import TILE
from dualops.spec.attention.cases import in_patches, sliding, woven
from tests.cuda.configs import alone, changed
from tests.cuda.simulator.attention import checked, numbers

attend: Any = partial(dualops.cuda.flash_attention, kernel="sm90")

DOCUMENTS = np.repeat(np.arange(3, dtype=np.int32), (150, 90, 60))


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Three, distinguished by an array that is read."""
    return DOCUMENTS[i] == DOCUMENTS[j]


def nothing(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j < 0


def everything(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j >= 0


MASKS = (documents, sliding, in_patches, woven, nothing, everything)


def states(mask_mod: Any, B: int, H: int, Sq: int, Sk: int) -> list[Any]:
    """The lists, pair by pair."""
    found = []
    for b, h in np.ndindex(B, H):
        for m in range(0, Sq, TILE):
            row = []
            for n in range(0, Sk, TILE):
                pairs = np.ix_(range(m, min(m + TILE, Sq)), range(n, min(n + TILE, Sk)))
                seen = np.vectorize(lambda i, j, b=b, h=h: bool(mask_mod(b, h, i, j)))(*pairs)
                row += [2 * (n // TILE) + seen.all()] if seen.any() else []
            found.append([len(row), *row, *[0] * (-(-Sk // TILE) - len(row))])
    return found


@pytest.mark.parametrize("mask_mod", MASKS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("sizes", [(1, 1, 128, 300), (2, 3, 200, 129)])
def test_lists(mask_mod, sizes):
    made = dualops.cuda.block_mask(mask_mod, *sizes, like=np.zeros(1))
    assert made.lists.reshape(-1, made.lists.shape[-1]).tolist() == states(mask_mod, *sizes)
    assert np.array_equal(made.lists, reference.block_mask(mask_mod, *sizes).lists)
    assert made.lists.dtype == np.int32 and (made.B, made.H, made.Sq, made.Sk) == sizes


@pytest.mark.parametrize("sizes", [(0, 1, 3, 3), (1, 1, 0, 5), (1, 1, 5, 0)])
def test_without_pairs(sizes):
    made = dualops.cuda.block_mask(woven, *sizes, like=np.zeros(1, np.float32))
    assert not made.lists.any()
    assert made.lists.shape == reference.block_mask(woven, *sizes).lists.shape


def test_made_once_and_kept():
    """By what a function does, not by its identity; and as long as a caller has it."""
    q, sizes = np.zeros(1, np.float32), (None, None, 140, 150)
    with mock.patch.object(block_masks, "forward", wraps=block_masks.forward) as launched:
        for edge, count in ((40, 1), (40, 1), (50, 2)):
            kept = dualops.cuda.block_mask(lambda b, h, i, j: j > edge, *sizes, like=q)  # noqa: B023
            assert dualops.cuda.block_mask(kept.mask_mod, 1, 1, 140, 150, like=q) is kept
            assert launched.call_count == count
        del kept
        gc.collect()
        dualops.cuda.block_mask(lambda b, h, i, j: j > edge, *sizes, like=q)
        assert launched.call_count == 3
    other = dualops.cuda.block_mask(woven, 1, 1, 140, 151, like=q)
    assert other is not dualops.cuda.block_mask(woven, 1, 1, 140, 150, like=q)
    assert other is not dualops.cuda.block_mask(woven, 2, 1, 140, 151, like=q)


def test_nobody_changes_one():
    made = dualops.cuda.block_mask(woven, 1, 1, 5, 5, like=np.zeros(1))
    with pytest.raises(AttributeError):
        setattr(made, "Sq", 6)  # noqa: B010
    assert repr(made).startswith("BlockMask(woven#") and repr(made).endswith(", B=1, H=1, Sq=5, Sk=5)")


def arrays(B: int, H: int, Hkv: int, Sq: int, Sk: int, D: int = 16, Dv: int = 24) -> list[Any]:
    return [numbers(B, H, Sq, D), numbers(B, Hkv, Sk, D, seed=1), numbers(B, Hkv, Sk, Dv, seed=2)]


def visited(mask_mod: Any, own: tuple[int, int], given: list[Any], **params: Any) -> Any:
    """o, compared with truth."""
    block_mask = dualops.cuda.block_mask(mask_mod, *own, given[0].shape[2], given[1].shape[2], like=given[0])
    o = attend(*given, mask_mod=mask_mod, block_mask=block_mask, **params)
    checked(o, reference.flash_attention, *given, mask_mod=mask_mod, **params)
    return o


@pytest.mark.parametrize("mask_mod", MASKS, ids=lambda each: each.__name__)
def test_masks(mask_mod):
    visited(mask_mod, (1, 1), arrays(1, 1, 1, 140, 300))


@pytest.mark.parametrize("name", ["reversed", "shuffled"])  # all others here run forward
def test_whatever_the_order_of_threads(name):
    """Two pieces of work for a block, stages that are filled twice."""
    with changed("flash_attention", alone(sm90, Sm90Config(2, 32))), simulator.order(name):
        visited(documents, (1, 1), arrays(1, 1, 1, 160, 300))


@pytest.mark.parametrize("own", [(2, 1), (1, 2), (2, 2)])
def test_heads_and_batches_of_their_own_or_not(own):
    def mask_mod(b, h, i, j):
        return (j + 128 * (b * (own[0] > 1)) + 64 * h * (own[1] > 1)) % 300 < 150

    visited(mask_mod, own, arrays(2, 2, 1, 20, 140))


@pytest.mark.parametrize("params", [{"causal": True}, {"causal": True, "window": (150, 0)}, {"window": (None, 20)}])
def test_ranges_of_the_list(params):
    visited(in_patches, (1, 1), arrays(1, 1, 1, 270, 400), **params)


@pytest.mark.parametrize(
    "params",
    [
        {"softcap": 2.0},
        {"key_padding_mask": np.arange(300)[None] % 3 != 1},
        {"sinks": np.array([0.5], np.float32)},
        {"bias": numbers(1, 20, 300, seed=3)},
        {"dropout_p": 0.3, "seed": 7},
    ],
    ids=lambda params: next(iter(params)),
)
def test_with_other_options(params):
    visited(in_patches, (1, 1), arrays(1, 1, 1, 20, 300), **params)


@pytest.mark.parametrize("config", [Sm90Config(1, 16), Sm90Config(2, 32, q_stages=1), Sm90Config(1, 128, turns=False)])
def test_tiles_of_a_listed_one(config):
    with changed("flash_attention", alone(sm90, config)):
        visited(documents, (1, 1), arrays(1, 1, 1, 130, 260))


def test_tiles_that_do_not_divide_a_listed_one_are_refused():
    given = [numbers(1, 1, 200, 16)] * 3
    lists = np.zeros((1, 1, 2, 3), np.int32)
    found = variant(dualops.cuda.plan("flash_attention", *given, mask_mod=woven, block_mask=lists).problem)
    with pytest.raises(ValueError, match="tiles of 128 queries by 48 keys do not divide a block mask's, 128"):
        build_forward(Sm90Config(2, 48), found, False, "boxes")


def test_what_nobody_sees_is_not_loaded():
    """Nor multiplied: of five tiles of keys three tiles of queries see two each, and nobody the NaN in the fourth."""
    given = arrays(1, 1, 1, 3 * TILE, 5 * TILE)

    def mask_mod(b, h, i, j):
        return (j // 128 == i // 128) | (j // 128 == 4)

    block_mask = dualops.cuda.block_mask(mask_mod, 1, 1, 3 * TILE, 5 * TILE, like=given[0])
    assert block_mask.lists[0, 0].tolist() == [[2, 1, 9, 0, 0, 0], [2, 3, 9, 0, 0, 0], [2, 5, 9, 0, 0, 0]]
    given[1][0, 0, 3 * TILE : 4 * TILE] = given[2][0, 0, 3 * TILE : 4 * TILE] = np.nan
    o = attend(*given, mask_mod=mask_mod, block_mask=block_mask)
    checked(o, reference.flash_attention, *given, mask_mod=mask_mod)
    # the list is believed: keys of a tile that it leaves out do not count
    less = block_mask.lists.copy()
    less[0, 0, :, 0], less[0, 0, :, 1], less[0, 0, :, 2] = 1, 9, 0
    o = attend(*given, mask_mod=mask_mod, block_mask=less)
    checked(o, reference.flash_attention, *given, mask_mod=lambda b, h, i, j: j // 128 == 4)


def test_a_tile_that_is_seen_whole_is_not_asked_about():
    """A list that says so of every tile hides what the function would."""
    given = arrays(1, 1, 1, 70, 2 * TILE)
    lists = np.array([[[[2, 1, 3]]]], np.int32)
    o = attend(*given, mask_mod=woven, block_mask=lists)
    checked(o, reference.flash_attention, *given)


def test_few_queries_and_other_rungs_ask_everywhere():
    given = arrays(1, 1, 1, 3, 520)
    block_mask = dualops.cuda.block_mask(in_patches, 1, 1, 3, 520, like=given[0])
    assert dualops.cuda.plan("flash_attention", *given, mask_mod=in_patches).choice.config.split
    for rung in ("sm90", "simt", "naive"):
        o = dualops.cuda.flash_attention(*given, mask_mod=in_patches, block_mask=block_mask, kernel=rung)
        checked(o, reference.flash_attention, *given, mask_mod=in_patches)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mask_mod": sliding}, ValueError, r"block_mask was made of woven#\w+, mask_mod is sliding#\w+, expected the"),
        ({"mask_mod": None}, ValueError, "block_mask is given without mask_mod, expected the function that it was"),
        ({"q": numbers(2, 2, 130, 16)}, ValueError, "block_mask was made for Sq=140, q has Sq=130"),
        ({"k": numbers(2, 2, 160, 16), "v": numbers(2, 2, 160, 16)}, ValueError, "made for Sk=150, k has Sk=160"),
        ({"q": numbers(3, 2, 140, 16)}, ValueError, r"k has B=2, q has B=3"),
        ({"block_mask": (1, 3, 140, 150)}, ValueError,
         r"block_mask has shape \(1, 3, 2, 3\), expected \[2 or 1, 2 or 1, 2, 3\], for tiles of 128 queries and keys"),
        ({"block_mask": np.zeros((1, 1, 2, 4), np.int32)}, ValueError, r"has shape \(1, 1, 2, 4\), expected \[2 or 1"),
        ({"block_mask": np.zeros((1, 1, 2, 3), np.int64)}, TypeError, "block_mask has dtype int64, expected int32"),
        ({"block_mask": np.zeros((1, 1, 2, 6), np.int32)[..., ::2]}, ValueError, "block_mask has stride 2 along its"),
    ],
)  # fmt: skip
def test_what_does_not_fit(change, error, message):
    x = numbers(2, 2, 150, 16)
    call: dict[str, Any] = {"q": numbers(2, 2, 140, 16), "k": x, "v": x, "mask_mod": woven}
    call["block_mask"] = (2, 2, 140, 150)
    call |= change
    if isinstance(call["block_mask"], tuple):
        call["block_mask"] = reference.block_mask(woven, *call["block_mask"])
    for package in (dualops.cuda, reference):
        with pytest.raises(error, match=f"^flash_attention: .*{message}"):
            package.flash_attention(**call)


def test_a_mask_of_other_values_does_not_fit():
    edge = 3

    def mask_mod(b, h, i, j):
        return j > edge

    x = numbers(1, 1, 20, 16)
    block_mask = dualops.cuda.block_mask(mask_mod, None, None, 20, 20, like=x)
    edge = 4
    with pytest.raises(ValueError, match="expected the same function"):
        dualops.cuda.flash_attention(x, x, x, mask_mod=mask_mod, block_mask=block_mask)
    with pytest.raises(ValueError, match="flash_attention_backward: block_mask was made of"):
        dualops.cuda.flash_attention_backward(
            x, x, x, x, np.zeros((1, 1, 20), np.float32), x, mask_mod=mask_mod, block_mask=block_mask
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mask_mod": None}, TypeError, r"mask_mod is None, of type NoneType, expected a Python function of \(b, h, i"),
        ({"mask_mod": lambda i: True}, TypeError, r"mask_mod is .*, a function of 1 arguments"),
        ({"Sq": -1}, ValueError, "Sq is -1, expected 0 or more"),
        ({"H": 1.5}, TypeError, "H is 1.5, expected an integer"),
        ({"like": "q"}, TypeError, r"like is a (builtins\.)?str, expected a "),
    ],
)
def test_what_no_mask_is_made_of(change, error, message):
    call: dict[str, Any] = {"mask_mod": woven, "B": 1, "H": 1, "Sq": 5, "Sk": 5, "like": np.zeros(1)} | change
    for package in (dualops.cuda, reference):
        with pytest.raises(error, match=f"^block_mask: {message}"):
            package.block_mask(**call)
