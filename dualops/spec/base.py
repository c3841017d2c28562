"""The record that defines an operator. References, kernels, bridges, benchmarks and tests derive from it.

    Spec      the operator: inputs, parameters, outputs, gradients, cost, accuracy, cases, generator
    ArrayMeta shape, dtype, strides, device and address of an array of any library
    Problem   one valid call, the result of `Spec.bind`: sizes of its axes, normalised parameters
    Case      a named problem to test, time, simulate or compile

`Spec.bind` is the only validator of dualops. It sees only metadata: NumPy arrays, device arrays, torch tensors and
torch's fake tensors get the same clear error: `softmax: x has dtype int32, expected one of float64, float32, ...`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from .domains import shown
from .draws import Drawn
from .meta import FLOATS, HUGE, ArrayMeta, compute_dtype, contiguous_strides, dense_strides_like, itemsize, numpy_dtype


class Tag(StrEnum):
    """The purpose of a case."""

    TEST = "test"  # compared with float64 truth wherever kernels run
    BENCH = "bench"  # timed by asv
    COMPARE = "compare"  # timed against peers, on request
    EDGE = "edge"  # ragged, empty, extreme: also run under the sanitizers
    SIM = "sim"  # at most two seconds in the simulator
    DEMO = "demo"  # fills a GPU, and its float64 reference takes seconds
    COMPILE = "compile"  # built offline for every architecture


class Role(StrEnum):
    """An input's role in the problem, which decides its dtype."""

    DATA = "data"  # the problem's dtype, which is the first input's
    WEIGHT = "weight"  # the problem's dtype, or the compute dtype
    STATISTIC = "statistic"  # the compute dtype
    STATE = "state"  # kept between calls, in any dtype up to the compute dtype: momenta
    OTHER = "other"  # one of its own dtypes: masks, positions, seeds


@dataclass(frozen=True)
class Input:
    """An array argument: its name, its symbolic axes, and its dtypes."""

    name: str
    axes: tuple[str, ...] | None  # None: any shape; `Spec.measure` names the axes
    dtypes: tuple[str, ...] = FLOATS
    optional: bool = False
    contiguous_last: bool = False  # the last axis must have stride 1
    role: Role = Role.DATA
    host: bool = False  # may be a Python number (integer, or float for float dtypes): a launch passes its value
    doc: str = ""  # of an option, for functions that take it by name

    def dtype_for(self, dtype: str) -> str:
        """Return the dtype that a generator uses for it in a problem of this dtype."""
        if self.role is Role.OTHER:
            return self.dtypes[0]
        return dtype if self.role in (Role.DATA, Role.STATE) else compute_dtype(dtype)


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
    # whether this problem has it: depends only on parameters and on which inputs are given
    when: Callable[[Problem], bool] = lambda problem: True
    contiguous_last: bool = False  # the last axis must have stride 1
    row_major: bool = False  # its axes have their own order in memory, not that of `like`
    asked_by: str = ""  # the parameter that requests it, if that is not return_<name>


@dataclass(frozen=True)
class Case:
    """A named problem: shapes of the inputs, their dtype and the parameters."""

    name: str
    dtype: str
    shapes: Mapping[str, tuple[int, ...]]
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: frozenset[Tag] = frozenset({Tag.TEST})
    backward: bool = True  # with gradients too
    seed: int = 0
    # input -> its axes from the slowest to the fastest in memory, if it is timed in another order
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)  # of inputs whose dtype differs from `Input.dtype_for`

    @property
    def id(self) -> str:
        return f"{self.name}-{self.dtype}"

    def dtype_of(self, wanted: Input) -> str:
        """Return the dtype that a generator uses for an input."""
        return self.dtypes.get(wanted.name) or wanted.dtype_for(self.dtype)


