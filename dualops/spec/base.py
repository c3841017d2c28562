"""What an operator is: the record that references, kernels, bridges, benchmarks and tests derive from.

    Spec      the operator: inputs, parameters, outputs, gradients, cost, accuracy, cases, generator
    ArrayMeta shape, dtype, strides, device and address of an array, whichever library it comes from
    Problem   one call that was found right by `Spec.bind`: its axes have sizes, its parameters are normal
    Case      a named problem to test, time, simulate or compile

`Spec.bind` is the only validator of dualops. It sees metadata alone, so that NumPy arrays, device arrays, torch tensors
and torch's fakes get the same clear error: `softmax: x has dtype int32, expected one of float64, float32, ...`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

FLOATS = ("float64", "float32", "float16", "bfloat16")
_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("bfloat16",)} | {
    name: np.dtype(name) for name in ("float64", "float32", "float16", "int64", "int32", "uint8", "bool")
}


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype of a dualops dtype name (`"bfloat16"` comes from ml_dtypes)."""
    return _DTYPES[name]


def itemsize(name: str) -> int:
    """Bytes of one element of dtype `name`."""
    return _DTYPES[name].itemsize


def compute_dtype(name: str) -> str:
    """The dtype that arithmetic and statistics are carried in: float64 for float64, float32 for all else."""
    return "float64" if name == "float64" else "float32"


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense_strides_like(shape: Sequence[int], like: ArrayMeta) -> tuple[int, ...]:
    """Strides of a dense array of `shape` whose axes lie in memory in the order of `like`'s (torch's `empty_like`)."""
    if tuple(shape) == like.shape and like.is_dense:
        return like.strides
    inner_first = list(reversed(range(len(shape))))
    for end in range(1, len(shape)):  # an insertion sort, since a broadcast axis can't be compared: it stays in place
        place = end
        for before in reversed(range(end)):
            inner, outer = inner_first[before], inner_first[place]
            apart = like.strides[inner] - like.strides[outer] if like.strides[inner] and like.strides[outer] else None
            if apart is not None and apart < 0:
                break
            if apart is not None and (apart > 0 or like.shape[inner] > like.shape[outer]):
                inner_first[before], inner_first[place] = outer, inner
                place = before
    strides, step = [0] * len(shape), 1
    for axis in inner_first:
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


class ArrayMeta(NamedTuple):
    """All that a spec and a launch need to know of an array; never its values."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]  # in elements
    device: str  # "cpu", "cuda:0", "meta" ...
    pointer: int  # address of element 0; 0 if there is none

    @classmethod
    def of_numpy(cls, array: np.ndarray) -> ArrayMeta:
        """Of a NumPy array. Raises ValueError if its strides are not whole elements (a field of a record array)."""
        if any(stride % array.itemsize for stride in array.strides):
            raise ValueError(
                f"strides are {array.strides} bytes, expected multiples of the {array.itemsize} of an element"
            )
        strides = tuple(stride // array.itemsize for stride in array.strides)
        dtype = array.dtype.name if array.dtype.isnative else array.dtype.str  # ">f4" is no dtype of ours
        return cls(array.shape, dtype, strides, "cpu", array.ctypes.data)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def extent(self) -> int:
        """Elements from the first to one past the last in memory (strides are not negative)."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill their extent, each place once, in whatever order of axes; an empty array does."""
        if 0 in self.shape:
            return True
        step = 1
        for size, stride in sorted(zip(self.shape, self.strides, strict=True), key=lambda axis: axis[1]):
            if size > 1:
                if stride != step:
                    return False
                step *= size
        return True

    @property
    def overlaps_itself(self) -> bool:
        """Whether two elements may share a place: some axis steps no further than the axes inside it reach."""
        if 0 in self.shape:
            return False
        reach = 0
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1:
                if stride <= reach:
                    return True
                reach += (size - 1) * stride
        return False

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        return self.extent * itemsize(self.dtype)


class Tag(StrEnum):
    """What a case is for."""

    TEST = "test"  # compared with float64 truth wherever kernels run
    BENCH = "bench"  # timed by asv
    EDGE = "edge"  # ragged, empty, extreme: also run under the sanitizers
    SIM = "sim"  # at most two seconds in the simulator
    DEMO = "demo"  # fills a GPU, and its float64 reference takes seconds
    COMPILE = "compile"  # built offline for every architecture


@dataclass(frozen=True)
class Input:
    """An array argument: its name, its symbolic axes, and what it may hold."""

    name: str
    axes: tuple[str, ...] | None  # None: any shape; `Spec.measure` names the axes
    dtypes: tuple[str, ...] = FLOATS
    optional: bool = False
    contiguous_last: bool = False  # the last axis must have stride 1


@dataclass(frozen=True)
class Param:
    """A parameter: default, and a domain that returns the normal form of a value or raises ValueError or TypeError."""

    name: str
    default: Any
    domain: Callable[[Any], Any]
    doc: str


