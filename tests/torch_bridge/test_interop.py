"""What `register` makes of a spec: schema, fakes, autograd, autocast, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from dualops import reference
from dualops.spec import flash_attention
from dualops.torch_bridge.interop import register

from .affine import BACKWARD, DEFAULTS, FORWARD, OPERATOR, SPEC, affine, affine_backward, factor
from .conftest import stepped, transposed, values

ATTENTION = register(
    flash_attention,
    reference.flash_attention,
    kinds={"causal": "choice", "scale": "float?"},
    namespace="dualops_test",
)

PARAMS = [
    DEFAULTS,
    (0.5, 3, True, "odd", 0.25, True),
    (-2.0, 2, False, "odd", None, "both"),
    (1, 1, True, "even", 2, False),
]


def expected(x: torch.Tensor, w: torch.Tensor | None, *params: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch."""
    scale, power, flip, form, shift, mode = params
    y = x * (1 if w is None else w) * factor(scale, flip, form, mode) + (shift or 0) * power
    return y, y.sum(dim=1)


def arguments(weighted: bool, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor | None]:
    w = values((5,), dtype, "cpu", seed=1).requires_grad_() if weighted else None
    return values((3, 5), dtype, "cpu").requires_grad_(), w


# --- what is made of the spec --------------------------------------------------------------------


