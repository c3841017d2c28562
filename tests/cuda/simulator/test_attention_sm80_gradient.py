"""attention's gradient on the sm80 rung: widths, Configs, options, layouts, what a mask hides, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda import simulator
from dualops.cuda.flash_attention import sm80
from dualops.cuda.flash_attention.sm80.config import Sm80DkvConfig, Sm80DqConfig, dkv_configs, dq_configs
from dualops.spec import OPERATORS, Case
from dualops.spec.attention.cases import bent, paired, woven
from tests.checks import check
from tests.cuda.configs import changed
from tests.cuda.simulator.attention import an_infinite_key_is_capped, named, numbers

SMALL = Sm80DqConfig(1, 32), Sm80DkvConfig(1, 32)


@contextmanager
def served(configs: Any) -> Iterator[None]:
    """Inside the with statement these Configs are the only ones, of dq's kernel and of dk's and dv's."""
    dq, dkv = configs
    instead = {"dq_configs": lambda *_: iter([(dq, "alone")]), "dkv_configs": lambda *_: iter([(dkv, "alone")])}
    with changed("flash_attention", (sm80, instead)), changed("flash_attention_varlen"):
        yield


def checked(
    q: tuple[int, ...],
    k: tuple[int, int],
    Dv: int,
    configs: Any = SMALL,
    dtype: str = "bfloat16",
    special: bool = False,
    **params: Any,
) -> None:
    """The gradient of a call against truth. q: B, H, Sq, D; k: heads and tokens; params as `paired` takes them."""
    shapes, params = paired(params, q, k, Dv)
    with served(configs):
        run: Any = partial(dualops.cuda.flash_attention_backward, kernel="sm80")
        case = Case("gradient", dtype, shapes, params)
        check(OPERATORS["flash_attention"], case, run, backward=True, ways=("given",), special=special)


@pytest.mark.parametrize(("D", "Dv"), [(128, 128), (96, 40), (16, 120), (7, 33)])
def test_widths(D, Dv):
    checked((1, 1, 70, D), (1, 80), Dv, causal=True)


@pytest.mark.parametrize("order", ["forward", "reversed", "shuffled"])
@pytest.mark.parametrize(("D", "Dv"), [(32, 40), (40, 32)])
def test_threads_in_any_order(D, Dv, order):
    """Rows of dk and dv that lie in shared memory at different distances, and more than one tile of everything."""
    with simulator.order(order):
        checked((1, 2, 50, D), (1, 40), Dv)


def test_float16():
    checked((1, 1, 70, 64), (1, 70), 64, dtype="float16", causal=True)


@pytest.mark.parametrize(
    "configs",
    [
        (Sm80DqConfig(1, 64), Sm80DkvConfig(2, 64)),
        (Sm80DqConfig(2, 64, held=False), Sm80DkvConfig(1, 32, k_held=True)),
        (Sm80DqConfig(1, 32), Sm80DkvConfig(1, 32, k_held=True, v_held=True)),
    ],
    ids=str,
)
def test_configs(configs):
    """Tiles that fill each stage twice."""
    checked((1, 1, 150, 24), (1, 150), 40, configs)


@pytest.mark.parametrize(
    "params",
    [{"causal": True}, {"causal": "top_left"}, {"window": (20, 5)}, {"window": (30, None), "causal": True}],
    ids=str,
)
@pytest.mark.parametrize(("Sq", "Sk"), [(40, 150), (150, 40)])
def test_masks(Sq, Sk, params):
    """Some queries see nothing, and some keys are not seen."""
    checked((1, 1, Sq, 32), (1, Sk), 32, **params)


def test_heads_of_a_group():
    checked((1, 4, 40, 32), (2, 70), 32, causal=True)


@pytest.mark.parametrize(
    "params",
    [
        {"alibi_slopes": True, "bias": "full", "causal": True},
        {"bias": "keys"},
        {"sinks": True, "window": (20, 5), "key_padding_mask": True, "softcap": 2.0},
        {"score_mod": bent, "mask_mod": woven},
        {"dropout_p": 0.3, "softcap": 2.0, "causal": True},
    ],
    ids=named,
)
def test_options(params):
    """With a group of two heads, and ragged tiles; by the Configs that a call takes."""
    shapes, params = paired(params, (1, 2, 40, 40), (1, 69), 64)
    run: Any = partial(dualops.cuda.flash_attention_backward, kernel="sm80")
    case = Case("gradient", "bfloat16", shapes, params)
    check(OPERATORS["flash_attention"], case, run, backward=True, ways=("given",))


