"""An operator that has all that a spec can have: an optional input, two results, every kind of parameter."""

from __future__ import annotations

import numpy as np
import torch

from dualops.spec.base import (
    Cost,
    Input,
    Output,
    Param,
    Spec,
    boolean,
    compute_dtype,
    finite,
    integer,
    one_of,
    optional,
    standard_normal,
)
from dualops.torch_bridge.interop import register

FACTORS = {False: 1.0, True: 2.0, "both": 3.0}
FORMS = {"even": 1.0, "odd": -1.0}

SPEC = Spec(
    name="affine",
    formula="y = factor(mode) * sign(form, flip) * scale * x * w + shift * power;  total = sum(y) along N",
    paper="none: an operator with every kind of argument",
    inputs=(Input("x", ("M", "N")), Input("w", ("N",), optional=True)),
    params=(
        Param("scale", 1.0, finite, "a float"),
        Param("power", 1, integer, "an int"),
        Param("flip", False, boolean, "a bool"),
        Param("form", "even", one_of("even", "odd"), "a str"),
        Param("shift", None, optional(finite), "a float or None"),
        Param("mode", False, one_of(False, True, "both"), "a mixture"),
    ),
    outputs=(
        Output("y", lambda p: (p.M, p.N), lambda p: p.dtype, like="x"),
        Output("total", lambda p: (p.M,), lambda p: compute_dtype(p.dtype), like="x"),
    ),
    gradient_inputs=(
        Input("x", ("M", "N")),
        Input("w", ("N",), optional=True),
        Input("dy", ("M", "N"), contiguous_last=True),
        Input("dtotal", ("M",), dtypes=("float32", "float64")),
    ),
    gradients=(
        Output("dx", lambda p: (p.M, p.N), lambda p: p.dtype, like="x"),
        Output("dw", lambda p: (p.N,), lambda p: p.dtype, like="x"),
    ),
    saved=("x", "w"),
    measure=lambda arrays, params: {},
    forward_cost=Cost(lambda p: 3 * p.M * p.N, lambda p: 0, lambda p: 0),
    backward_cost=Cost(lambda p: 5 * p.M * p.N, lambda p: 0, lambda p: 0),
    rounding="y, dx and dw once",
    floor=8.0,
    rungs=(),
    cases=(),
    generate=standard_normal,
)


def factor(scale: float, flip: bool, form: str, mode: bool | str) -> float:
    return FACTORS[mode] * FORMS[form] * (-1.0 if flip else 1.0) * scale


def affine(
    x: np.ndarray,
    w: np.ndarray | None = None,
    *,
    scale: float,
    power: int,
    flip: bool,
    form: str,
    shift: float | None,
    mode: bool | str,
) -> tuple[np.ndarray, np.ndarray]:
    wide = x.astype(compute_dtype(x.dtype.name))
    weight = np.ones(x.shape[1], wide.dtype) if w is None else w.astype(wide.dtype)
    y = wide * weight * wide.dtype.type(factor(scale, flip, form, mode)) + wide.dtype.type((shift or 0) * power)
    return y.astype(x.dtype), y.sum(axis=1)


def affine_backward(
    x: np.ndarray,
    w: np.ndarray | None = None,
    *,
    dy: np.ndarray,
    dtotal: np.ndarray,
    scale: float,
    power: int,
    flip: bool,
    form: str,
    shift: float | None,
    mode: bool | str,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    dz = (dy.astype(dtotal.dtype) + dtotal[:, None]) * dtotal.dtype.type(factor(scale, flip, form, mode))
    if w is None:
        return dz.astype(x.dtype)
    return (dz * w.astype(dz.dtype)).astype(x.dtype), (dz * x.astype(dz.dtype)).sum(axis=0).astype(x.dtype)


OPERATOR = register(
    SPEC,
    affine,
    affine_backward,
    kinds={"shift": "float?", "mode": "choice"},
    autocast="lower",
    namespace="dualops_test",
)
FORWARD, BACKWARD = torch.ops.dualops_test.affine.default, torch.ops.dualops_test.affine_backward.default

# scale, power, flip, form, shift, mode
DEFAULTS = (1.0, 1, False, "even", None, False)