def test_schema() -> None:
    parameters = 'float scale=1., int power=1, bool flip=False, str form="even", float? shift=None, str mode="False"'
    assert str(FORWARD._schema) == (
        f"dualops_test::affine(Tensor x, Tensor? w, {parameters}) -> (Tensor y, Tensor total)"
    )
    assert str(BACKWARD._schema) == (
        f"dualops_test::affine_backward(Tensor x, Tensor? w, Tensor dy, Tensor dtotal, {parameters}) "
        "-> (Tensor dx, Tensor dw)"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck(weighted: bool, dtype: torch.dtype) -> None:
    x, w = arguments(weighted, dtype)
    for layout in (torch.Tensor.detach, transposed, stepped):
        torch.library.opcheck(FORWARD, (layout(x).detach().requires_grad_(), w))
    torch.library.opcheck(FORWARD, (x, w, 0.5, 3, True, "odd", 0.25, "both"))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    incoming = values((3, 5), dtype, "cpu", seed=2), values((3,), wide, "cpu", seed=3)
    torch.library.opcheck(BACKWARD, (x.detach(), None if w is None else w.detach(), *incoming, 0.5, 3, True, "odd"))


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("way", ["plain", "grad", "profiled", "func", "compiled"])
def test_every_argument_arrives(way: str, weighted: bool, params: tuple[Any, ...]) -> None:
    x, w = arguments(weighted)
    leaves = tuple(leaf for leaf in (x, w) if leaf is not None)
    call: Callable[..., Any] = OPERATOR
    if way == "compiled":
        torch._dynamo.reset()
        call = torch.compile(OPERATOR, fullgraph=True, backend="aot_eager")
    if way == "plain":
        with torch.no_grad():
            y, total = call(x, w, *params)
        assert not y.requires_grad
        torch.testing.assert_close((y, total), tuple(out.detach() for out in expected(x, w, *params)))
        return

    def loss(function: Callable[..., Any], *tensors: Any) -> torch.Tensor:
        y, total = function(tensors[0], tensors[1] if weighted else None, *params)
        return (y * torch.arange(5.0)).sum() + total.square().sum()

    if way == "func":
        places = tuple(range(len(leaves)))
        found = torch.func.grad(lambda *tensors: loss(call, *tensors), argnums=places)(*leaves)
    elif way == "profiled":
        with profile() as seen:
            found = torch.autograd.grad(loss(call, *leaves), leaves)
        assert {"dualops_test::affine", "dualops_test::affine_backward"} <= {event.key for event in seen.key_averages()}
    else:
        found = torch.autograd.grad(loss(call, *leaves), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(loss(expected, *leaves), leaves))


def test_gradcheck() -> None:
    for weighted in (False, True):
        inputs: Any = arguments(weighted)
        assert torch.autograd.gradcheck(lambda x, w: OPERATOR(x, w, 0.5, 3, True, "odd", 0.25, True), inputs)


def test_only_one_result_used_and_only_one_gradient_wanted() -> None:
    """Gradients of unused results count as zeros, and arrive with strides of 0 from a sum."""
    x, w = arguments(True)
    assert w is not None
    for used in (0, 1):
        found = torch.autograd.grad(OPERATOR(x, w, *DEFAULTS)[used].sum(), (x, w))
        torch.testing.assert_close(found, torch.autograd.grad(expected(x, w, *DEFAULTS)[used].sum(), (x, w)))
    (dw,) = torch.autograd.grad(OPERATOR(x.detach(), w, *DEFAULTS)[0].sum(), w)
    torch.testing.assert_close(dw, x.detach().sum(dim=0))


def test_backward_of_an_absent_input_is_empty() -> None:
    x, _ = arguments(False)
    dx, dw = BACKWARD(x.detach(), None, torch.ones(3, 5).double(), torch.zeros(3).double())
    assert tuple(dx.shape) == (3, 5)
    assert tuple(dw.shape) == (0,)


def test_autocast_lowers() -> None:
    x, w = values((3, 5), torch.float32, "cpu"), values((5,), torch.float32, "cpu", seed=1)
    for lower in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", lower):
            y, total = OPERATOR(x, w, *DEFAULTS)
            assert OPERATOR(x.double(), w.double(), *DEFAULTS)[0].dtype is torch.float64
        assert (y.dtype, total.dtype) == (lower, torch.float32)
        torch.testing.assert_close(y, OPERATOR(x.to(lower), w.to(lower), *DEFAULTS)[0], rtol=0, atol=0)


def test_vmap_of_named_axes_is_refused() -> None:
    x = values((2, 3, 5), torch.float64, "cpu")
    with pytest.raises(NotImplementedError, match="affine: vmap is not implemented"):
        torch.vmap(lambda t: OPERATOR(t, None, *DEFAULTS))(x)


def test_flops() -> None:
    x, w = arguments(True)
    with FlopCounterMode(display=False) as counter:
        OPERATOR(x, w, *DEFAULTS)[0].sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts == {torch.ops.dualops_test.affine: 45, torch.ops.dualops_test.affine_backward: 75}


BAD_PARAMS = [
    (("1", 1, False, "even", None, False), TypeError, "scale is '1', expected a number"),
    ((1.0, True, False, "even", None, False), TypeError, "power is True, expected an integer"),
    ((1.0, 1, 1, "even", None, False), TypeError, "flip is 1, expected True or False"),
    ((1.0, 1, False, "none", None, False), ValueError, "form is 'none', expected one of 'even', 'odd'"),
    ((1.0, 1, False, "even", float("inf"), False), ValueError, "shift is inf, expected a finite number"),
    ((1.0, 1, False, "even", None, "all"), ValueError, "mode is 'all', expected one of False, True, 'both'"),
]


@pytest.mark.parametrize(("params", "error", "message"), BAD_PARAMS, ids=[message for *_, message in BAD_PARAMS])
def test_bad_parameters_get_the_specs_words(params: tuple[Any, ...], error: type[Exception], message: str) -> None:
    x, w = arguments(True)
    for watch in (torch.no_grad(), torch.enable_grad(), profile()):
        with pytest.raises(error) as caught, watch:
            OPERATOR(x, w, *params)
        assert str(caught.value).startswith(f"affine: {message}")


# --- what register refuses -----------------------------------------------------------------------


def test_parameter_of_unknown_kind() -> None:
    with pytest.raises(ValueError, match="affine: parameter shift is of kind NoneType, expected one of bool, int"):
        register(SPEC, affine, affine_backward, namespace="dualops_test_kinds")


def test_gradient_without_a_cost() -> None:
    kinds = {"shift": "float?", "mode": "choice"}
    with pytest.raises(ValueError, match="affine: the spec has no backward_cost"):
        register(replace(SPEC, backward_cost=None), affine, affine_backward, kinds=kinds, namespace="dualops_test_cost")


def test_name_registered_twice() -> None:
    with pytest.raises(RuntimeError, match="multiple times"):
        register(SPEC, affine, kinds={"shift": "float?", "mode": "choice"}, namespace="dualops_test")


def test_operator_without_backward() -> None:
    spec = replace(SPEC, name="affine_forward", gradient_inputs=(), gradients=(), saved=(), backward_cost=None)
    operator = register(spec, affine, kinds={"shift": "float?", "mode": "choice"}, namespace="dualops_test")
    x, w = arguments(True)
    for watch in (torch.enable_grad(), profile()):
        with watch:
            y, _ = operator(x, w, *DEFAULTS)
        torch.testing.assert_close(y, expected(x, w, *DEFAULTS)[0])
        with pytest.raises(NotImplementedError, match="affine_forward: its gradient is not implemented"):
            y.sum().backward()


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_flash_attention_fits(causal: bool | str) -> None:
    """A spec of this package with two results, a mixed parameter and one that may be None."""
    q, k, v = (values(shape, torch.float64, "cpu") for shape in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)))
    o, lse = ATTENTION(q, k, v, causal, 0.3, True)
    k_full, v_full = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = 0.3 * q @ k_full.mT
    if causal:
        scores = scores.masked_fill(~torch.ones(5, 7).tril(2 if causal is True else 0).bool(), -torch.inf)
    torch.testing.assert_close(o, scores.softmax(-1) @ v_full)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.library.opcheck(ATTENTION.overload, (q, k, v, str(causal), 0.3, True))
    half = tuple(t.to(torch.bfloat16) for t in (q, k, v))
    torch.library.opcheck(ATTENTION.overload, (*half, str(causal), None, True))
