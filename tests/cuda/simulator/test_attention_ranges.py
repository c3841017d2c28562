"""Key ranges on every rung: the bits of the same call on a copy of their keys, whose gradients are then summed."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops.cuda import simulator
from dualops.cuda.flash_attention.key_ranges import build_ends
from dualops.cuda.flash_attention.tile_scheduler import packed_count
from dualops.spec.meta import Strided, numpy_dtype
from tests.cuda.configs import changed
from tests.cuda.simulator.attention import numbers
from tests.cuda.simulator.gradients import TWO_KERNELS, VARLEN, fused, held

# out of order, one in another, one without queries, one without keys; keys from 100 on are in none
QUERIES, STARTS, LENGTHS, TOTAL = (9, 0, 20, 3), (60, 10, 0, 85), (40, 30, 90, 0), 110


def ends_of(lengths: tuple[int, ...]) -> np.ndarray:
    return np.array([0, *np.cumsum(lengths)], np.int32)


def arrays_of(queries: tuple[int, ...], total: int, dtype: str, D: int, Dv: int, H: int, Hkv: int) -> dict[str, Any]:
    tokens = sum(queries)
    shapes = {"q": (tokens, H, D), "k": (total, Hkv, D), "v": (total, Hkv, Dv)}
    made = {name: numbers(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    return {name: x.astype(numpy_dtype(dtype)) for name, x in made.items()} | {"cu_seqlens_q": ends_of(queries)}


def with_ranges(starts: tuple[int, ...], lengths: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {"k_starts": np.array(starts, np.int32), "k_lengths": np.array(lengths, np.int32)}


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one.astype(np.float64), other.astype(np.float64), equal_nan=True)


def compared(
    arrays: dict[str, Any], starts: tuple[int, ...], lengths: tuple[int, ...], backward: bool = True, **params: Any
) -> None:
    """Both directions of a call with these ranges, and with a copy of their keys."""
    rows = np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths)])
    copied = arrays | {name: arrays[name][rows] for name in "kv"} | {"cu_seqlens_k": ends_of(lengths)}
    ranges = arrays | with_ranges(starts, lengths)
    longest = {"max_seqlen_q": int(np.diff(arrays["cu_seqlens_q"]).max()), "max_seqlen_k": max(lengths)}
    sizes: dict[str, Any] = longest | {"total_k_lengths": sum(lengths)}
    run = dualops.cuda.flash_attention_varlen
    (o, lse), (o_copied, lse_copied) = (
        run(**given, **more, return_lse=True, **params) for given, more in ((ranges, sizes), (copied, longest))
    )
    assert same(o, o_copied) and same(lse, lse_copied)
    if not backward:
        return
    saved = {"o": o, "lse": lse, "do": numbers(*o.shape, seed=3).astype(o.dtype)}
    gradient = dualops.cuda.flash_attention_varlen_backward
    (dq, *found), (dq_copied, *parts) = (
        gradient(**given, **saved, **more, **params) for given, more in ((ranges, sizes), (copied, longest))
    )
    assert same(dq, dq_copied)
    for x, part in zip(found[:2], parts[:2]):
        sums = np.zeros(x.shape, np.float64 if x.dtype == np.float64 else np.float32)
        for row, each in zip(rows, part):
            sums[row] += each
        assert same(x, sums.astype(x.dtype))
    assert len(found) == len(parts) and all(same(x, part) for x, part in zip(found[2:], parts[2:]))


@pytest.mark.parametrize(
    ("kernel", "dtype", "H", "D", "Dv", "params"),
    [
        ("naive", "float64", 2, 8, 5, {"causal": True, "window": (30, 0)}),
        ("simt", "float32", 1, 8, 8, {"causal": True, "window": (30, 0)}),
        ("sm80", "bfloat16", 2, 32, 40, {"causal": True, "window": (50, 0)}),
        ("sm80", "float16", 1, 33, 17, {"softcap": 2.0}),
        ("sm90", "bfloat16", 2, 64, 64, {"causal": True, "window": (50, 0)}),
        ("sm90", "float16", 1, 136, 40, {"causal": "top_left"}),
        ("sm90", "float32", 1, 64, 40, {"causal": True}),
    ],
)
def test_bits_of_copied_keys(kernel, dtype, H, D, Dv, params):
    arrays = arrays_of(QUERIES, TOTAL, dtype, D, Dv, H, 1)
    with simulator.order("shuffled"), changed(VARLEN, TWO_KERNELS):
        compared(arrays, STARTS, LENGTHS, kernel=kernel, **params)


@pytest.mark.parametrize(("D", "Hkv", "params"), [(128, 1, {}), (64, 2, {"causal": True, "softcap": 2.0})])
def test_bits_of_copied_keys_by_the_fused_kernel(D, Hkv, params):
    arrays = arrays_of(QUERIES, TOTAL, "bfloat16", D, D, 2, Hkv)
    arrays["sinks"] = np.array([0.5, -1.0], np.float32)
    with simulator.order("shuffled"), fused(operator=VARLEN):
        compared(arrays, STARTS, LENGTHS, kernel="sm90", **params)


@pytest.mark.parametrize(("kernel", "change"), [("sm80", None), ("sm90", TWO_KERNELS)])
def test_a_nan_behind_the_end_of_a_range(kernel, change):
    """Key 92 is the first sequence's alone, in a tile that the third one has too. Keys before 60 are the others'."""
    arrays = arrays_of(QUERIES, TOTAL, "bfloat16", 64, 64, 1, 1) | with_ranges(STARTS, LENGTHS)
    for name in "kv":
        arrays[name][92] = np.nan
    sizes: dict[str, Any] = {"max_seqlen_q": 20, "max_seqlen_k": 90}
    o, lse = dualops.cuda.flash_attention_varlen(**arrays, **sizes, return_lse=True, kernel=kernel)
    assert np.isnan(o[:9].astype(np.float32)).all() and np.isfinite(o[9:].astype(np.float32)).all()
    saved: dict[str, Any] = {"o": o, "lse": lse, "do": numbers(*o.shape, seed=3)}
    with changed(VARLEN, *([change] if change else [])):
        found = dualops.cuda.flash_attention_varlen_backward(**arrays, **saved, **sizes, kernel=kernel)
    given: dict[str, Any] = {**arrays, **saved, **sizes}
    held(found, *(given.pop(name) for name in ("q", "k", "v", "o", "lse", "do")), **given)
    for x in found[1:]:
        assert np.isfinite(x[:60].astype(np.float32)).all() and np.isnan(x[60:100].astype(np.float32)).all()
        assert not x[100:].any()


def test_few_queries_of_shared_keys():
    arrays = arrays_of((3, 1), 700, "bfloat16", 64, 64, 2, 1)
    compared(arrays, (0, 100), (600, 550), backward=False, kernel="sm90", causal=True)


def test_tiles_of_keys_are_as_many_as_all_ranges_need():
    """Numbered by cumulative lengths where the caller says what they add up to; else for each as for the longest."""
    queries, starts, lengths = (2, 0, 3, 40, 1, 1, 1, 1), (7, 0, 3, 0, 299, 5, 300, 8), (1, 2, 0, 300, 1, 1, 0, 1)
    arrays = arrays_of(queries, 300, "bfloat16", 64, 64, 1, 1)
    compared(arrays, starts, lengths, kernel="sm90")
    o, lse = np.zeros_like(arrays["q"]), np.zeros((1, sum(queries)), np.float32)
    named = arrays | with_ranges(starts, lengths) | {"o": o, "lse": lse, "do": o, "max_seqlen_k": 300}
    plan = partial(dualops.cuda.plan, VARLEN, backward=True, kernel="sm90", max_seqlen_q=40, **named)
    for most, rows in ((306, 306), (None, 8 * 300)):
        found = plan(total_k_lengths=most)
        block = found.choice.config.dkv.block_kv
        (dkv,) = (step for step in found.steps if "_dkv_" in step.kernel.name)
        assert dkv.grid == (packed_count(306, block, 8) if most else 8 * -(-300 // block),)
        parts = [found.choice.workspace[f"{name} of each sequence"].shape for name in ("dk", "dv")]
        assert parts == [(rows, 1, 64)] * 2


@pytest.mark.parametrize("B", [0, 1, 7, 256, 700])
@pytest.mark.parametrize("step", [1, 2])
def test_ends_of_lengths(B, step):
    lengths = np.random.default_rng(B).integers(0, 9, B * step + 1).astype(np.int32)
    ends, made = np.full(B + 1, -1, np.int32), build_ends()
    given = Strided(simulator.Pointer(ends, "ends"), (1,)), Strided(simulator.Pointer(lengths, "lengths"), (step,)), B
    with simulator.order("shuffled"):
        simulator.launch(made.function, (1,), (made.threads,), given)
    assert np.array_equal(ends, [0, *np.cumsum(lengths[: B * step : step])])
