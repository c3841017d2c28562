"""A bad call of softmax gets the spec's error, whichever way it takes through torch.

`test_wrong_arguments` has more of them, of every operator.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile

from dualops.torch_bridge import softmax


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.eye(3).to_sparse(), "x has layout torch.sparse_coo, expected torch.strided"),
        ([1.0, 2.0], "x is a list, expected a torch.Tensor"),
        (np.ones(3), "x is a ndarray, expected a torch.Tensor"),
    ],
    ids=["sparse", "list", "array"],
)
def test_what_is_no_tensor_of_strides(x: Any, message: str) -> None:
    wanting = x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x
    watches = (torch.enable_grad(), profile(), torch.autocast("cpu", torch.bfloat16))
    for given, watch in product((x, wanting), watches):
        with pytest.raises(TypeError) as caught, watch:
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


def test_a_bad_call_of_backward() -> None:
    y, dy = torch.ones(3, 4), torch.ones(3, 4, device="meta")
    with pytest.raises(ValueError, match=r"^softmax_backward: dy is on meta, y on cpu, expected one device$"):
        torch.ops.dualops.softmax_backward.default(y, dy, -1)
