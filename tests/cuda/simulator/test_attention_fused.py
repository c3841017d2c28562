"""Attention's whole gradient by one kernel of the sm90 rung: the order of blocks, whom it serves, and sequences that
lie one after another.
"""

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda import simulator
from dualops.cuda.flash_attention import sm90
from dualops.cuda.flash_attention.sm90 import backward as sm90_backward
from dualops.cuda.flash_attention.tile_scheduler import Extent, packed_count, packed_pieces
from dualops.spec.lengths import random_ends
from dualops.spec.meta import Strided
from tests.cuda.simulator.attention import numbers
from tests.cuda.simulator.gradients import VARLEN, fused, gradient, gradient_varlen, held


def given_for(D: int, B: int, H: int, Sq: int, Sk: int, **params: Any) -> list[np.ndarray]:
    """q, k, v, o, lse and do of heads of this width."""
    q, do = (numbers(B, H, Sq, D, seed=seed) for seed in (0, 3))
    k, v = (numbers(B, H, Sk, D, seed=seed) for seed in (1, 2))
    o, lse = reference.flash_attention(q, k, v, return_lse=True, **params)
    return [q, k, v, o, lse, do]


@pytest.mark.parametrize(("D", "Sq", "order"), [(128, 80, "reversed"), (64, 160, "shuffled")])
def test_the_order_of_blocks_changes_nothing(D, Sq, order):
    """They draw their work, so that none waits for one that has not begun."""
    arrays = given_for(D, 1, 1, Sq, 300, causal=True)
    with fused():
        first = gradient(*arrays, causal=True)
        with simulator.order(order):
            again = gradient(*arrays, causal=True)
    assert all(np.array_equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize(("D", "Sq"), [(128, 70), (64, 140)])
def test_a_sequence_alone_and_in_a_batch(D, Sq):
    arrays = given_for(D, 2, 2, Sq, 200)
    with fused():
        together = gradient(*arrays)
        alone = gradient(*(x[1:2, 1:] for x in arrays))
    assert all(np.array_equal(a[1:2, 1:], b) for a, b in zip(together, alone))


@pytest.mark.parametrize(
    ("Sq", "Sk", "params", "whole"),
    [
        (2048, 2048, {}, True),
        (2048, 2048, {"causal": True}, True),
        (2048, 2048, {"causal": True, "window": (100, None)}, True),
        (2048, 2048, {"window": (100, 100)}, True),
        (2048, 2048, {"softcap": 20.0, "causal": True}, True),
        (2048, 2048, {"dropout_p": 0.1, "seed": 3}, True),
        (2048, 2048, {"softcap": 20.0, "dropout_p": 0.1, "seed": 3}, False),
        (2048, 2048, {"dropout_p": 0.1, "seed": 3, "key_padding_mask": np.ones((1, 2048), bool)}, True),
        (64, 4096, {}, False),
    ],
)
def test_who_is_served(Sq, Sk, params, whole):
    """Few queries would be waited for by one block after another."""
    q, k = (np.empty((1, 2, S, 128), np.float16) for S in (Sq, Sk))
    lse = np.empty((1, 2, Sq), np.float32)
    plan = dualops.cuda.plan("flash_attention", q, k, k, o=q, lse=lse, do=q, backward=True, **params)
    assert isinstance(plan.choice.config, sm90_backward.FusedConfigs) == whole


def arrays_for(D: int, H: int, Hkv: int, ends_q: tuple[int, ...], ends_k: tuple[int, ...]) -> list[np.ndarray]:
    """q, k, v, do and where sequences end, of heads of this width."""
    q, do = (numbers(ends_q[-1], H, D, seed=seed) for seed in (0, 3))
    k, v = (numbers(ends_k[-1], Hkv, D, seed=seed) for seed in (1, 2))
    return [q, k, v, do, *(np.array(ends, np.int32) for ends in (ends_q, ends_k))]


def by_fused(*arrays: np.ndarray, **params: Any) -> Any:
    """Its gradients, and the arrays and parameters that they are of. arrays: as `arrays_for` makes them."""
    q, k, v, do, ends_q, ends_k = arrays
    params |= {f"max_seqlen_{side}": int(np.diff(ends).max()) for side, ends in (("q", ends_q), ("k", ends_k))}
    o, lse = reference.flash_attention_varlen(q, k, v, ends_q, ends_k, return_lse=True, **params)
    given = q, k, v, o, lse, do, ends_q, ends_k
    with fused(operator=VARLEN):
        return gradient_varlen(*given, **params), given, params


@pytest.mark.parametrize(
    ("D", "Hkv", "params"), [(128, 1, {}), (64, 2, {"causal": True}), (128, 2, {"window": (30, 5)})], ids=str
)
def test_a_sequence_alone_and_among_others(D, Hkv, params):
    """The same bits, whatever the order of blocks: one with more tiles than one, some without queries or keys."""
    ends_q, ends_k = (0, 5, 5, 75, 77, 90), (0, 30, 47, 47, 60, 210)
    arrays = arrays_for(D, 2, Hkv, ends_q, ends_k)
    with simulator.order("shuffled"):
        (dq, dk, dv), (q, k, v, o, lse, do, *_), _ = by_fused(*arrays, **params)
    of_q, of_k = ([slice(*pair) for pair in pairwise(ends)] for ends in (ends_q, ends_k))
    assert not dq[of_q[2]].any() and not dk[of_k[1]].any() and not dv[of_k[1]].any()
    for i, j in ((of_q[0], of_k[0]), (of_q[4], of_k[4])):
        batch = [x[part].transpose(1, 0, 2)[None] for x, part in ((q, i), (k, j), (v, j), (o, i))]
        with fused():
            alone = gradient(*batch, lse[None, :, i], do[i].transpose(1, 0, 2)[None], **params)
        for found, expected in zip((dq[i], dk[j], dv[j]), alone):
            assert np.array_equal(found, expected[0].transpose(1, 0, 2))


@pytest.mark.parametrize(
    ("dtype", "causal", "D", "few", "many"),
    [("bfloat16", False, 128, 20, 200), ("float16", True, 64, 40, 390), ("float32", True, 64, 20, 70)],
)
def test_short_and_long_sequences(dtype, causal, D, few, many):
    """Each has the bits that it has without the others, and one of few queries, in 16 bits, those of an even call."""
    ends_q, ends_k = (np.array(ends, np.int32) for ends in ((0, few, few + many, few + many), (0, 30, 60, 90)))
    q, do = (numbers(few + many, 1, D, seed=seed).astype(dtype) for seed in (0, 3))
    k, v = (numbers(90, 1, D, seed=seed).astype(dtype) for seed in (1, 2))
    longest: dict[str, Any] = {"max_seqlen_q": many, "max_seqlen_k": 30}
    o, lse = reference.flash_attention_varlen(q, k, v, ends_q, ends_k, return_lse=True, causal=causal, **longest)
    given = q, k, v, o, lse, do, ends_q, ends_k
    found = gradient_varlen(*given, causal=causal, **longest)
    held(found, *given, causal=causal, **longest)
    assert not found[1][60:].any() and not found[2][60:].any()  # nobody asks
    for of_q, of_k in ((slice(few), slice(30)), (slice(few, few + many), slice(30, 60))):
        own = (x[part] for x, part in ((q, of_q), (k, of_k), (v, of_k), (o, of_q)))
        ends = (np.array([0, part.stop - (part.start or 0)], np.int32) for part in (of_q, of_k))
        longest["max_seqlen_q"] = of_q.stop - (of_q.start or 0)
        alone = gradient_varlen(*own, lse[:, of_q], do[of_q], *ends, causal=causal, **longest)
        for together, expected, part in zip(found, alone, (of_q, of_k, of_k), strict=True):
            assert np.array_equal(together[part], expected)
    if dtype != "float32":
        batch = [x[:n].transpose(1, 0, 2)[None] for x, n in ((q, few), (k, 30), (v, 30), (o, few))]
        even = gradient(*batch, lse[None, :, :few], do[:few].transpose(1, 0, 2)[None], causal=causal)
        for together, expected, n in zip(found, even, (few, 30, 30), strict=True):
            assert np.array_equal(together[:n], expected[0].transpose(1, 0, 2))


@pytest.mark.parametrize(("dtype", "D"), [("bfloat16", 64), ("float16", 192), ("float32", 72)])
def test_one_long_sequence_among_short_ones(dtype, D):
    """Tiles of keys are numbered by tokens; of the sequences some have no queries, some no keys."""
    lengths_q, lengths_k = (2, 0, 3, 40, 1, 1, 1, 1), (1, 2, 0, 300, 1, 1, 0, 1)
    ends = [(0, *(sum(lengths[: i + 1]) for i in range(8))) for lengths in (lengths_q, lengths_k)]
    arrays = [x.astype(dtype) for x in arrays_for(D, 2, 1, *ends)[:4]]
    q, k, v, do = arrays
    ends_q, ends_k = (np.array(each, np.int32) for each in ends)
    longest: dict[str, Any] = {"max_seqlen_q": 40, "max_seqlen_k": 300}
    o, lse = reference.flash_attention_varlen(q, k, v, ends_q, ends_k, return_lse=True, **longest)
    given = q, k, v, o, lse, do, ends_q, ends_k
    with simulator.order("shuffled"):
        found = gradient_varlen(*given, **longest)
    held(found, *given, **longest)
    named: dict[str, Any] = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "o": o, "lse": lse, "do": do}
    plan = dualops.cuda.plan(VARLEN, q, k, v, **named, backward=True, kernel="sm90", **longest)
    (dkv,) = (step for step in plan.steps if "_dkv_" in step.kernel.name)
    assert dkv.grid == (packed_count(ends_k[-1], plan.choice.config.dkv.block_kv, 8),)


