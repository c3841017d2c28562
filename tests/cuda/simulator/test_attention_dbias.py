"""attention's dbias on the sm90 rung: what a bias is broadcast over, pieces, what masks hide, which sums are equal."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference, spec
from dualops.cuda import simulator
from dualops.cuda.flash_attention import simt
from dualops.cuda.flash_attention.sm90 import backward as sm90_backward, bias_tile_scheduler, dbias
from dualops.cuda.flash_attention.sm90.bias_tile_scheduler import Broadcast, pieces_of, visits_of_tile
from dualops.cuda.flash_attention.sm90.dq_config import DbiasConfig
from dualops.spec.attention.cases import bent
from tests.cuda.configs import changed
from tests.cuda.simulator.attention import FLOOR, named, numbers, widened

gradient: Any = partial(dualops.cuda.flash_attention_backward, kernel="sm90")
PLACE = 3  # of dbias among what is returned
SMALL = DbiasConfig(1, 16)


def _alone(problem: Any, results: Any, configs: Any) -> list[Any]:
    """delta and dbias, and nothing else."""
    delta, *_ = simt.backward_steps(problem, results, configs.others, ("dq", "dk", "dbias"))
    return [delta, *dbias.dbias_steps(problem, results, configs.dbias)]


@contextmanager
def served(config: DbiasConfig, least_visits: int = bias_tile_scheduler.LEAST_VISITS) -> Iterator[None]:
    """Inside the with statement this Config is the only one, pieces have at least `least_visits` tiles of scores, and
    dq, dk and dv are not computed.
    """
    instead = {"dbias_configs": lambda *_: iter([(config, "small")])}
    pieces = {"LEAST_VISITS": least_visits}
    steps = {"backward_steps": _alone}
    with changed("flash_attention", (sm90_backward, steps), (dbias, instead), (bias_tile_scheduler, pieces)):
        yield


def arrays_for(B: int, H: int, Hkv: int, Sq: int, Sk: int, D: int = 16, Dv: int = 16) -> list[np.ndarray]:
    """q, k, v and do."""
    shapes = ((B, H, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv), (B, H, Sq, Dv))
    return [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def dbias_of(arrays: Any, **params: Any) -> np.ndarray:
    q, k, v, do = arrays
    o, lse = reference.flash_attention(q, k, v, return_lse=True, **params)
    return gradient(q, k, v, o, lse, do, **params)[PLACE]


def checked(arrays: Any, **params: Any) -> np.ndarray:
    """dbias, compared with truth; NaN and infinities where truth has them."""
    q, k, v, do = arrays
    o, lse = reference.flash_attention(q, k, v, return_lse=True, **params)
    given = (q, k, v, o, lse, do)
    found = gradient(*given, **params)[PLACE]
    wide = {name: widened(value) for name, value in params.items()}
    truth = reference.flash_attention_backward(*map(widened, given), **wide)[PLACE]
    baseline = reference.flash_attention_backward(*given, **params)[PLACE]
    result = spec.compare(found, truth, baseline, dtype=str(q.dtype), floor=FLOOR, name="dbias")
    assert result.passed, result.message
    return found


AXES = [(2, 2, 70, 40), (1, 2, 70, 40), (2, 1, 70, 40), (2, 2, 1, 40), (2, 2, 70, 1), (1, 1, 1, 1), (40,), (70, 1)]


@pytest.mark.parametrize(("shape", "order"), [*zip(AXES, ("forward", "reversed") * 4)], ids=str)
def test_each_axis_may_be_broadcast(shape, order):
    """Of two heads that share their keys, with ends within tiles; where the bias has few, in pieces."""
    with served(SMALL, least_visits=2), simulator.order(order):
        checked(arrays_for(2, 2, 1, 70, 40), bias=numbers(*shape, seed=9))


@pytest.mark.parametrize("config", [DbiasConfig(1, 32, stages=2), DbiasConfig(2, 16, stages=4, overlap=True)], ids=str)
@pytest.mark.parametrize("shape", [(130, 50), (3, 1, 1), (130, 1), (3, 1, 50)])
def test_each_config_under_a_causal_mask(shape, config):
    """Tiles that are hidden as a whole lie before, between and after those that are not."""
    with served(config, least_visits=1):
        checked(arrays_for(1, 3, 3, 130, 50), bias=numbers(*shape, seed=9), causal=True)


@pytest.mark.parametrize("shape", [(2, 70, 48), (2, 70, 44), (70, 48)])
def test_neighbours_are_stored_at_once_where_they_lie_so(shape):
    """To dbias and to parts, of which the last has several."""
    with served(DbiasConfig(1, 32), least_visits=1):
        checked(arrays_for(1, 2, 2, 70, shape[-1]), bias=numbers(*shape, seed=9))


def test_the_operators_own_tiles():
    checked(arrays_for(1, 2, 1, 150, 133, 24, 72), bias=numbers(2, 150, 133, seed=9), causal="top_left")


@pytest.mark.parametrize(
    "params",
    [
        {"softcap": 2.0, "score_mod": bent},
        {"dropout_p": 0.3, "seed": 7, "mask_mod": lambda b, h, i, j: (i + j) % 3 != 0},
        {"alibi_slopes": np.linspace(0.01, 0.04, 2, dtype=np.float32), "window": (9, 4)},
        {"sinks": np.linspace(-1, 4, 2, dtype=np.float32), "key_padding_mask": np.arange(40)[None] % 3 != 1},
    ],
    ids=named,
)
def test_options_with_a_bias(params):
    with served(SMALL):
        checked(arrays_for(1, 2, 1, 70, 40), bias=numbers(70, 40, seed=9), **params)
        checked(arrays_for(1, 2, 1, 70, 40), bias=numbers(2, 1, 40, seed=9), **params)


@pytest.mark.parametrize("shape", [(70, 40), (1, 40), (70, 1), (1, 1)])
def test_what_a_mask_hides_stays_out_of_sums(shape):
    """NaN in keys and values that nobody sees, and in queries beyond the last there is nothing."""
    q, k, v, do = arrays_for(1, 1, 1, 70, 40)
    v[0, 0, 17, 5], k[0, 0, 18, 3] = np.nan, np.inf
    hides = {"mask_mod": lambda b, h, i, j: (j != 17) & (j != 18)}
    with served(SMALL, least_visits=1):
        found = checked((q, k, v, do), bias=numbers(*shape, seed=9), **hides)
    assert np.isfinite(found.astype(np.float32)).all()


def test_a_bias_of_minus_infinity_is_a_mask():
    q, k, v, do = arrays_for(1, 2, 1, 70, 40)
    bias = numbers(70, 40, seed=9)
    bias[:, 21:], v[0, 0, 30] = -np.inf, np.nan
    with served(SMALL):
        found = checked((q, k, v, do), bias=bias)
    assert not found[:, 21:].any()


@pytest.mark.parametrize("name", ["v", "k", "do"])
def test_a_nan_that_is_seen_reaches_its_sums(name):
    """Also where a probability is 0: of a score that is far below the row's greatest."""
    q, k, v, do = arrays_for(1, 1, 1, 70, 40)
    bias = numbers(70, 40, seed=9)
    bias[:, 5] = -1000
    {"v": v, "k": k, "do": do}[name][0, 0, 33 if name == "do" else 3, 5] = np.nan
    with served(SMALL):
        found = checked((q, k, v, do), bias=bias, causal=True)
    assert np.isnan(found.astype(np.float32)).any()
    assert np.isfinite(found.astype(np.float32)).any()


