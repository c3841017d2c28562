"""Retention of one token: which calls move the state by 16 bytes, and that this changes no bit of any result."""

from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import testing
from dualops.spec import retention as SPEC
from dualops.spec.base import Case
from dualops.spec.retention_cases import options_of

STATES = {"states": 1, "return_state": True}


def problem_of(q: tuple[int, int, int, int], Dv: int, dtype: str = "float32", **options: Any) -> tuple[Any, Any]:
    """Arrays and parameters of a call in the recurrent form."""
    shapes, params = options_of(q, Dv, form="recurrent", **options)
    return SPEC.generate(SPEC, Case("recurrent", dtype, shapes), np.random.default_rng(3)), params


def shifted(x: np.ndarray) -> np.ndarray:
    """The same one element behind a multiple of 16 bytes."""
    room = np.empty(x.size + 32, x.dtype)
    first = -(room.ctypes.data // x.itemsize) % 16 + 1
    there = room[first : first + x.size].reshape(x.shape)
    there[...] = x
    return there


def strided(x: np.ndarray, more: int) -> np.ndarray:
    """The same with rows this number of elements further apart."""
    room = np.zeros((*x.shape[:-1], x.shape[-1] + more), x.dtype)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


def results_of(arrays: dict[str, Any], params: dict[str, Any]) -> list[bytes]:
    found = dualops.cuda.retention(**arrays, **params)
    return [x.tobytes() for x in (found if isinstance(found, tuple) else (found,))]


def by_vectors(*arrays: Any, **params: Any) -> list[bool]:
    """Of each launch of a state's kernel, whether it moves 16 bytes at a time."""
    names = [step.kernel.identity for step in dualops.cuda.plan("retention", *arrays, **params).steps]
    return ["aligned=True" in name for name in names if "build_recurrent" in name]


def test_a_state_at_multiples_of_16_bytes_goes_by_vectors():
    arrays, params = problem_of((2, 2, 1, 8), 12, **STATES)
    state = arrays["initial_state"]
    assert by_vectors(**arrays, **params) == [True]
    assert by_vectors(**arrays | {"initial_state": strided(state, 4)}, **params) == [True]
    assert by_vectors(**arrays | {"initial_state": strided(state, 1)}, **params) == [False]
    assert by_vectors(**arrays | {"initial_state": shifted(state)}, **params) == [False]
    out = tuple(np.empty(x.shape, x.dtype) for x in dualops.cuda.retention(**arrays, **params))
    assert by_vectors(**arrays, **params, out=out) == [True]
    assert by_vectors(**arrays, **params, out=(out[0], shifted(out[1]))) == [False]


@pytest.mark.parametrize(
    ("dtype", "Dv", "expected"),
    [
        ("float32", 10, False),
        ("float32", 12, True),
        ("bfloat16", 12, True),
        ("bfloat16", 10, False),
        ("float16", 4, True),
        ("float64", 10, True),
        ("float64", 9, False),
    ],
)
def test_rows_of_the_state_are_whole_vectors_of_what_it_is_kept_in(dtype, Dv, expected):
    """Float32 for 16 bits; q, k and v may lie anywhere."""
    arrays, params = problem_of((1, 1, 1, 5), Dv, dtype, **STATES)
    assert by_vectors(**arrays | {"q": shifted(arrays["q"])}, **params) == [expected]


def test_one_token_has_a_kernel_that_leaves_room_for_other_blocks():
    arrays, params = problem_of((1, 1, 1, 128), 128, "bfloat16", **STATES)
    (step,) = dualops.cuda.plan("retention", **arrays, **params).steps
    assert step.kernel.min_blocks == 4 and step.shared_bytes == 4 * (2 * 128 + 17 * 64 + 8)
    arrays, params = problem_of((1, 1, 2, 128), 128, "bfloat16", **STATES)
    assert by_vectors(**arrays, **params) == []


def test_calls_that_differ_in_how_the_state_lies_share_no_plan():
    """A family of plans asks for strides again: the second call comes after a plan for the first was made."""
    arrays, params = problem_of((1, 2, 1, 6), 8, **STATES)
    expected = results_of(arrays, params)
    for x in (strided(arrays["initial_state"], 1), shifted(arrays["initial_state"]), arrays["initial_state"]):
        assert results_of(arrays | {"initial_state": x}, params) == expected


@pytest.mark.parametrize(
    ("dtype", "q", "Dv", "options"),
    [
        ("bfloat16", (1, 2, 1, 128), 128, {}),
        ("float32", (1, 1, 1, 100), 72, {"gamma": 1, "normalize": "signed"}),
        ("float32", (1, 1, 1, 20), 68, {"steps": 1, "normalize": "signed"}),
        ("float16", (1, 1, 1, 7), 4, {"gamma": 1}),
        ("float64", (1, 1, 1, 40), 66, {"steps": 1}),
        ("float32", (1, 1, 1, 200), 24, {}),
    ],
)
def test_vectors_give_the_bits_that_single_numbers_give(dtype, q, Dv, options):
    arrays, params = problem_of(q, Dv, dtype, **STATES, **options)
    one_by_one = arrays | {"initial_state": shifted(arrays["initial_state"])}
    assert by_vectors(**arrays, **params) == [True] and by_vectors(**one_by_one, **params) == [False]
    assert results_of(arrays, params) == results_of(one_by_one, params)


@pytest.mark.parametrize("options", [{}, {"normalize": "signed", "gamma": 1}, {"steps": 1}], ids=str)
def test_token_after_token_gives_the_results_of_all_tokens(options):
    """What one token's kernel leaves, the next one's begins with."""
    arrays, params = problem_of((1, 2, 11, 12), 20, **STATES, **options)
    states, outs = {name: arrays[name] for name in arrays if name.startswith("initial")}, []
    for t in range(11):
        token = {name: arrays[name][:, :, t : t + 1] for name in ("q", "k", "v", "log_decay") if name in arrays}
        gamma = {"gamma": arrays["gamma"]} if "gamma" in arrays else {}
        o, *left = dualops.cuda.retention(**token, **gamma, **states, **params)
        states = dict(zip(states, left, strict=True))
        outs.append(o)
    testing.check("retention", (np.concatenate(outs, axis=2), *states.values()), arrays, params)
