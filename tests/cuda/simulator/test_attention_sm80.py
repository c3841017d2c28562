"""attention's sm80 rung: what its cases do not have. Options, layouts, varlen, what a mask hides, what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda.flash_attention import sm80
from dualops.cuda.flash_attention.sm80.config import Sm80Config, configs
from dualops.cuda.flash_attention.sm80.reading import Vectors
from dualops.spec.attention.cases import bent, woven
from tests.cuda.simulator.test_attention_sm90 import BFLOAT16, checked, numbers, widened

attend: Any = partial(dualops.cuda.flash_attention, kernel="sm80")
SLOPES = np.linspace(0.01, 0.04, 2, dtype=np.float32)
SINKS = np.linspace(-1, 4, 2, dtype=np.float32)


@pytest.fixture
def small(monkeypatch):
    """Tiles of 32 keys, so that there are more of them, and new plans."""
    monkeypatch.setattr(sm80, "configs", lambda *_: iter([(Sm80Config(1, 32), "small")]))
    for operation in dualops.cuda.launch.OPERATIONS["flash_attention"][:1]:
        monkeypatch.setattr(operation, "plans", {})
        monkeypatch.setattr(operation, "families", {})


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"causal": True, "window": (30, 0)},
        {"causal": "top_left"},
        {"alibi_slopes": SLOPES, "softcap": 2.0},
        {"sinks": SINKS, "window": (40, None), "causal": True},
        {"bias": numbers(2, 70, 90, seed=3)},
        {"score_mod": bent, "mask_mod": woven},
        {"key_padding_mask": np.arange(90)[None] % 3 != 1},
        {"dropout_p": 0.3, "seed": 7},
    ],
    ids=lambda params: "-".join(params) or "plain",
)
def test_options(params):
    arrays = [numbers(1, 2, 70, 24), numbers(1, 1, 90, 24, seed=1), numbers(1, 1, 90, 40, seed=2)]
    o, lse = attend(*arrays, return_lse=True, **params)
    checked(o, "o", reference.flash_attention, *arrays, **params)
    wide = {name: widened(value) for name, value in params.items()}
    _, truth = reference.flash_attention(*map(widened, arrays), return_lse=True, **wide)
    np.testing.assert_allclose(lse, truth, rtol=1e-5, atol=1e-5)


# boxes; Q in registers, and not; parts
@pytest.mark.parametrize(
    ("dtype", "D", "Dv"),
    [*((BFLOAT16, *widths) for widths in ((32, 96), (128, 64), (200, 136), (256, 256))), (np.float32, 100, 40)],
)
def test_widths(dtype, D, Dv):
    arrays = [x.astype(dtype) for x in (numbers(1, 1, 20, D), numbers(1, 1, 50, D), numbers(1, 1, 50, Dv, seed=2))]
    checked(attend(*arrays, causal=True), "o", reference.flash_attention, *arrays, causal=True)


def test_eight_warps(monkeypatch):
    """Two groups of four warps share tiles of keys."""
    monkeypatch.setattr(sm80, "configs", lambda *_: iter([(Sm80Config(2, 32), "wide")]))
    arrays = [numbers(1, 1, 131, 40), numbers(1, 1, 67, 40, seed=1), numbers(1, 1, 67, 40, seed=2)]
    checked(attend(*arrays, causal="top_left"), "o", reference.flash_attention, *arrays, causal="top_left")


def of_rows(width: int, room: int, first: int, seed: int, dtype: Any) -> np.ndarray:
    """[1, 1, 36, width], whose rows are so many elements apart and begin at the element `first` of them."""
    return numbers(1, 1, 36, room, seed=seed).astype(dtype)[..., first : first + width]


@pytest.mark.parametrize(
    ("dtype", "width", "room", "first", "vector"),
    [
        (BFLOAT16, 24, 40, 8, 8),
        (BFLOAT16, 20, 20, 0, 4),
        (BFLOAT16, 18, 22, 2, 2),
        (BFLOAT16, 7, 16, 1, 1),
        (BFLOAT16, 33, 33, 0, 1),
        (BFLOAT16, 70, 71, 0, 1),
        (np.float32, 36, 40, 4, 4),
        (np.float32, 18, 18, 0, 2),
        (np.float32, 7, 9, 1, 1),
    ],
)
def test_rows_at_any_place(dtype, width, room, first, vector):
    q, k, v = (of_rows(width, room, first, seed, dtype) for seed in range(3))
    out = np.full((36, room), 7, q.dtype)
    o = out[None, None, :, first : first + width]
    plan = dualops.cuda.plan("flash_attention", q, k, v, out=o, kernel="sm80")
    of_results = vector if vector * q.itemsize == 16 else 1
    assert f"{Vectors(vector, vector, vector, of_results)}" in plan.steps[0].kernel.identity
    attend(q, k, v, causal=True, out=o)
    checked(o, "o", reference.flash_attention, q, k, v, causal=True)
    around = out.copy()
    around[:, first : first + width] = 7
    assert (around == 7).all()


def test_tokens_before_heads_and_one_batch_of_keys_for_all():
    q = numbers(2, 70, 2, 40).transpose(0, 2, 1, 3)
    k, v = (numbers(1, 40, 1, 40, seed=seed).transpose(0, 2, 1, 3) for seed in (1, 2))
    found = attend(q, *(np.broadcast_to(x, (2, 1, 40, 40)) for x in (k, v)), causal="top_left")
    dense = [np.concatenate((x, x)) for x in (k, v)]
    checked(found, "o", reference.flash_attention, q, *dense, causal="top_left")


def test_sequences_one_after_another():
    """Empty ones, and ends within a tile: a sequence neither reads the next one's keys nor writes to its rows."""
    ends_q, ends_k = (np.array(ends, np.int32) for ends in ((0, 5, 5, 75, 140), (0, 30, 47, 47, 150)))
    q, k, v = numbers(140, 2, 16), numbers(150, 1, 16, seed=1), numbers(150, 1, 24, seed=2)
    v[47] = np.nan  # the first key of the last sequence, which its first query alone does not see
    arrays = (q, k, v, ends_q, ends_k)
    params: dict[str, Any] = {"causal": True, "max_seqlen_q": 70, "max_seqlen_k": 103}
    found = dualops.cuda.flash_attention_varlen(*arrays, kernel="sm80", **params)
    checked(found, "o", reference.flash_attention_varlen, *arrays, **params)
    assert np.isfinite(found[:75].astype(np.float32)).all()


