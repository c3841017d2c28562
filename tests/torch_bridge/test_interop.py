"""What `register` derives from a spec: schema, fakes, autograd, autocast, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch.profiler import profile

from dualops.torch_bridge.interop import register

from .affine import BACKWARD, DEFAULTS, FORWARD, KINDS, OPERATOR, SPEC, affine, affine_backward, factor
from .conftest import values


def tripled(value: float) -> float:
    return 3 * value


PARAMS = [
    DEFAULTS,
    (3, 0.5, True, "odd", 0.25, True, tripled, True),
    (2, -2.0, False, "odd", None, "both", None, True),
    (1, 1, True, "even", 2, False, tripled, True),
]


def expected(
    x: torch.Tensor, w: torch.Tensor | None, shifts: torch.Tensor | None, *params: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch."""
    power, scale, flip, form, shift, mode, function, _ = params
    added = (shift or 0) * power * (1 if shifts is None else shifts)
    y = x * (1 if w is None else w) * factor(scale, flip, form, mode, function) + added
    return y, y.sum(dim=1)


def arguments(weighted: bool, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor | None]:
    w = values((5,), dtype, "cpu", seed=1).requires_grad_() if weighted else None
    return values((3, 5), dtype, "cpu").requires_grad_(), w


def test_schema() -> None:
    parameters = (
        'SymInt power, float scale=1., bool flip=False, str form="even", float? shift=None, str mode="False", '
        'str function="None", bool summed=True'
    )
    assert str(FORWARD._schema) == (
        f"dualops_test::affine(Tensor x, Tensor? w, Tensor? shifts, {parameters}) -> (Tensor y, Tensor total)"
    )
    assert str(BACKWARD._schema) == (
        f"dualops_test::affine_backward(Tensor x, Tensor dy, Tensor? w, Tensor? dtotal, {parameters}, "
        "bool w_gradient=True) -> (Tensor dx, Tensor dw)"
    )


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("way", ["plain", "grad", "profiled", "func", "compiled"])
def test_every_argument_arrives(way: str, weighted: bool, params: tuple[Any, ...]) -> None:
    x, w = arguments(weighted)
    shifts = torch.tensor(4) if weighted else None
    leaves = tuple(leaf for leaf in (x, w) if leaf is not None)
    call: Callable[..., Any] = OPERATOR
    if way == "compiled":
        torch._dynamo.reset()
        call = torch.compile(OPERATOR, fullgraph=True, backend="aot_eager")
    if way == "plain":
        with torch.no_grad():
            y, total = call(x, w, shifts, *params)
        assert not y.requires_grad
        torch.testing.assert_close((y, total), tuple(out.detach() for out in expected(x, w, shifts, *params)))
        return

    def loss(function: Callable[..., Any], *tensors: Any) -> torch.Tensor:
        y, total = function(tensors[0], tensors[1] if weighted else None, shifts, *params)
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


def test_the_first_call_may_be_a_compiled_one() -> None:
    """Nothing is left to be made in it that torch.compile cannot follow."""
    spec = replace(SPEC, name="affine_first")
    operator = register(spec, affine, affine_backward, kinds=KINDS, fixed={"rank": 3}, namespace="dualops_test")
    x, w = arguments(True)
    torch._dynamo.reset()
    function = torch.compile(operator, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(function(x, w, None, *PARAMS[1]), expected(x, w, None, *PARAMS[1]))


def test_results_that_a_call_does_not_have_are_empty_or_none() -> None:
    x, w = arguments(True)
    assert w is not None
    saved, incoming = x.detach(), torch.ones(3, 5).double()
    for weight, wanted in ((None, True), (w.detach(), False)):
        dx, dw = BACKWARD(saved, incoming, weight, None, 1, w_gradient=wanted)
        assert tuple(dx.shape) == (3, 5)
        assert tuple(dw.shape) == (0,)
    y, total = OPERATOR(x, w, None, *DEFAULTS[:-1], False)
    assert total is None
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, w.detach().expand(3, 5))
    with profile():  # through the dispatcher
        y, total = OPERATOR(x, w, None, *DEFAULTS[:-1], False)
    assert tuple(total.shape) == (0,)
    (dx,) = torch.autograd.grad(y.sum() + total.sum(), x)  # an empty tensor may take part, and has no gradient
    torch.testing.assert_close(dx, w.detach().expand(3, 5))


@pytest.mark.parametrize("way", ["plain", "profiled"])
def test_only_what_is_wanted_is_asked_for(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of w where w requires one; that of a total that was not used does not arrive."""
    seen: list[tuple[bool, bool]] = []
    backward = OPERATOR.backward
    assert backward is not None
    binder = backward.binder

    def noted(arrays: Any, params: Any) -> Any:
        seen.append((params["w_gradient"], "dtotal" in arrays))
        return binder(arrays, params)

    monkeypatch.setattr(backward, "binder", noted)
    x, w = arguments(True)
    assert w is not None
    with profile() if way == "profiled" else torch.enable_grad():
        for weight, used in ((w, 0), (w.detach(), 0), (w.detach(), 1)):
            OPERATOR(x, weight, None, *DEFAULTS)[used].sum().backward()
    assert seen == [(True, False), (False, False), (False, True)]


def test_autocast_lowers() -> None:
    """Data to autocast's dtype; weights that are neither of that dtype nor float32 become float32."""
    x, w = values((3, 5), torch.float32, "cpu"), values((5,), torch.float32, "cpu", seed=1)
    for lower, other in ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)):
        with torch.autocast("cpu", lower):
            for weight in (w, w.to(lower), w.to(other)):
                y, total = OPERATOR(x, weight, None, *DEFAULTS)
                assert (y.dtype, total.dtype) == (lower, torch.float32)
                kept = weight if weight.dtype is lower else weight.float()
                with torch.autocast("cpu", enabled=False):
                    torch.testing.assert_close(y, OPERATOR(x.to(lower), kept, None, *DEFAULTS)[0], rtol=0, atol=0)
            assert OPERATOR(x.double(), w.double(), None, *DEFAULTS)[0].dtype is torch.float64


