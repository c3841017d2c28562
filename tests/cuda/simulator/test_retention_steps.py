"""Retention with a decay of each step: the sums of log_decay, what they depend on, which kernels are built for it."""

from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import pytest

import dualops.cuda
from dualops.cuda.compiler.backend import f32
from dualops.cuda.retention import decays
from dualops.cuda.retention.decays import exp_of_step
from dualops.cuda.retention.passes import passes_of
from dualops.spec import ArrayMeta, retention as SPEC
from dualops.spec.meta import Strided, numpy_dtype
from tests.retention import qkv


def logs_of(S: int, dtype: str = "float32") -> np.ndarray:
    """Of steps: slow ones, fast ones, and one in thirty that forgets all."""
    rng = np.random.default_rng(S)
    logs = -(2.0 ** rng.uniform(-12, 1, S))
    return np.where(rng.random(S) < 1 / 30, -1e30, logs).astype(dtype)


def made_of(logs: np.ndarray, tiles: int = 8) -> np.ndarray:
    """The prefix sums of one head [S + 1, 2], by blocks of this number of tiles."""
    S = logs.size
    x = np.zeros((1, 1, S, 4), logs.dtype)
    metas: dict[str, ArrayMeta | None] = {name: ArrayMeta.of_numpy(x) for name in "qkv"}
    metas["log_decay"] = ArrayMeta.of_numpy(logs.reshape(1, 1, S))
    problem = SPEC.bind(metas, {})
    found = np.full((S + 1) * 2, np.nan, logs.dtype)
    call = passes_of(problem, {}, 64)[0].call
    call = call._replace(ends=Strided(np.zeros(1, np.int32), (1,)))
    arrays = Strided(found, (0, 0, 2)), Strided(logs, (0, 0, 1))
    with mock.patch.object(decays, "CONFIG", decays.PrefixSumsConfig(tiles=tiles)):
        (step,) = decays.prefix_sums_steps(problem, Strided("log_decay", (0, 0, 1)), call)
    step.kernel[step.grid, step.kernel.threads, 0, step.shared_bytes](*arrays, call, step.args[-1])
    return found.reshape(S + 1, 2)


@pytest.mark.parametrize("tiles", [1, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_lies_between_two_marks_is_known_to_eps_of_itself(dtype, tiles):
    """Also where the sums are 100,000 times as large: in one number there would be no digit left of it."""
    logs = logs_of(2500, dtype)
    found, eps = made_of(logs, tiles), float(np.finfo(dtype).eps)
    sums = [Fraction(0)]
    for x in logs:
        sums.append(sums[-1] + Fraction(max(float(x), -1000.0)))
    assert -sums[-1] > 50_000
    for first, last in ((0, 1), (0, 2500), (1023, 1025), (2048, 2049), (2400, 2410), (2490, 2500), (7, 7)):
        exact = float(sums[last] - sums[first])
        (a, a_rest), (b, b_rest) = found[first], found[last]
        assert abs(float((b - a) + (b_rest - a_rest)) - exact) <= 2 * eps * (abs(exact) + eps * 1e5), (first, last)


@pytest.mark.parametrize("tiles", [1, 8])
def test_a_mark_depends_on_the_tokens_before_it_alone(tiles):
    logs = logs_of(1500)
    whole = made_of(logs, tiles)
    for count in (1, 8, 9, 1024, 1025):
        assert made_of(logs[:count].copy(), tiles).tobytes() == whole[: count + 1].tobytes()


def test_a_step_of_a_recurrence_is_rounded_about_once():
    exp = exp_of_step("float32")
    for x in -np.linspace(0, 0.36, 400, dtype=np.float32):
        exact = np.exp(np.float64(x))
        assert abs(float(exp(f32(x))) - exact) <= 0.8 * 2.0**-24 * 2 * exact
    assert float(exp(f32(-1e30))) == 0 and float(exp(f32(0))) == 1


def with_logs(S: int = 20) -> dict[str, Any]:
    arrays = {name: x.astype(np.float32) for name, x in qkv(S=S).items()}
    return arrays | {"log_decay": logs_of(2 * 3 * S).reshape(2, 3, S)}


def kernels_of(arrays: dict[str, Any], **params: Any) -> list[str]:
    return [step.kernel.identity for step in dualops.cuda.plan("retention", **arrays, **params).steps]


@pytest.mark.parametrize("form", ["chunk", "parallel", "recurrent"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_call_without_it_has_no_kernel_of_it(form, backward):
    arrays = with_logs()
    if backward:
        arrays["do"] = arrays["v"]
    stepwise = kernels_of(arrays, form=form, backward=backward)
    del arrays["log_decay"]
    plain = kernels_of(arrays, form=form, backward=backward)
    words = ("stepwise=True", "prefix_sums", "simt_steps")
    assert any(any(word in name for word in words) for name in stepwise)
    assert not any(any(word in name for word in words) for name in plain)


def test_one_token_of_a_recurrence_is_one_launch():
    assert len(kernels_of(with_logs(1), form="recurrent", return_state=True)) == 1


def test_tensor_cores_do_it():
    logs = np.zeros((8, 16, 128), np.float32)
    for dtype, rung in (("bfloat16", "sm90"), ("float16", "sm80")):
        x = np.zeros((8, 16, 128, 64), numpy_dtype(dtype))
        for options in ({}, {"do": x, "backward": True}):
            assert dualops.cuda.plan("retention", x, x, x, log_decay=logs, **options).choice.rung == rung
    with pytest.raises(NotImplementedError, match="rung sm90 does not do"):
        dualops.cuda.plan("retention", x, x, x, log_decay=logs, kernel="sm90")
    with pytest.raises(NotImplementedError, match="rung naive does not do"):
        dualops.cuda.plan("retention", x, x, x, do=x, log_decay=logs, backward=True, kernel="naive")
