"""An operator that has all that a spec can have: optional inputs and results, numbers on the host, every parameter."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dualops.spec.base import Cost, Input, Output, Param, Role, Spec, standard_normal
from dualops.spec.domains import boolean, finite, integer, one_of, optional
from dualops.spec.meta import compute_dtype
from dualops.torch_bridge.interop import register

FACTORS = {False: 1.0, True: 2.0, "both": 3.0}
FORMS = {"even": 1.0, "odd": -1.0}


class Doubling:
    """A function as a parameter: equal to itself alone, and not a literal."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __repr__(self) -> str:
        return f"{self.function.__name__}#{self.function(1.0)}"


def doubling(value: Any) -> Doubling:
    if not callable(value) and not isinstance(value, Doubling):
        raise TypeError("expected a function")
    return value if isinstance(value, Doubling) else Doubling(value)


DY, DTOTAL = Input("dy", ("M", "N"), contiguous_last=True), Input("dtotal", ("M",), optional=True, role=Role.STATISTIC)
X, W = Input("x", ("M", "N")), Input("w", ("N",), optional=True, role=Role.WEIGHT)
SHIFTS = Input("shifts", (), ("int64",), optional=True, role=Role.OTHER, host=True)
SPEC = Spec(
    name="affine",
    formula="y = factor * x * w + shift * power * shifts;  total = sum(y) along N",
    paper="none: an operator with every kind of argument",
    inputs=(X, W, SHIFTS),
    params=(
        Param("power", None, integer, "an int that must be given, and that may be left open"),
        Param("scale", 1.0, finite, "a float"),
        Param("flip", False, boolean, "a bool"),
        Param("form", "even", one_of("even", "odd"), "a str"),
        Param("shift", None, optional(finite), "a float or None"),
        Param("mode", False, one_of(False, True, "both"), "a mixture"),
        Param("function", None, optional(doubling), "a function of the factor"),
        Param("summed", True, boolean, "whether there is a total"),
        Param("rank", 2, integer, "what is not the caller's to choose"),
    ),
    outputs=(
        Output("y", lambda p: (p.M, p.N), lambda p: p.dtype, like="x"),
        Output("total", lambda p: (p.M,), lambda p: compute_dtype(p.dtype), like="x", when=lambda p: p.summed),
    ),
    gradient_inputs=(X, DY, W, DTOTAL),
    gradients=(
        Output("dx", lambda p: (p.M, p.N), lambda p: p.dtype, like="x"),
        Output(
            "dw",
            lambda p: (p.N,),
            lambda p: p.arrays["w"].dtype,
            like="x",
            when=lambda p: "w" in p.arrays and p.w_gradient,
        ),
    ),
    saved=("x", "w"),
    measure=lambda op, arrays, params, sizes: {},
    forward_cost=Cost(lambda p: 3 * p.M * p.N, lambda p: 0, lambda p: 0),
    backward_cost=Cost(lambda p: 5 * p.M * p.N, lambda p: 0, lambda p: 0),
    rounding="y, dx and dw once",
    floor=8.0,
    rungs=(),
    cases=(),
    generate=standard_normal,
    gradient_params=(Param("w_gradient", True, boolean, "whether dw is wanted"),),
)


def factor(scale: float, flip: bool, form: str, mode: bool | str, function: Any) -> float:
    bent = function.function if isinstance(function, Doubling) else function or (lambda value: value)
    return bent(FACTORS[mode] * FORMS[form] * (-1.0 if flip else 1.0) * scale)


def affine(
    x: np.ndarray,
    w: np.ndarray | None = None,
    shifts: np.ndarray | None = None,
    *,
    power: int,
    scale: float,
    flip: bool,
    form: str,
    shift: float | None,
    mode: bool | str,
    function: Any,
    summed: bool,
    rank: int,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    assert rank == 3
    wide = x.astype(compute_dtype(x.dtype.name))
    weight = np.ones(x.shape[1], wide.dtype) if w is None else w.astype(wide.dtype)
    added = (shift or 0) * power * (1 if shifts is None else int(shifts))
    y = wide * weight * wide.dtype.type(factor(scale, flip, form, mode, function)) + wide.dtype.type(added)
    return (y.astype(x.dtype), y.sum(axis=1)) if summed else y.astype(x.dtype)


def affine_backward(
    x: np.ndarray,
    dy: np.ndarray,
    w: np.ndarray | None = None,
    dtotal: np.ndarray | None = None,
    *,
    power: int,
    scale: float,
    flip: bool,
    form: str,
    shift: float | None,
    mode: bool | str,
    function: Any,
    summed: bool,
    rank: int,
    w_gradient: bool,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    assert rank == 3
    wide = np.dtype(compute_dtype(x.dtype.name))
    dz = dy.astype(wide) if dtotal is None else dy.astype(wide) + dtotal[:, None]
    dz = dz * wide.type(factor(scale, flip, form, mode, function))
    if w is None:
        return dz.astype(x.dtype)
    dx = (dz * w.astype(wide)).astype(x.dtype)
    return (dx, (dz * x.astype(wide)).sum(axis=0).astype(w.dtype)) if w_gradient else dx


KINDS = {"power": "SymInt", "shift": "float?", "mode": "text", "function": "text"}
OPERATOR = register(
    SPEC, affine, affine_backward, kinds=KINDS, fixed={"rank": 3}, autocast="lower", namespace="dualops_test"
)
FORWARD, BACKWARD = torch.ops.dualops_test.affine.default, torch.ops.dualops_test.affine_backward.default

# power, scale, flip, form, shift, mode, function, summed
DEFAULTS = (1, 1.0, False, "even", None, False, None, True)