def test_autocast_does_not_hide_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dtypes that are right under autocast alone are not what an error is about."""

    def broken(*args: Any, **more: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(OPERATOR, "reference", broken)
    x, w = values((3, 5), torch.bfloat16, "cpu"), values((5,), torch.float16, "cpu", seed=1)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="broken"):
        OPERATOR(x, w, None, *DEFAULTS)


def test_numbers_are_made_what_the_schema_has() -> None:
    x, w = arguments(True)
    params = (np.int64(3), np.float32(0.5), np.bool_(True), "odd", np.float64(0.25), True, tripled, np.bool_(True))
    for watch in (torch.no_grad(), torch.enable_grad(), profile()):
        with watch:
            found = OPERATOR(x, w, None, *params)
        torch.testing.assert_close(found[0].detach(), expected(x, w, None, *PARAMS[1])[0].detach())


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": torch.ones(5)}, ValueError, "x has 1 axes (5,), expected 2: [M, N]"),
    ({"x": torch.eye(3).to_sparse()}, TypeError, "x has layout torch.sparse_coo, expected torch.strided"),
    ({"x": [1.0, 2.0]}, TypeError, "x is a list, expected a torch.Tensor"),
    ({"x": np.ones((3, 5))}, TypeError, "x is a ndarray, expected a torch.Tensor"),
    ({"shifts": torch.tensor(4.0)}, TypeError, "shifts has dtype float32, expected int64"),
    ({"w": torch.ones(4).double()}, ValueError, "w has N=4, x has N=5"),
    ({"w": torch.ones(5, device="meta").double()}, ValueError, "w is on meta, x on cpu, expected one device"),
    ({"shifts": torch.tensor([4])}, ValueError, "shifts has 1 axes (1,), expected 0: []"),
    ({"scale": "1"}, TypeError, "scale is '1', expected a number"),
    ({"power": True}, TypeError, "power is True, expected an integer"),
    ({"power": None}, TypeError, "power is None, expected an integer"),
    ({"flip": 1}, TypeError, "flip is 1, expected True or False"),
    ({"form": "none"}, ValueError, "form is 'none', expected one of 'even', 'odd'"),
    ({"form": 1}, ValueError, "form is 1, expected one of 'even', 'odd'"),
    ({"shift": float("inf")}, ValueError, "shift is inf, expected a finite number"),
    ({"mode": "all"}, ValueError, "mode is 'all', expected one of False, True, 'both'"),
    ({"mode": "True"}, ValueError, "mode is 'True', expected one of False, True, 'both'"),
    ({"mode": 1}, ValueError, "mode is 1, expected one of False, True, 'both'"),
    ({"function": (1, 2)}, TypeError, "function is (1, 2), expected a function"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD, ids=[message for *_, message in BAD])
def test_bad_calls_get_the_specs_words(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    x, w = arguments(True)
    right = {"x": x, "w": w, "shifts": None} | dict(zip([param.name for param in OPERATOR.params], DEFAULTS))
    args = tuple((right | changed).values())
    for watch in (torch.no_grad(), torch.enable_grad(), profile(), torch.autocast("cpu", torch.bfloat16)):
        with pytest.raises(error) as caught, watch:
            OPERATOR(*args)
        assert str(caught.value) == f"affine: {message}"
    if "x" not in changed:
        with pytest.raises(error) as caught:
            torch.func.grad(lambda t: OPERATOR(t, *args[1:])[0].sum())(x)
        assert str(caught.value) == f"affine: {message}"
    if "sparse" in message:
        return  # torch.compile takes none
    torch._dynamo.reset()
    with pytest.raises(TorchDynamoException) as caught:
        torch.compile(OPERATOR, fullgraph=True, backend="aot_eager")(*args)
    assert f"affine: {message}" in str(caught.value).replace("\\'", "'")


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (SPEC, {"namespace": "dualops_test_kinds"}, "affine: parameter power is of kind NoneType, expected one of b"),
        (replace(SPEC, backward_cost=None), {"kinds": KINDS}, "affine: the spec has no backward_cost"),
        (SPEC, {"kinds": KINDS}, "multiple times"),
    ],
)
def test_what_is_not_registered(spec: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        register(spec, affine, affine_backward, **{"namespace": "dualops_test", **options})


def test_operator_without_backward() -> None:
    spec = replace(SPEC, name="affine_forward", gradient_inputs=(), gradients=(), saved=(), backward_cost=None)
    operator = register(spec, affine, kinds=KINDS, fixed={"rank": 3}, namespace="dualops_test")
    x, w = arguments(True)
    for watch in (torch.enable_grad(), profile()):
        with watch:
            y, _ = operator(x, w, None, *DEFAULTS)
        torch.testing.assert_close(y, expected(x, w, None, *DEFAULTS)[0])
        with pytest.raises(NotImplementedError, match="affine_forward: its gradient is not implemented"):
            y.sum().backward()