def test_rows_that_see_nothing_have_no_part_whatever_they_hold():
    q, k, v, do = arrays_for(1, 1, 1, 60, 20)
    do[0, 0, 5] = q[0, 0, 7] = np.nan
    with served(SMALL):
        assert not checked((q, k, v, do), bias=numbers(60, 20, seed=9), causal=True)[:40].any()
        assert np.isfinite(checked((q, k, v, do), bias=numbers(20, seed=9), causal=True).astype(np.float32)).all()


def test_many_heads_are_added_within_the_rule():
    with served(DbiasConfig(1, 16, stages=2)):
        checked(arrays_for(2, 64, 1, 8, 16, 8, 8), bias=numbers(8, 16, seed=9))


@pytest.mark.parametrize("shape", [(1, 70, 40), (1, 1, 40), (1, 70, 1), (1, 1, 1), (2, 1, 1)])
def test_sums_of_a_batch_do_not_depend_on_the_others(shape):
    q, k, v, do = arrays_for(3, 2, 1, 70, 40)
    bias = numbers(3, *shape, seed=9)
    with served(SMALL, least_visits=1):
        together = dbias_of((q, k, v, do), bias=bias)
        for b in range(3):
            one = slice(b, b + 1)
            alone = dbias_of([x[one] for x in (q, k, v, do)], bias=bias[one])
            assert np.array_equal(alone.view(np.uint16), together[one].view(np.uint16))


def test_dbias_among_other_memory():
    q, k, v, do = arrays_for(1, 2, 1, 70, 40)
    bias = numbers(2, 40, 72, seed=9).transpose(0, 2, 1)[:, 1:71]
    with served(SMALL):
        wanted = checked((q, k, v, do), bias=bias)
        o, lse = reference.flash_attention(q, k, v, return_lse=True, bias=bias)
        room = np.full((2, 73, 90), 7, q.dtype)
        out = (*(np.empty_like(x) for x in (q, k, v)), room[:, 2:72, 5:85:2])
        gradient(q, k, v, o, lse, do, bias=bias, out=out)
    assert np.array_equal(out[PLACE], wanted)
    around = room.copy()
    around[:, 2:72, 5:85:2] = 7
    assert (around == 7).all()


def test_pieces_follow_from_lengths():
    """A scalar is the work of as many blocks as run at once; tiles that are many are not split."""
    long = 32, 32
    assert visits_of_tile(4, 16, *long, (1, 1, 1, 1), Broadcast(True, True)) == 65536
    assert pieces_of(1, 65536) == 512
    assert pieces_of(16 * 32, 32) == 1  # [4, 16, 1, 4096]
    assert pieces_of(1024, 64) == 1  # [4096, 4096]
    assert pieces_of(1, 7) == 1


def plan_of(arrays: Any, **params: Any) -> Any:
    q, k, v, do = arrays
    o, lse = do, np.zeros(q.shape[:3], np.float32)
    return dualops.cuda.plan("flash_attention", q, k, v, o, lse, do, backward=True, **params).choice


def test_what_a_call_takes():
    arrays = arrays_for(1, 1, 1, 8, 16)
    choice = plan_of(arrays, bias=numbers(8, 16))
    assert choice.config.dbias.block_q == 128 and "dbias: 128 queries by 128 keys" in choice.reason
    assert not plan_of(arrays, bias=numbers(8, 16), bias_gradient=False).config.dbias
    assert "dbias" not in plan_of(arrays).reason
    assert list(plan_of(arrays, bias=numbers(1, 1)).workspace) == ["delta", "counter", "dbias_parts"]
