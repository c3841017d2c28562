"""attention's sm90 rung where queries are few: keys split among blocks, heads of a group in one tile, parts merged."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda.flash_attention.sm90.split_kv import LEAST_TILES, MOST_SPLITS, most_splits, splits_of
from tests.cuda.simulator.attention import checked, named, numbers

attend: Any = partial(dualops.cuda.flash_attention, kernel="sm90")
attend_varlen: Any = partial(dualops.cuda.flash_attention_varlen, kernel="sm90")


def few(B: int = 1, H: int = 6, Hkv: int = 2, Sq: int = 3, Sk: int = 700, D: int = 24, Dv: int = 40) -> list[Any]:
    return [numbers(B, H, Sq, D), numbers(B, Hkv, Sk, D, seed=1), numbers(B, Hkv, Sk, Dv, seed=2)]


def test_more_heads_than_rows_go_one_by_one():
    assert dualops.cuda.plan("flash_attention", *few(1, 65, 1, 1, 520)).choice.config.heads == 1


def test_a_row_knows_nothing_of_its_batch():
    """Alone, in a batch of 4, and among sequences of other lengths, empty ones too."""
    q, k, v = few(4, Sq=2, Sk=900)
    params: dict[str, Any] = {"causal": True, "return_lse": True}
    together = attend(q, k, v, **params)
    alone = attend(q[3:4], k[3:4], v[3:4], **params)
    assert all(np.array_equal(many[3:4], one) for many, one in zip(together, alone, strict=True))
    ends_q, ends_k = np.array([0, 5, 5, 7, 12], np.int32), np.array([0, 30, 600, 1500, 1500], np.int32)
    tokens = [np.concatenate([x, y[3].transpose(1, 0, 2), x]) for x, y in _around(q, k, v)]
    tokens = [x[:n] for x, n in zip(tokens, (12, 1500, 1500), strict=True)]
    varlen = partial(dualops.cuda.flash_attention_varlen, kernel="sm90", max_seqlen_q=5, max_seqlen_k=900, **params)
    o, lse = varlen(*tokens, ends_q, ends_k)
    assert np.array_equal(o[5:7].transpose(1, 0, 2)[None], alone[0])
    assert np.array_equal(lse[:, 5:7][None], alone[1])
    assert (lse[:, 7:] == -np.inf).all() and not o[7:].astype(np.float32).any()  # there are no keys
    sizes = {"max_seqlen_q": 5, "max_seqlen_k": 900, "causal": True}
    checked(o, reference.flash_attention_varlen, *tokens, ends_q, ends_k, **sizes)


@pytest.mark.parametrize(
    "params",
    [
        {"causal": True},
        {"window": (700, 0), "sinks": np.array([0.5, -np.inf], np.float32)},
        {"softcap": 2.0, "causal": True},
        {"alibi_slopes": np.array([0.01, 0.02], np.float32)},
    ],
    ids=named,
)
def test_few_queries_and_many(params):
    """A block has all splits of its rows then, one after the other; other sequences are not split, as alone."""
    lengths_q, lengths_k = (2, 70, 33, 0, 20, 5), (1100, 90, 512, 60, 513, 0)
    tokens = [numbers(sum(n), H, D, seed=H) for n, H, D in ((lengths_q, 2, 24), (lengths_k, 1, 24), (lengths_k, 1, 40))]
    ends_q, ends_k = (np.cumsum([0, *n]).astype(np.int32) for n in (lengths_q, lengths_k))
    sizes = {"max_seqlen_q": 70, "max_seqlen_k": 1100}
    config = dualops.cuda.plan("flash_attention_varlen", *tokens, ends_q, ends_k, **sizes, **params).choice.config
    assert config.few.serial and not config.others.split
    together = attend_varlen(*tokens, ends_q, ends_k, **sizes, return_lse=True, **params)
    checked(together, reference.flash_attention_varlen, *tokens, ends_q, ends_k, **sizes, **params)
    for b in range(len(lengths_q)):
        here_q, here_k = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        q, k, v = tokens[0][here_q], tokens[1][here_k], tokens[2][here_k]
        if not (len(q) and len(k)):
            continue
        ends = np.array([0, len(q)], np.int32), np.array([0, len(k)], np.int32)
        own = {"max_seqlen_q": len(q), "max_seqlen_k": len(k), "return_lse": True, **params}
        for found, alone in zip(_of(together, here_q), attend_varlen(q, k, v, *ends, **own), strict=True):
            assert np.array_equal(found, alone)
        o, lse = attend(*(x.transpose(1, 0, 2)[None] for x in (q, k, v)), return_lse=True, **params)
        for found, even in zip(_of(together, here_q), (o[0].transpose(1, 0, 2), lse[0]), strict=True):
            assert np.array_equal(found, even)


def _of(results: Any, tokens: slice) -> Any:
    o, lse = results
    return o[tokens], lse[:, tokens]


def _around(q: Any, k: Any, v: Any) -> list[Any]:
    """Tokens of other sequences, and the arrays."""
    before = numbers(5, 6, 24, seed=5), numbers(600, 2, 24, seed=6), numbers(600, 2, 40, seed=7)
    return [*zip(before, (q, k, v), strict=True)]


def test_what_a_mask_hides_stays_where_it_is():
    q, k, v = few(H=2, Sk=560)
    v[0, 1, 540, 5], k[0, 0, 559] = np.nan, np.inf
    for params in ({"causal": True}, {"mask_mod": lambda b, h, i, j: j != 540, "causal": True}):
        found = attend(q, k, v, **params)
        checked(found, reference.flash_attention, q, k, v, **params)
        assert np.isfinite(found[:, :1, :2].astype(np.float32)).all()


def test_splits_follow_from_the_number_of_keys():
    verbs = splits_of(128)
    for keys in (1, 127, 128, 129, 512, 513, 5000, 16384, 32768, 32769, 100_000, 2_000_000):
        tiles, count = verbs.tiles(keys), verbs.count(keys)
        assert tiles == max(LEAST_TILES, -(-keys // (128 * MOST_SPLITS))) and count == -(-keys // (128 * tiles))
        assert count <= MOST_SPLITS and (count - 1) * tiles * 128 < keys <= count * tiles * 128


def test_fewer_keys_may_make_more_splits():
    """Of sequences of 16384 and 17000 keys the first has more: there is room for as many."""
    verbs = splits_of(64)
    for longest in (1, 512, 513, 16_383, 16_384, 16_385, 17_000, 40_000):
        most = max(verbs.count(keys) for keys in range(longest + 1))
        assert most <= most_splits(longest, 64) == verbs.most(longest) <= MOST_SPLITS
    arrays = numbers(3, 2, 192), numbers(33384, 1, 192), numbers(33384, 1, 192)
    ends_q, ends_k = np.array([0, 1, 3], np.int32), np.array([0, 16384, 33384], np.int32)
    plan = dualops.cuda.plan("flash_attention_varlen", *arrays, ends_q, ends_k, max_seqlen_q=2, max_seqlen_k=17000)
    assert plan.choice.config.few.block_kv == 64
    assert plan.choice.workspace["o_parts"].shape[0] == verbs.count(16384) == MOST_SPLITS


def test_few_keys_or_many_queries_are_not_split():
    for sizes in ({"Sk": 512}, {"Sq": 65}):
        assert not dualops.cuda.plan("flash_attention", *few(**sizes)).choice.config.split


def test_memory_is_said():
    workspace = dualops.cuda.plan("flash_attention", *few(2)).choice.workspace
    assert {name: meta.shape for name, meta in workspace.items()} == {
        "counter": (1,),
        "o_parts": (2, 2, 6, 3, 40),
        "lse_parts": (2, 2, 6, 3, 2),
    }
