"""attention's gradient by each kernel of the tensor-core rungs: widths, Configs, masks, options, hidden values."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from dualops.cuda import simulator
from dualops.cuda.flash_attention.sm80.config import Sm80DkvConfig, Sm80DqConfig
from dualops.cuda.flash_attention.sm90.dkv_config import DkvApartConfig, DkvConfig, FusedConfig
from dualops.cuda.tile.warpgroup import ROWS
from dualops.spec.attention.cases import bent, woven
from tests.cuda.simulator.attention import an_infinite_key_is_capped
from tests.cuda.simulator.gradients import WAYS, arrays_for, checked, checked_arrays, checked_varlen

SMALL, SPLIT, EXACT = DkvConfig(1, 16, 2), DkvApartConfig(16, 3), DkvApartConfig(16, 3, exact=True)
MASKS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": "top_left"},
    {"window": (20, 5)},
    {"window": (30, None), "causal": True},
]
FEW_SEEN, MANY_HIDDEN = (40, 150), (150, 40)  # some keys are seen by nobody; some queries see nothing
WOVEN: dict[str, Any] = {"score_mod": bent, "mask_mod": woven}
PADDED: dict[str, Any] = {"sinks": True, "window": (20, 5), "key_padding_mask": True}
DROPPED: dict[str, Any] = {"dropout_p": 0.3, "softcap": 2.0, "causal": True}
SLOPED: dict[str, Any] = {"alibi_slopes": True, "bias": "full", "causal": True}
Row = tuple[str, tuple[int, ...], tuple[int, int], int, tuple[Any, ...], dict[str, Any]]


def row(q: tuple[int, ...], k: tuple[int, int], Dv: int, *configs: Any, way: Any = "two", **params: Any) -> Row:
    return way, q, k, Dv, configs, params


def two_kernels() -> Iterator[Row]:
    """dk and dv of a block of keys; dq by another kernel."""
    for D, Dv in ((64, 64), (128, 128), (96, 40), (16, 120)):
        yield row((1, 1, 150, D), (1, 140), Dv)
    for D, Dv, Sq, Sk in ((40, 72, 30, 150), (96, 32, 64, 129), (8, 8, 1, 1)):
        yield row((1, 1, Sq, D), (1, Sk), Dv)
    yield row((1, 2, 70, 64), (2, 90), 64, dtype="float16", causal=True)
    for config in (SMALL, DkvConfig(2, 48, 2), DkvConfig(2, 64, 4, overlap=False), DkvConfig(3, 32, 2)):
        yield row((1, 1, 100, 64), (1, 200), 64, config, causal=True)
    for (Sq, Sk), params in product((FEW_SEEN, MANY_HIDDEN), MASKS):
        yield row((1, 1, Sq, 64), (1, Sk), 64, SMALL, **params)
    yield row((1, 4, 40, 64), (2, 70), 64, SMALL, causal=True)
    mixed = {"bias": "full", "score_mod": bent, **DROPPED}  # slopes, weights and an array
    for params in (SLOPED, PADDED | {"softcap": 2.0}, WOVEN, DROPPED, mixed):  # a group of two heads, and ragged tiles
        yield row((1, 2, 75, 40), (1, 69), 64, **params)
    yield row((1, 1, 18, 24), (1, 70), 40, SMALL, special=True, causal=True, **WOVEN)


def wide_heads() -> Iterator[Row]:
    """dk and dv a warpgroup each, dq with its sums zeroed."""
    for D, Dv in ((256, 256), (192, 128), (136, 184), (72, 256)):
        yield row((1, 1, 110, D), (1, 140), Dv, causal=True)
    yield row((1, 1, 70, 192), (1, 70), 192, SPLIT, dtype="float16", causal=True)
    others = DkvApartConfig(16, 2, 1), DkvApartConfig(64, 2, exact=True), DkvApartConfig(32, 4)
    for config, order in zip(others, ("reversed", "forward", "reversed"), strict=True):
        yield row((1, 1, 140, 64), (1, 100), 64, config, order=order)
    for (Sq, Sk), params in product((FEW_SEEN, MANY_HIDDEN), MASKS[1:3]):
        yield row((1, 1, Sq, 64), (1, Sk), 136, SPLIT, **params)
    yield row((1, 4, 20, 136), (2, 70), 40, SPLIT, causal=True)
    for params in ({"alibi_slopes": True, "causal": True}, {"bias": "full"}, PADDED, WOVEN, DROPPED):
        yield row((1, 2, 75, 136), (1, 69), 64, **params)
    for params in ({}, WOVEN):
        yield row((1, 1, 18, 136), (1, 24), 64, EXACT, special=True, **params)


# several blocks add to a tile; some queries see no key, and some keys are seen by no query
WINDOWS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (260, 260, {"window": (140, 0), "causal": True}),
    (300, 130, {"window": (70, 0), "causal": "top_left"}),
    (90, 290, {"window": (20, 90), "softcap": 2.0}),
    (130, 260, {"window": (None, 40)}),
)


def one_kernel() -> Iterator[Row]:
    """Heads of 128 in tiles of 64 queries, and heads of 64 in tiles of two parts."""
    of = partial(row, way="fused")
    for D, Dv in ((128, 128), (96, 40), (72, 120), (64, 64), (40, 24)):
        yield of((1, 1, 150, D), (1, 140), Dv)
    yield of((1, 1, 70, 128), (1, 130), 128, dtype="float16", causal=True)
    for (Sq, Sk), params in product(((100, 300), (300, 100)), ({"causal": "top_left"}, {"sinks": True})):
        yield of((1, 1, Sq, 128), (1, Sk), 64, **params)
    for over, causal in (("full", False), ("heads", True)):  # a bias in boxes, with its gradient
        yield of((2, 2, 90, 128), (1, 136), 64, bias=over, causal=causal)
    for D in (128, 64):
        yield of((1, 1, 130 * 128 // D, D), (1, 200), 64, FusedConfig(ROWS * 128 // D, dq_places=1), causal=True)
        for Sq, Sk in ((100, 300), (300, 100)):
            yield of((1, 1, Sq, D), (1, Sk), 64, causal=True)
        for params in (
            {"alibi_slopes": True, "causal": True},
            {"softcap": 2.0, "causal": True},  # some scores are near, of tiles that are not cut, and some are not
            {"softcap": 50.0},
            {"dropout_p": 0.3, "sinks": True},
            {"key_padding_mask": True, "softcap": 2.0},
            {"mask_mod": True},
            {"score_mod": True, "causal": True},
        ):
            yield of((1, 2, 90, D), (1, 140), 64, **params)
        yield of((1, 4, 70, D), (2, 140), 64, causal=True)
        for Sq, Sk, params in WINDOWS:
            yield of((1, 1, Sq, D), (1, Sk), 64, **params)
        yield of((1, 4, 90, D), (2, 260), 64, causal=True, window=(90, None), order="shuffled")
        for params in ({"causal": True}, {"mask_mod": True}):
            yield of((1, 1, 20, D), (1, 135), 64, special=True, **params)


def by_mma_sync() -> Iterator[Row]:
    of = partial(row, way="sm80")
    for D, Dv in ((128, 128), (96, 40), (16, 120), (7, 33)):
        yield of((1, 1, 70, D), (1, 80), Dv, causal=True)
    # rows of dk and dv that lie in shared memory at different distances, and more than one tile of everything
    for order, (D, Dv) in product(("forward", "reversed", "shuffled"), ((32, 40), (40, 32))):
        yield of((1, 2, 50, D), (1, 40), Dv, order=order)
    yield of((1, 1, 70, 64), (1, 70), 64, dtype="float16", causal=True)
    for configs in (
        (Sm80DqConfig(1, 64), Sm80DkvConfig(2, 64)),
        (Sm80DqConfig(2, 64), Sm80DkvConfig(1, 32)),
    ):  # tiles that fill each stage twice
        yield of((1, 1, 150, 24), (1, 150), 40, configs)
    for (Sq, Sk), params in product((FEW_SEEN, MANY_HIDDEN), MASKS):
        yield of((1, 1, Sq, 32), (1, Sk), 32, **params)
    yield of((1, 4, 40, 32), (2, 70), 32, causal=True)
    for params in (SLOPED, {"bias": "keys"}, PADDED | {"softcap": 2.0}, WOVEN, DROPPED):  # the Configs of a call
        yield of((1, 2, 40, 40), (1, 69), 64, None, **params)
    for params in ({}, {"causal": True, **WOVEN}):
        yield of((1, 1, 18, 24), (1, 70), 40, special=True, **params)


def of_three_parts() -> Iterator[Row]:
    """float32, whose numbers are three of bfloat16 each; ends within tiles."""
    of = partial(row, way="own", dtype="float32")
    for D, Dv, Sq, Sk in ((64, 64, 140, 66), (24, 48, 66, 150), (7, 9, 70, 70), (128, 128, 100, 66), (80, 96, 66, 140)):
        yield of((1, 1, Sq, D), (1, Sk), Dv, causal=True)
    yield of((1, 1, 70, 65), (1, 70), 8, causal=True)
    dropped: dict[str, Any] = {"alibi_slopes": True, "softcap": 2.0, "dropout_p": 0.3}
    for D, params in ((32, dropped), (32, WOVEN), (72, dropped), (72, {"bias": "full", "key_padding_mask": True})):
        yield of((1, 1, 66, D), (1, 70), 40, **params)


ROWS_OF_ALL = [*two_kernels(), *wide_heads(), *one_kernel(), *by_mma_sync(), *of_three_parts()]


@pytest.mark.parametrize(("way", "q", "k", "Dv", "configs", "params"), ROWS_OF_ALL, ids=str)
def test_gradients(way, q, k, Dv, configs, params):
    """`special`: what a mask hides stays where it is, with NaN and infinities among the values."""
    params = dict(params)
    with simulator.order(params.pop("order", "forward")):
        checked(q, k, Dv, *configs, way=way, **params)


@pytest.mark.parametrize(
    ("D", "Dv", "params"),
    [
        (64, 40, {"way": "two", "causal": False}),
        (64, 40, {"way": "two", "causal": True}),
        (64, 136, {"way": "wide", "causal": True}),
        (32, 40, {"way": "sm80", "causal": False}),
        (32, 40, {"way": "sm80", "causal": True}),
        (128, 40, {"way": "fused", "dtype": "float16", "causal": "top_left", "sinks": (2,)}),
        (128, 40, {"way": "fused", "softcap": 2.0}),
        (64, 40, {"way": "fused", "causal": True, "alibi_slopes": (2,)}),
    ],
    ids=str,
)
def test_sequences(D, Dv, params):
    configs = {"two": [SMALL], "wide": [SPLIT]}.get(params["way"], [])
    checked_varlen(D, Dv, *configs, **params | ({"way": "two"} if configs else {}))


@pytest.mark.parametrize(
    ("way", "D", "configs"), [("two", 64, [SMALL]), ("fused", 128, []), ("fused", 64, []), ("sm80", 64, [])]
)
def test_minus_infinity_that_is_capped_is_none(way, D, configs):
    """Softcap makes -softcap of it, which counts."""
    with WAYS[way](*configs):
        an_infinite_key_is_capped(D, "sm80" if way == "sm80" else "sm90")


@pytest.mark.parametrize(("way", "Sk"), [("two", 24), ("sm80", 40)])
def test_a_score_of_minus_infinity_is_a_masked_one(way, Sk):
    """An infinite key is no part of the rows that it has such a score in, though nothing else hides it."""
    q, k, v, do = arrays_for((1, 1, 20, 16), (1, 1, Sk, 16), 24)
    k[0, 0, 10, 3], q[..., 3] = -np.inf, np.abs(q[..., 3])
    with WAYS[way]():
        dq, _, dv = checked_arrays(q, k, v, do, way=way)
    assert np.isfinite(dq.astype(np.float32)).all() and np.isfinite(dv.astype(np.float32)).all()