def test_tokens_of_no_sequence():
    """More than a tile of queries and of keys; whatever they and their gradients hold, results are 0 there."""
    ends_q, ends_k = np.array([0, 5, 30], np.int32), np.array([0, 30, 47], np.int32)
    q, do = (numbers(130, 2, 64, seed=seed) for seed in (0, 3))
    k, v = (numbers(210, 1, 64, seed=seed) for seed in (1, 2))
    for x, ends in ((q, ends_q), (do, ends_q), (k, ends_k), (v, ends_k)):
        x[ends[-1] :] = np.nan
    sinks, dlse = np.array([0.5, -1], np.float32), np.full((2, 130), np.nan, np.float32)
    dlse[:, :30] = 0.25
    params: dict[str, Any] = {"max_seqlen_q": 30, "max_seqlen_k": 40, "causal": True}
    o, lse = reference.flash_attention_varlen(q, k, v, ends_q, ends_k, return_lse=True, sinks=sinks, **params)
    assert not o[30:].any() and np.isneginf(lse[:, 30:]).all()
    given = q, k, v, o, lse, do, ends_q, ends_k
    with fused(operator=VARLEN):
        found = gradient_varlen(*given, dlse=dlse, sinks=sinks, **params)
    held(found, *given, dlse=dlse, sinks=sinks, **params)
    for x, end in zip(found, (30, 47, 47), strict=False):
        assert np.isfinite(x.astype(np.float32)).all() and not x[end:].any()