@dataclass(frozen=True)
class Output:
    """An array result: shape and dtype as functions of the problem; its memory order follows the input `like`."""

    name: str
    shape: Callable[[Problem], tuple[int, ...]]
    dtype: Callable[[Problem], str]
    like: str
    when: Callable[[Problem], bool] = lambda problem: True  # whether this problem has it
    contiguous_last: bool = False  # the last axis must have stride 1


@dataclass(frozen=True)
class Case:
    """A named problem: shapes of the inputs, their dtype and the parameters."""

    name: str
    dtype: str
    shapes: Mapping[str, tuple[int, ...]]
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: frozenset[Tag] = frozenset({Tag.TEST})
    backward: bool = True  # gradients are wanted too
    seed: int = 0

    @property
    def id(self) -> str:
        return f"{self.name}-{self.dtype}"


class Problem:
    """A call that `Spec.bind` found right. Sizes and parameters read as attributes: `problem.N`, `problem.axis`."""

    __slots__ = ("arrays", "dims", "dtype", "params", "spec")

    def __init__(
        self, spec: Spec, dtype: str, dims: dict[str, Any], params: dict[str, Any], arrays: dict[str, ArrayMeta]
    ):
        self.spec, self.dtype, self.dims, self.params, self.arrays = spec, dtype, dims, params, arrays

    def __getattr__(self, name: str) -> Any:
        for table in (self.dims, self.params):
            if name in table:
                return table[name]
        raise AttributeError(f"{self.spec.name}: a problem has no {name}; it has {sorted([*self.dims, *self.params])}")

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    def outputs(self, which: Sequence[Output] | None = None) -> dict[str, ArrayMeta]:
        """Shape, dtype and strides of every result, as yet without an address."""
        metas = {}
        for output in self.spec.outputs if which is None else which:
            if not output.when(self):
                continue
            shape, like = output.shape(self), self.arrays[output.like]
            same_rank = len(shape) == len(like.shape)
            strides = dense_strides_like(shape, like) if same_rank else contiguous_strides(shape)
            metas[output.name] = ArrayMeta(shape, output.dtype(self), strides, like.device, 0)
        return metas

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in {**self.dims, **self.params}.items())
        return f"{self.spec.name}({self.dtype}, {sizes})"


@dataclass(frozen=True)
class Cost:
    """What a problem must do at the least: each input read once, each result written once."""

    flops: Callable[[Problem], int]
    bytes_read: Callable[[Problem], int]
    bytes_written: Callable[[Problem], int]
    extra_memory: Callable[[Problem], int] = lambda problem: 0  # bytes beyond inputs and results, at the peak