@pytest.mark.parametrize(("D", "Sq", "Sk"), [(32, 70, 100), (150, 10, 40)])
def test_rows_do_not_depend_on_what_is_beside_them(D, Sq, Sk):
    q, k, v = numbers(2, 1, Sq, D), numbers(2, 1, Sk, D, seed=1), numbers(2, 1, Sk, D, seed=2)
    together = attend(q, k, v, causal=True, return_lse=True)
    alone = attend(q[1:2], k[1:2], v[1:2], causal=True, return_lse=True)
    ends = [np.array((0, n), np.int32) for n in (Sq, Sk)]
    tokens = [x[1].transpose(1, 0, 2) for x in (q, k, v)]
    packed: dict[str, Any] = {"causal": True, "max_seqlen_q": Sq, "max_seqlen_k": Sk, "kernel": "sm80"}
    one = dualops.cuda.flash_attention_varlen(tokens[0], tokens[1], tokens[2], ends[0], ends[1], **packed)
    assert all(np.array_equal(many[1:2], few) for many, few in zip(together, alone, strict=True))
    assert np.array_equal(attend(q, k, v, causal=True).view(np.uint16), together[0].view(np.uint16))
    assert np.array_equal(one.transpose(1, 0, 2)[None], alone[0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.float32])
def test_what_a_mask_hides_stays_where_it_is(value, dtype):
    q, k, v = (numbers(1, 1, *shape, seed=sum(shape)).astype(dtype) for shape in ((40, 16), (50, 16), (50, 24)))
    v[0, 0, 30, 5] = k[0, 0, 45] = value
    for params in ({"causal": True}, {"mask_mod": lambda b, h, i, j: j != 30, "causal": True}):
        found = attend(q, k, v, **params)
        checked(found, "o", reference.flash_attention, q, k, v, **params)
        assert np.isfinite(found[:, :, :20].astype(np.float32)).all()


@pytest.mark.parametrize(
    ("make", "rung"),
    [
        (lambda: [numbers(1, 1, 8, 16)] * 3, "sm90"),
        (lambda: [numbers(1, 1, 8, 24)[..., 4:20]] * 3, "sm80"),  # rows at multiples of 8 bytes
        (lambda: [np.broadcast_to(numbers(1, 1, 1, 16), (1, 1, 8, 16))] * 3, "sm80"),
    ],
)
def test_what_a_call_takes(make, rung):
    assert dualops.cuda.plan("flash_attention", *make()).choice.rung == rung


@pytest.mark.parametrize(
    ("make", "params"),
    [
        (lambda: [numbers(1, 1, 8, 264)] * 2 + [numbers(1, 1, 8, 16)], {}),
        (lambda: [numbers(1, 1, 8, 16).astype(np.float32)] * 2 + [numbers(1, 1, 8, 264).astype(np.float32)], {}),
        (lambda: [numbers(1, 1, 8, 16)] * 3, {"scale": 0.0}),
        (lambda: [numbers(1, 1, 8, 16)] * 3, {"scale": -1.0}),
        (lambda: [numbers(1, 1, 8, 16).astype(np.float64)] * 3, {}),
    ],
)
def test_what_is_another_rungs(make, params):
    arrays = make()
    with pytest.raises(NotImplementedError, match="flash_attention: rung sm80 does not do"):
        attend(*arrays, **params)
    assert dualops.cuda.plan("flash_attention", *arrays, **params).choice.rung == "simt"


def test_tiles_fit_into_what_a_block_has():
    """Of consumers' cards too: 99 KiB."""
    for D in (32, 64, 128, 192, 256):
        least = min(config.shared_bytes(D, D, 2) for config, _ in configs(D, D, 2, []))
        assert least <= 99 * 1024