@pytest.mark.parametrize("left", [0, 3, 50])
@pytest.mark.parametrize("section", [0, 100, 1000])
def test_numbers_of_tiles(section, left):
    """Each tile has one, and of a head those of later tiles are greater. left: tokens that belong to no sequence, whose
    numbers are tiles behind a sequence's last token, counted from its front and from its back.
    """
    rng, block, H, group = np.random.default_rng(section), 8, 6, 2
    ends = [random_ends(total, 5, 40, rng) for total in (90, 110)]
    lengths = tuple(Strided(each, (1,)) for each in ends)
    for side, (name, each, heads) in enumerate((("q", group, H), ("k", 1, H // group))):
        pieces, extent = packed_pieces(block, side), Extent(5 * H, section, H, group, 40, 40, 1)
        count, whole = (packed_count(ends[side][-1] + more, block, 5) for more in (left, 0))
        everything = [pieces(n, extent, each, lengths) for n in range(heads * count)]
        found, nobodys = everything[: heads * whole], everything[heads * whole :]
        assert nobodys or left < block, name
        for of_batch, head, tile, count in nobodys:
            assert of_batch == heads and 4 * heads <= head < 5 * heads, name
            assert tile == count - 1 - tile and tile * block >= np.diff(ends[side])[-1], name
        assert all(of_batch == heads and tile < count for of_batch, _, tile, count in found), name
        numbered = [(int(head), int(tile)) for _, head, tile, _ in found]
        assert len({*numbered}) == len(numbered)
        for (b, size), h in product(enumerate(np.diff(ends[side])), range(heads)):
            tiles = [tile for head, tile in numbered if head == b * heads + h]
            assert tiles == sorted(tiles) and len(tiles) >= -(-size // block), name


@pytest.mark.parametrize(
    ("longest", "params", "by_length"),
    [
        (2048, {}, True),
        (2048, {"causal": True}, True),
        (2048, {"causal": True, "window": (100, None)}, True),
        (2048, {"softcap": 20.0}, True),
        (100, {"causal": True}, False),
    ],
)
def test_which_sequences_are_served(longest, params, by_length):
    q, lse = np.empty((4096, 2, 128), np.float16), np.empty((2, 4096), np.float32)
    ends, said = [*range(0, 4096, longest), 4096], {"max_seqlen_q": longest, "max_seqlen_k": longest}
    for others in ([4096], []):  # an empty one, or none: then each is as long as the longest, as the host knows
        made = np.array([*ends, *others], np.int32)
        given = {"cu_seqlens_q": made, "cu_seqlens_k": made, "o": q, "lse": lse, "do": q}
        config = dualops.cuda.plan(VARLEN, q, q, q, **given, backward=True, **said, **params).choice.config
        assert isinstance(config, sm90_backward.ByLength) == (by_length and bool(others))
        config = dualops.cuda.plan(VARLEN, q, q, q, made, made, **said, **params).choice.config
        assert isinstance(config, sm90.ByLength) == (longest > 512 and bool(others))