@dataclass(frozen=True)
class Spec:
    """An operator. See the module's docstring."""

    name: str
    formula: str
    paper: str
    inputs: tuple[Input, ...]
    params: tuple[Param, ...]
    outputs: tuple[Output, ...]
    gradient_inputs: tuple[Input, ...]  # what backward takes: saved results, then incoming gradients
    gradients: tuple[Output, ...]  # what backward returns
    saved: tuple[str, ...]  # inputs and outputs that forward keeps for backward
    measure: Callable[[dict[str, ArrayMeta], dict[str, Any]], dict[str, Any]]  # sizes beyond the symbolic axes; checks
    forward_cost: Cost
    backward_cost: Cost | None
    rounding: str  # where the baseline rounds to the storage dtype
    floor: float  # c of the accuracy rule, in units of the compute dtype's eps
    rungs: tuple[str, ...]
    cases: tuple[Case, ...]
    generate: Callable[[Spec, Case, np.random.Generator], dict[str, np.ndarray]]

    def tagged(self, tag: Tag) -> list[Case]:
        return [case for case in self.cases if tag in case.tags]

    def bind(self, arrays: Mapping[str, ArrayMeta | None], params: Mapping[str, Any] | None = None) -> Problem:
        """The problem that a forward call states, or the error that the caller made.

        Raises TypeError for a wrong kind of argument (dtype, mixed dtypes, unknown parameter), ValueError for a wrong
        value (rank, size, domain, device), NotImplementedError for negative strides.
        """
        return self._bind(self.inputs, arrays, params or {}, self.name)

    def bind_backward(self, arrays: Mapping[str, ArrayMeta | None], params: Mapping[str, Any] | None = None) -> Problem:
        """The same for the backward call."""
        return self._bind(self.gradient_inputs, arrays, params or {}, f"{self.name}_backward")

    def _bind(
        self, inputs: tuple[Input, ...], arrays: Mapping[str, ArrayMeta | None], given: Mapping[str, Any], op: str
    ) -> Problem:
        present: dict[str, ArrayMeta] = {}
        dims: dict[str, Any] = {}
        owner: dict[str, str] = {}
        first: str | None = None
        dtype = device = ""
        for wanted in inputs:
            meta = arrays.get(wanted.name)
            if meta is None:
                if wanted.optional:
                    continue
                raise TypeError(f"{op}: {wanted.name} is missing, expected an array of {', '.join(wanted.dtypes)}")
            present[wanted.name] = meta
            if meta.dtype not in wanted.dtypes:
                raise TypeError(
                    f"{op}: {wanted.name} has dtype {meta.dtype}, expected one of {', '.join(wanted.dtypes)}"
                )
            if wanted.dtypes is FLOATS:
                if first is None:
                    first, dtype, device = wanted.name, meta.dtype, meta.device
                elif meta.dtype != dtype:
                    raise TypeError(
                        f"{op}: {wanted.name} has dtype {meta.dtype}, {first} has dtype {dtype}, expected the same"
                    )
            if device and meta.device != device:
                raise ValueError(f"{op}: {wanted.name} is on {meta.device}, {first} on {device}, expected one device")
            if wanted.axes is not None:
                self._measure_axes(op, wanted, meta, dims, owner)
            if any(stride < 0 for stride in meta.strides):
                raise NotImplementedError(f"{op}: {wanted.name} has a negative stride in {meta.strides}")
        params = self._normal_params(given, op)
        dims |= self.measure(present, params)
        return Problem(self, dtype, dims, params, present)

    @staticmethod
    def _measure_axes(op: str, wanted: Input, meta: ArrayMeta, dims: dict[str, Any], owner: dict[str, str]) -> None:
        assert wanted.axes is not None
        axes = wanted.axes
        if len(meta.shape) != len(axes):
            raise ValueError(
                f"{op}: {wanted.name} has {len(meta.shape)} axes {meta.shape}, "
                f"expected {len(axes)}: [{', '.join(axes)}]"
            )
        for axis, size in zip(axes, meta.shape, strict=True):
            if dims.setdefault(axis, size) != size:
                raise ValueError(f"{op}: {wanted.name} has {axis}={size}, {owner[axis]} has {axis}={dims[axis]}")
            owner.setdefault(axis, wanted.name)
        if wanted.contiguous_last and meta.strides[-1] != 1 and meta.shape[-1] > 1 and meta.size:
            raise ValueError(
                f"{op}: {wanted.name} has stride {meta.strides[-1]} along its last axis {axes[-1]}, expected 1"
            )

    def _normal_params(self, given: Mapping[str, Any], op: str) -> dict[str, Any]:
        params = {}
        for param in self.params:
            value = given.get(param.name, param.default)
            try:
                params[param.name] = param.domain(value)
            except (ValueError, TypeError) as error:
                raise type(error)(f"{op}: {param.name} is {value!r}, {error}") from None
        if len(given) > len(params) or not params.keys() >= given.keys():
            unknown = ", ".join(sorted(given.keys() - params.keys()))
            raise TypeError(f"{op}: unknown parameter {unknown}, expected {', '.join(params) or 'none'}")
        return params

    def bind_out(self, op: str, wanted: Mapping[str, ArrayMeta], out: Mapping[str, ArrayMeta]) -> None:
        """Check arrays that the caller gave for the results (`out=`) against what they must be."""
        dense = {output.name for output in (*self.outputs, *self.gradients) if output.contiguous_last}
        for name, meta in out.items():
            expected = wanted[name]
            if meta.shape != expected.shape:
                raise ValueError(f"{op}: out {name} has shape {meta.shape}, expected {expected.shape}")
            if meta.dtype != expected.dtype:
                raise TypeError(f"{op}: out {name} has dtype {meta.dtype}, expected {expected.dtype}")
            if meta.device != expected.device:
                raise ValueError(f"{op}: out {name} is on {meta.device}, expected {expected.device}")
            if any(stride < 0 for stride in meta.strides):
                raise NotImplementedError(f"{op}: out {name} has a negative stride in {meta.strides}")
            if name in dense and meta.strides[-1] != 1 and meta.shape[-1] > 1 and meta.size:
                raise ValueError(f"{op}: out {name} has stride {meta.strides[-1]} along its last axis, expected 1")
            if meta.overlaps_itself:
                raise ValueError(f"{op}: out {name} has strides {meta.strides}: its elements overlap one another")


# --- domains of parameters: value -> normal form -------------------------------------------------


def boolean(value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError("expected True or False")
    return bool(value)


def integer(value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError("expected an integer")
    return value.__index__()


def finite(value: Any) -> float:
    if isinstance(value, (bool, np.bool_, str, bytes)):
        raise TypeError("expected a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError("expected a number") from None
    except OverflowError:
        raise ValueError("expected a finite number") from None
    if not np.isfinite(number):
        raise ValueError("expected a finite number")
    return number


def optional(domain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`domain`, or None."""
    return lambda value: None if value is None else domain(value)


def one_of(*choices: Any) -> Callable[[Any], Any]:
    def domain(value: Any) -> Any:
        for choice in choices:
            if value is choice or (isinstance(value, str) and value == choice):
                return choice
        raise ValueError(f"expected one of {', '.join(map(repr, choices))}")

    return domain


# --- generators ----------------------------------------------------------------------------------


def standard_normal(spec: Spec, case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Independent normal values for every input of the case, rounded to its dtype."""
    return {
        name: rng.standard_normal(shape, dtype=np.float32 if case.dtype != "float64" else np.float64).astype(
            numpy_dtype(case.dtype)
        )
        for name, shape in case.shapes.items()
    }