class Problem:
    """A valid call, returned by `Spec.bind`. Sizes and parameters are attributes: `problem.N`, `problem.axis`."""

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

    def dtype_of(self, name: str) -> str | None:
        """Return the dtype of an input, None if the call does not have it."""
        return self.arrays[name].dtype if name in self.arrays else None

    def outputs(self, which: Sequence[Output] | None = None) -> dict[str, ArrayMeta]:
        """Return shape, dtype and strides of every result, without an address."""
        metas = {}
        for output in self.spec.outputs if which is None else which:
            if not output.when(self):
                continue
            shape, like = output.shape(self), self.arrays[output.like]
            follows = len(shape) == len(like.shape) and not output.row_major
            strides = dense_strides_like(shape, like) if follows else contiguous_strides(shape)
            if output.contiguous_last and strides[-1] != 1 and shape[-1] > 1:  # overlapping rows of a sliding window
                strides = contiguous_strides(shape)
            metas[output.name] = ArrayMeta(shape, output.dtype(self), strides, like.device, 0)
        return metas

    def nbytes(self, *names: str) -> int:
        """Return the bytes of the named arrays, results and gradients; missing ones count as 0."""
        results = [output for output in (*self.spec.outputs, *self.spec.gradients) if output.name in names]
        metas = {**self.arrays, **self.outputs(results)}
        return sum(metas[name].size * itemsize(metas[name].dtype) for name in names if name in metas)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in {**self.dims, **self.params}.items())
        return f"{self.spec.name}({self.dtype}, {sizes})"


@dataclass(frozen=True)
class Cost:
    """The least work of a problem: each input is read once, each result is written once."""

    flops: Callable[[Problem], int]
    bytes_read: Callable[[Problem], int]
    bytes_written: Callable[[Problem], int]
    extra_memory: Callable[[Problem], int] = lambda problem: 0  # bytes beyond inputs and results, at the peak


Terms = Callable[[Mapping[str, np.ndarray], Problem], dict[str, float]]


def any_special(name: str, case: Case, backward: bool) -> tuple[float, bool] | None:
    """Every input may have numbers as large as a quarter of the largest one, and infinities."""
    return HUGE[case.dtype], True


