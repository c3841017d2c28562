"""A bad call of softmax gets the spec's error, whichever way it takes through torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile

from dualops.torch_bridge import softmax

BACKWARD = torch.ops.dualops.softmax_backward.default
FLOAT_LIST = "expected one of float64, float32, float16, bfloat16"
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "integers": (lambda: torch.ones(3, 4, dtype=torch.int32), TypeError, f"x has dtype int32, {FLOAT_LIST}"),
    "complex": (lambda: torch.ones(3, 4, dtype=torch.complex64), TypeError, f"x has dtype complex64, {FLOAT_LIST}"),
    "scalar": (lambda: torch.tensor(1.0), ValueError, "x has no axes, expected at least one"),
    "sparse": (
        lambda: torch.eye(3).to_sparse(),
        TypeError,
        "x has layout torch.sparse_coo, expected torch.strided",
    ),
    "a list": (lambda: [1.0, 2.0], TypeError, "x is a list, expected a torch.Tensor"),
    "an array": (lambda: np.ones(3), TypeError, "x is a ndarray, expected a torch.Tensor"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_get_the_specs_words(name: str) -> None:
    make, error, message = BAD[name]
    x = make()
    wanting = x
    if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()):
        wanting = x.detach().requires_grad_()
    watches = (torch.enable_grad(), profile(), torch.autocast("cpu", torch.bfloat16))
    for given, watch in product((x, wanting), watches):
        with pytest.raises(error) as caught, watch:
            softmax(given)
        assert str(caught.value) == f"softmax: {message}"


def test_bad_calls_of_fakes_and_meta_tensors() -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match="softmax: axis is 2, expected -2 to 1 for x of shape"):
        softmax(torch.ones(3, 4), 2)
    with pytest.raises(TypeError, match="softmax: x has dtype int64"):
        softmax(torch.ones(3, 4, dtype=torch.int64, device="meta"))
    with pytest.raises(Exception, match="softmax: axis is 2, expected -2 to 1 for x of shape"):
        torch.compile(lambda t: softmax(t, 2), fullgraph=True, backend="aot_eager")(torch.ones(3, 4))


def test_bad_axis_under_vmap() -> None:
    """-2 is an axis of the whole tensor, but not of the part that the function sees."""
    with pytest.raises(ValueError, match=r"softmax: axis is -2, expected -1 to 0 for x of shape \(4,\)"):
        torch.vmap(lambda t: softmax(t, -2))(torch.ones(3, 4))


@pytest.mark.parametrize(
    ("y", "dy", "error", "message"),
    [
        (
            torch.ones(3, 4),
            torch.ones(4, 3),
            ValueError,
            "softmax_backward: dy has shape (4, 3), y has shape (3, 4), expected the same",
        ),
        (
            torch.ones(3, 4),
            torch.ones(3, 4).double(),
            TypeError,
            "softmax_backward: dy has dtype float64, y has dtype float32, expected the same",
        ),
        (
            torch.ones(3, 4),
            torch.ones(3, 4, device="meta"),
            ValueError,
            "softmax_backward: dy is on meta, y on cpu, expected one device",
        ),
    ],
    ids=["shape", "dtype", "device"],
)
def test_bad_calls_of_backward(y: torch.Tensor, dy: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        BACKWARD(y, dy, -1)
    assert str(caught.value) == message
