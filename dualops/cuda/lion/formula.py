"""The arithmetic of Lion's kernels, and their compile-time values. Chen et al. 2023, arXiv:2302.06675, Alg. 2.

    c = beta1 * m + (1 - beta1) * g
    p = p * (1 - lr * weight_decay) - lr * sign(c)
    m = beta2 * m + (1 - beta2) * g

Each operation is rounded separately (`rounded`), so that results are bit-equal to the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...spec import Problem
from ..compiler.backend import Members, f32, f64, i32, kept_noun, members, noun, pointer, types, verb
from ..ptx.arithmetic import add_rn, add_rn_f64, mul_rn, mul_rn_f64, sub_rn, sub_rn_f64
from ..tile.storage import storage


class Arrays(NamedTuple):
    """The arrays of a tensor, or one value for each array, such as its strides."""

    new_params: Any
    new_momenta: Any
    new_master: Any
    source: Any
    grads: Any
    momenta: Any


ROLES = Arrays._fields


class Dtypes(NamedTuple):
    """The compile-time values of kernels, in addition to their Config."""

    params: str
    source: str  # dtype of the array from which p is read: master if given, else params
    grads: str
    momenta: str
    master: bool  # whether p is also written to a master
    lr: str  # dtype of an lr on the device

    @property
    def number(self) -> Any:
        """Numba type of the arithmetic."""
        return f64 if self.params == "float64" else f32

    @property
    def arrays(self) -> tuple[str, ...]:
        """Return the dtypes of the arrays, in the order of ROLES; a master has the dtype of the arithmetic."""
        wide = "float64" if self.params == "float64" else "float32"
        return (self.params, self.momenta, wide, self.source, self.grads, self.momenta)


class Rates(NamedTuple):
    """The numbers of a step. rest1, rest2: 1 - beta1, 1 - beta2."""

    beta1: Any
    rest1: Any
    beta2: Any
    rest2: Any
    weight_decay: Any


class Lr(NamedTuple):
    """lr as a kernel's argument: a number, or an array of one number if on_device is not 0."""

    number: Any
    array: Any
    on_device: Any


def dtypes_of(problem: Problem) -> Dtypes:
    """Return the compile-time values for this problem."""
    metas = problem.arrays
    source = metas[source_of(problem)]
    lr = metas["lr"].dtype if metas["lr"].device != "host" else "float32"
    return Dtypes(problem.dtype, source.dtype, metas["grads"].dtype, metas["momenta"].dtype, "master" in metas, lr)


def source_of(problem: Problem) -> str:
    """Return the name of the input from which p is read."""
    return "master" if "master" in problem.arrays else "params"


def array_names(problem: Problem) -> Arrays:
    """Return the names of the arrays, an argument of a launch; an absent array is a null pointer."""
    return Arrays(*(source_of(problem) if name == "source" else name for name in ROLES))


def rates_of(betas: tuple[float, float], weight_decay: float) -> Rates:
    """Return the numbers of a step, before they are rounded to the type of the arithmetic."""
    beta1, beta2 = betas
    return Rates(beta1, 1 - beta1, beta2, 1 - beta2, weight_decay)


def lr_argument(on_device: bool) -> Lr:
    """Return lr as an argument of a launch."""
    return Lr(0.0, "lr", 1) if on_device else Lr("lr", "no lr", 0)


def arrays_type(dtypes: Dtypes) -> Any:
    """Return the type of the arrays as one argument."""
    return types.NamedTuple(tuple(pointer(storage(dtype).element) for dtype in dtypes.arrays), Arrays)


def rate_types(dtypes: Dtypes) -> tuple[Any, Any]:
    """Return the types of lr and of the rates."""
    number = dtypes.number
    array = pointer(storage(dtypes.lr).element)
    return types.NamedTuple((number, array, i32), Lr), types.NamedUniTuple(number, 5, Rates)


@noun
def by_role(make: Callable[[str], Any], dtypes: Dtypes) -> Members:
    """make(dtype) for each of the arrays, by its role; old and new momenta have one dtype."""
    params, momenta, master, source, grads, _ = map(make, dtypes.arrays)
    return members(locals(), params=params, momenta=momenta, master=master, source=source, grads=grads)


@kept_noun
def rounded(number: Any) -> Members:
    """The verbs for f32 or f64: NumPy's operators of that type give the same bits. A compiler would fuse a * b + c."""
    if number is f64:
        return members({}, mul=mul_rn_f64, add=add_rn_f64, sub=sub_rn_f64)
    return members({}, mul=mul_rn, add=add_rn, sub=sub_rn)


@kept_noun
def steps(number: Any) -> Members:
    """The verbs for f32 or f64."""
    exact = rounded(number)
    ZERO, ONE, MINUS_ONE = number(0), number(1), number(-1)

    @verb
    def rate(lr):
        """Return the learning rate as a number."""
        return number(lr.array[0]) if lr.on_device != 0 else lr.number

    @verb
    def step(p, g, m, rate, rates):
        """Return the new p and m."""
        c = exact.add(exact.mul(rates.beta1, m), exact.mul(rates.rest1, g))
        sign = ONE if c > ZERO else (MINUS_ONE if c < ZERO else (ZERO if c == ZERO else c))  # a NaN stays one
        kept = exact.sub(ONE, exact.mul(rate, rates.weight_decay))
        new_p = exact.sub(exact.mul(p, kept), exact.mul(rate, sign))
        return new_p, exact.add(exact.mul(rates.beta2, m), exact.mul(rates.rest2, g))

    return locals()