@pytest.mark.parametrize("params", [{}, {"causal": True, "mask_mod": woven, "score_mod": bent}], ids=named)
def test_what_a_mask_hides_stays_where_it_is(params):
    """NaN and infinities among the values."""
    checked((1, 1, 18, 24), (1, 70), 40, special=True, **params)


def test_a_score_of_minus_infinity_is_a_masked_one():
    """An infinite key is no part of the rows that it has such a score in, though nothing else hides it."""
    q, k, v, do = (numbers(1, 1, tokens, 16, seed=seed) for seed, tokens in enumerate((20, 40, 40, 20)))
    k[0, 0, 30, 3] = -np.inf
    q[..., 3] = np.abs(q[..., 3])
    o, lse = reference.flash_attention(q, k, v, return_lse=True)
    with served(SMALL):
        dq, _, dv = dualops.cuda.flash_attention_backward(q, k, v, o, lse, do, kernel="sm80")
    expected, _, expected_dv = reference.flash_attention_backward(q, k, v, o, lse, do)
    for found, right in ((dq, expected), (dv, expected_dv)):
        assert np.isfinite(right.astype(np.float32)).all()
        np.testing.assert_allclose(found.astype(np.float32), right.astype(np.float32), rtol=2e-2, atol=2e-3)


def test_minus_infinity_that_is_capped_is_none():
    """Softcap makes -softcap of it, which counts."""
    with served(SMALL):
        an_infinite_key_is_capped(64, "sm80")


@pytest.mark.parametrize("causal", [False, True])
def test_sequences(causal):
    """Empty ones, and ends within a tile."""
    shapes = {"q": (120, 2, 32), "k": (150, 1, 32), "v": (150, 1, 40), "cu_seqlens_q": (5,), "cu_seqlens_k": (5,)}
    params = {"max_seqlen_q": 70, "max_seqlen_k": 80, "causal": causal, "return_lse": True}
    with served(SMALL):
        run: Any = partial(dualops.cuda.flash_attention_varlen_backward, kernel="sm80")
        case = Case("gradient", "bfloat16", shapes, params)
        check(OPERATORS["flash_attention_varlen"], case, run, backward=True, ways=("given",))


def rung_of(D: int, Dv: int, dtype: Any = None, **params: Any) -> str:
    """Which serves a call whose rows lie at multiples of 2 bytes, so that no boxes are copied."""
    q, k = (numbers(1, 1, 8, D + 1, seed=seed)[..., 1:] for seed in range(2))
    v, do = (numbers(1, 1, 8, Dv + 1, seed=seed)[..., 1:] for seed in range(2))
    arrays = [x.astype(dtype) for x in (q, k, v, do)] if dtype else (q, k, v, do)
    o, lse = reference.flash_attention(*arrays[:3], return_lse=True, **params)
    plan = dualops.cuda.plan("flash_attention", *arrays[:3], o, lse, arrays[3], backward=True, **params)
    return plan.choice.rung


def test_what_a_call_takes():
    assert rung_of(16, 16) == rung_of(128, 40, causal=True) == "sm80"
    assert rung_of(136, 16) == rung_of(16, 136) == rung_of(16, 16, scale=0.0) == rung_of(16, 16, np.float32) == "simt"


def test_tiles_fit_into_what_a_block_has():
    """Of consumers' cards too: 99 KiB."""
    for D in (32, 64, 128):
        for options in ([], ["bias"]):
            tiles = [config for config, _ in dq_configs(D, D, options)]
            assert min(config.min_blocks * config.shared_bytes(D, D) for config in tiles) <= 99 * 1024
            found = [config for config, _ in dkv_configs(D, D, options)]
            needed = [config.min_blocks * (config.shared_bytes(D, D) + config.statistics_bytes) for config in found]
            assert min(needed) <= 99 * 1024