@dataclass(frozen=True)
class Spec:
    """An operator; see the module's docstring."""

    name: str
    formula: str
    paper: str
    inputs: tuple[Input, ...]
    params: tuple[Param, ...]
    outputs: tuple[Output, ...]
    gradient_inputs: tuple[Input, ...]  # backward's arrays: saved results, then incoming gradients
    gradients: tuple[Output, ...]  # backward's results
    saved: tuple[str, ...]  # inputs and outputs that forward keeps for backward
    # (operator's name in messages, arrays, params, sizes of axes) -> sizes beyond the symbolic axes; checks
    measure: Callable[[str, dict[str, ArrayMeta], dict[str, Any], dict[str, Any]], dict[str, Any]]
    forward_cost: Cost
    backward_cost: Cost | None
    rounding: str  # where the baseline rounds to the storage dtype
    floor: float  # c of the accuracy rule, in units of the compute dtype's eps
    rungs: tuple[str, ...]
    cases: tuple[Case, ...]
    generate: Callable[[Spec, Case, np.random.Generator], dict[str, np.ndarray]]
    gradient_params: tuple[Param, ...] = ()  # backward's parameters beyond `params`
    values: Callable[[str, Mapping[str, np.ndarray], Problem], None] | None = None  # checks values on the host
    parent: str = ""  # the operator whose files contain this variant
    # a saved input -> the result that a call saves instead, if it has it: x + residual for x
    saved_instead: Mapping[str, str] = field(default_factory=dict)
    # a saved input or result -> whether this problem's backward needs it, by its parameters; the others always
    saved_when: Mapping[str, Callable[[Problem], bool]] = field(default_factory=dict)
    gradient_shared: Mapping[str, str] = field(default_factory=dict)  # an input -> the input with the same gradient
    updates: Mapping[str, str] = field(default_factory=dict)  # a result -> the input that it overwrites without out=
    exact: bool = False  # kernels must match the reference bit for bit (all NaNs count as equal)
    # for fuzzers: (random numbers, most elements) -> shapes and parameters of a random problem that is valid in every
    # dtype, with no larger array. tests/test_parity.py requires one for every operator
    draw: Callable[[np.random.Generator, int], Drawn] | None = None
    # (a float input, case, backward) -> the largest special value that tests put into it, and whether it may be
    # infinite: values that act alike in the kernels' arithmetic and in float64. None: no special values, not even NaN
    special: Callable[[str, Case, bool], tuple[float, bool] | None] = any_special
    # special numbers that tests put into incoming gradients. By default without infinity: times a probability that is
    # tiny in float64 and 0 in float32, it gives inf in one and NaN in the other
    special_gradients: tuple[float, ...] = (np.nan, 0.0)
    # (arrays, problem) -> magnitude of each result's terms by name: `terms` of `compare`. None: nothing cancels without
    # the truth showing it, or a module of `dualops.testing.terms` computes it
    terms: Terms | None = None
    gradient_terms: Terms | None = None  # `terms` for the gradients

    def tagged(self, tag: Tag) -> list[Case]:
        return [case for case in self.cases if tag in case.tags]

    def request(self, output: Output) -> str | None:
        """Return the parameter that requests a result; None if it is always returned."""
        name = output.asked_by or f"return_{output.name}"
        return name if any(param.name == name for param in self.params) else None

    @property
    def requests(self) -> dict[str, bool]:
        """Return the parameters that request optional results which backward needs."""
        return {name: True for out in self.outputs if out.name in self.saved and (name := self.request(out))}

    @property
    def wide(self) -> dict[str, Any]:
        """Return extra parameters of the float64 truth: the results' dtype, if an operator has that parameter."""
        return {param.name: "float64" for param in self.params if param.name == "dtype"}

    def bind(self, arrays: Mapping[str, ArrayMeta | None], params: Mapping[str, Any] | None = None) -> Problem:
        """Validate a forward call and return its problem.

        Raises TypeError for a wrong kind of argument (dtype, mixed dtypes, unknown parameter), ValueError for a wrong
        value (rank, size, domain, device), NotImplementedError for negative strides.
        """
        return self._bind(self.inputs, self.params, arrays, params or {}, self.name)

    def bind_backward(self, arrays: Mapping[str, ArrayMeta | None], params: Mapping[str, Any] | None = None) -> Problem:
        """Validate a backward call and return its problem, with the errors of `bind`."""
        params_of_both = self.params + self.gradient_params
        return self._bind(self.gradient_inputs, params_of_both, arrays, params or {}, f"{self.name}_backward")

    def _bind(
        self,
        inputs: tuple[Input, ...],
        accepted: tuple[Param, ...],
        arrays: Mapping[str, ArrayMeta | None],
        given: Mapping[str, Any],
        op: str,
    ) -> Problem:
        present: dict[str, ArrayMeta] = {}
        dims: dict[str, Any] = {}
        owner: dict[str, str] = {}
        first = inputs[0]
        dtype = device = ""
        for wanted in inputs:
            meta = arrays.get(wanted.name)
            if meta is None:
                if wanted.optional:
                    continue
                raise TypeError(f"{op}: {wanted.name} is missing, expected an array of {', '.join(wanted.dtypes)}")
            present[wanted.name] = meta
            if meta.dtype not in wanted.dtypes:
                one_of = "one of " if len(wanted.dtypes) > 1 else ""
                raise TypeError(
                    f"{op}: {wanted.name} has dtype {meta.dtype}, expected {one_of}{', '.join(wanted.dtypes)}"
                )
            dtype = dtype or meta.dtype
            self._check_dtype(op, wanted, meta, first, dtype)
            if meta.device == "host" and wanted.host:
                continue
            device = device or meta.device
            if meta.device != device:
                raise ValueError(
                    f"{op}: {wanted.name} is on {meta.device}, {first.name} on {device}, expected one device"
                )
            if wanted.axes is not None:
                self._measure_axes(op, wanted, meta, dims, owner)
            if wanted.contiguous_last and meta.shape and meta.strides[-1] != 1 and meta.shape[-1] > 1 and meta.size:
                axis = f" {wanted.axes[-1]}" if wanted.axes else ""
                raise ValueError(
                    f"{op}: {wanted.name} has stride {meta.strides[-1]} along its last axis{axis}, expected 1"
                )
            if any(stride < 0 for stride in meta.strides):
                raise NotImplementedError(f"{op}: {wanted.name} has a negative stride in {meta.strides}")
        params = self.normal_params(accepted, given, op)
        dims |= self.measure(op, present, params, dims)
        # a parameter, if no input has the dtype
        return Problem(self, params.get("dtype", dtype), dims, params, present)

    @staticmethod
    def _check_dtype(op: str, wanted: Input, meta: ArrayMeta, first: Input, dtype: str) -> None:
        computed = compute_dtype(dtype)
        allowed = {
            Role.DATA: (dtype,),
            Role.WEIGHT: tuple({dtype: None, computed: None}),
            Role.STATISTIC: (computed,),
            Role.STATE: tuple(name for name in FLOATS if (name == "float64") == (dtype == "float64")),
            Role.OTHER: wanted.dtypes,
        }[wanted.role]
        if meta.dtype not in allowed:
            expected = "the same" if wanted.role is Role.DATA else " or ".join(allowed)
            raise TypeError(
                f"{op}: {wanted.name} has dtype {meta.dtype}, {first.name} has dtype {dtype}, expected {expected}"
            )

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

    @staticmethod
    def normal_params(accepted: tuple[Param, ...], given: Mapping[str, Any], op: str) -> dict[str, Any]:
        """Return normalised parameters, with defaults for missing ones. Raises the domain's error."""
        params = {}
        for param in accepted:
            value = given.get(param.name, param.default)
            try:
                params[param.name] = param.domain(value)
            except (ValueError, TypeError) as error:
                raise type(error)(f"{op}: {param.name} is {shown(value)}, {error}") from None
        if len(given) > len(params) or not params.keys() >= given.keys():
            unknown = ", ".join(sorted(given.keys() - params.keys()))
            raise TypeError(f"{op}: unknown parameter {unknown}, expected {', '.join(params) or 'none'}")
        return params

    def bind_out(
        self,
        op: str,
        wanted: Mapping[str, ArrayMeta],
        out: Mapping[str, ArrayMeta],
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Check the arrays that the caller passed for the results (`out=`).

        names: for messages, in place of "out y", of results that are inputs too.
        """
        dense = {output.name for output in (*self.outputs, *self.gradients) if output.contiguous_last}
        for name, meta in out.items():
            expected, called = wanted[name], (names or {}).get(name, f"out {name}")
            if meta.shape != expected.shape:
                raise ValueError(f"{op}: {called} has shape {meta.shape}, expected {expected.shape}")
            if meta.dtype != expected.dtype:
                raise TypeError(f"{op}: {called} has dtype {meta.dtype}, expected {expected.dtype}")
            if meta.device != expected.device:
                raise ValueError(f"{op}: {called} is on {meta.device}, expected {expected.device}")
            if any(stride < 0 for stride in meta.strides):
                raise NotImplementedError(f"{op}: {called} has a negative stride in {meta.strides}")
            if name in dense and meta.strides[-1] != 1 and meta.shape[-1] > 1 and meta.size:
                raise ValueError(f"{op}: {called} has stride {meta.strides[-1]} along its last axis, expected 1")
            if meta.overlaps_itself:
                raise ValueError(f"{op}: {called} has strides {meta.strides}: its elements overlap one another")
            if meta.read_only:
                raise ValueError(f"{op}: {called} is read-only, expected an array that can be written to")


def standard_normal(spec: Spec, case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Independent normal values for every input of the case, rounded to its dtype."""
    inputs = {wanted.name: wanted for wanted in spec.inputs}
    drawn = np.float32 if case.dtype != "float64" else np.float64
    return {
        name: rng.standard_normal(shape, dtype=drawn).astype(numpy_dtype(case.dtype_of(inputs[name])))
        for name, shape in case.shapes.items()
    }
