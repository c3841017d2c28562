"""From a Spec to a torch operator: schema, implementations, fakes, autograd, autocast, vmap and flop count.

    _operator = register(SPEC, reference.softmax, reference.softmax_backward, autocast="float32")
    _operator(x, axis)

makes `torch.ops.dualops.softmax` and `torch.ops.dualops.softmax_backward` and returns what the public function calls,
with the spec's inputs (None for an optional one that is not there) and then its parameters, in the spec's order. The
rest follows from names:

  - one word names an operator in `dualops.reference`, which serves CPU tensors, and in `dualops.cuda`, which serves
    CUDA tensors and is imported when the first one arrives;
  - the gradient of the input or result `x` is called `dx`; an optional `dx` is None where the result was not used;
  - a parameter of backward alone, `x_gradient`, says whether the gradient of `x` is wanted;
  - where a call does not have a result (`Output.when`), the dispatcher's operator has an empty tensor, what `register`
    returns gives None, and autograd has no gradient.

A call that torch's machinery has no interest in goes straight to the implementation, at a microsecond's cost or two.
Plain autograd gets an autograd.Function of the old form, which costs torch the least; torch.func and forward-mode AD
one of the new form; all else (compilation, modes, subclasses, autocast ...) goes through the dispatcher. Results are
the same on each way, and so are the errors: those of `Spec.bind`, which the fakes call too, with symbolic sizes where a
compiled function is dynamic.

`schema` has what the dispatcher knows of parameters, `ways` which way a call takes, `autograd` what forward keeps and
how backward is called; `compiled` and `recomputed` see to it that users' functions read what they read in forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from inspect import Parameter, Signature
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..spec.base import Cost, Input, Output, Param, Problem, Role, Spec
from ..spec.meta import ArrayMeta, numpy_dtype
from . import autograd
from .schema import KINDS, as_text, declaration, fits, from_text
from .ways import plain, transformed, watched

_DTYPE_NAMES = {
    value: str(value).removeprefix("torch.") for value in vars(torch).values() if type(value) is torch.dtype
}
# autograd.Function asks for the signature of forward at every call, which takes 16 microseconds to work out
_SIGNATURE = Signature([Parameter("args", Parameter.VAR_POSITIONAL)])
MOST_KNOWN = 1000  # combinations of parameters and inputs that are there, of which an operator keeps what they mean
# Strides are part of what a kernel was found right for: the compiler must not choose other ones.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def register(
    spec: Spec,
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    *,
    kinds: Mapping[str, str] | None = None,
    fixed: Mapping[str, Any] | None = None,
    autocast: str | None = None,
    namespace: str = "dualops",
) -> Direction:
    """Make the torch operators `namespace::<spec.name>` and, with `backward`, `namespace::<spec.name>_backward`.

    forward, backward: the functions of `dualops.reference`. Like those of `dualops.cuda` they are given the arrays that
    are there, and all parameters, by name, and return one array, or a tuple of those outputs that the call has. Without
    `backward` a gradient raises NotImplementedError.
    kinds: the schema type of each parameter whose default does not tell it: "bool", "int", "SymInt" (compiled functions
    may leave its value open), "float" or "str", with a question mark where None is allowed too, or "text" for all else:
    tuples, functions, a mixture of strings and booleans.
    fixed: parameters that are not the caller's to choose, and their values.
    autocast: "float32" or "lower" (autocast's own dtype): what it makes of the data; None: nothing. Weights of another
    dtype become float32; float64 stays, and so do statistics and all other inputs.

    Returns the forward operator, to be called with all inputs and parameters in order. Raises ValueError for a
    parameter whose kind is not known, RuntimeError for a name that is registered already.
    """
    fixed = dict(fixed or {})
    types = {param.name: type(param.default).__name__ for param in (*spec.params, *spec.gradient_params)}
    types |= kinds or {}
    for name, kind in types.items():
        if name not in fixed and kind.removesuffix("?") not in KINDS:
            raise ValueError(f"{spec.name}: parameter {name} is of kind {kind}, expected one of {', '.join(KINDS)}")
    params = tuple(param for param in spec.params if param.name not in fixed)
    library = torch.library.Library(namespace, "FRAGMENT")
    direction = partial(Direction, library, spec, types, fixed)
    name, results, cost = spec.name, spec.outputs, spec.forward_cost
    there = direction(name, spec.inputs, params, results, spec.bind, cost, forward, autocast=autocast)
    back = None
    if backward is not None:
        if spec.backward_cost is None:
            raise ValueError(f"{spec.name}: the spec has no backward_cost, expected one beside a backward function")
        name, inputs, results = f"{spec.name}_backward", spec.gradient_inputs, spec.gradients
        params += spec.gradient_params
        binder, cost = spec.bind_backward, spec.backward_cost
        back = direction(name, inputs, params, results, binder, cost, backward, backwards=True)
        back.define(None)
    there.define(back)
    return there


@dataclass(eq=False)
class Direction:
    """Forward or backward of an operator: what torch must know of it, derived from the spec.

    `args` below are always the inputs and parameters in order, as a caller gives them; the dispatcher has some
    parameters as text and leaves out defaults at the end (`encode`, `decode`).
    """

    library: torch.library.Library
    spec: Spec
    kinds: Mapping[str, str]  # parameter -> type in the schema
    fixed: Mapping[str, Any]  # parameters that are not among `params`, and their values
    name: str  # in torch.ops, dualops.reference and dualops.cuda
    inputs: tuple[Input, ...]
    params: tuple[Param, ...]
    outputs: tuple[Output, ...]
    binder: Callable[..., Problem]
    cost: Cost
    reference: Callable[..., Any]
    backwards: bool = False
    autocast: str | None = None

    def __post_init__(self) -> None:
        # whatever torch.compile may meet in a first call is made here: it cannot follow a cached_property
        self.count = len(self.inputs)
        self.names = (*(wanted.name for wanted in self.inputs), *(param.name for param in self.params))
        texts = enumerate(self.params, len(self.inputs))  # parameters that the schema has as text, and their places
        self.texts = tuple((place, param) for place, param in texts if self.kinds[param.name] == "text")
        self.__signature__ = _SIGNATURE
        # what makes of args and fixed values the parameters for `dualops.cuda`, in the spec's order
        self.fixed_values = tuple(self.fixed.values())
        places = {name: place for place, name in enumerate((*self.names, *self.fixed))}
        accepted = (*self.spec.params, *(self.spec.gradient_params if self.backwards else ()))
        self.kernel_params = _items([places[param.name] for param in accepted])
        self.known: dict[Any, list[bool]] = {}  # what `having` told

    def __call__(self, *args: Any) -> Any:
        """One tensor, or a tuple of all outputs, in which None may stand for one that the call does not have.

        Raises the spec's error for a wrong call.
        """
        if torch.compiler.is_dynamo_compiling():
            return self.dispatch(*self.checked(args))
        if not (watched() or transformed()) and (found := plain(args[: self.count])) is not None:
            if found.requires_grad and torch.is_grad_enabled():
                return self.recorded(args[self.count :], *args[: self.count])
            return self.compute(args, found.on_gpu)
        args = self.checked(args)
        try:
            return self.function.apply(*args) if transformed() else self.dispatch(*args)
        except Exception:
            refusal = self.refusal(args)  # a wrong call gets the spec's words, whatever torch said
            if refusal is None:
                raise
            raise refusal from None

    def dispatch(self, *args: Any) -> Any:
        """The same, by way of torch's dispatcher."""
        return self.overload(*self.encode(args))

    # --- registration

    def define(self, backward: Direction | None) -> None:
        """Tell torch all of it. Without `backward` the gradient is an error."""
        self.backward = backward
        self.library.define(self.schema, tags=_TAGS)
        for key in ("CPU", "CUDA"):
            self.library.impl(self.name, self.decoded(self.run), key)
            if self.autocast is not None:
                self.library.impl(self.name, self.cast_and_call(key.lower()), f"Autocast{key}")
        self.rule = autograd.rules(self, backward) if backward else autograd.refusal(self.name)
        keep, differentiate = self.rule.keep, self.differentiate
        qualified = f"{self.library.ns}::{self.name}"
        torch.library.register_fake(qualified, self.decoded(self.fake), lib=self.library)
        torch.library.register_vmap(qualified, self.vmap_decoded, lib=self.library)
        torch.library.register_autograd(
            qualified,
            differentiate,
            setup_context=lambda ctx, inputs, output: keep(ctx, self.decode(inputs), output),
            lib=self.library,
        )
        register_flop_formula(self.overload.overloadpacket, get_raw=True)(self.decoded(self.flops))
        methods = {"forward": self, "setup_context": keep, "backward": differentiate, "vmap": partial(self.vmap, self)}
        self.function = _function(self.name, methods)
        # past what torch.autograd.Function.apply does for torch.func, which is not at work there
        recorded = _function(
            self.name, {"forward": self.compute_and_keep, "backward": self.differentiate_what_was_recorded}
        )
        self.recorded: Callable[..., Any] = getattr(super(torch.autograd.Function, recorded), "apply")  # noqa: B009

    @cached_property
    def overload(self) -> Any:
        return getattr(getattr(torch.ops, self.library.ns), self.name).default

    @cached_property
    def kernel(self) -> Callable[..., Any]:
        """The function of `dualops.cuda`."""
        return getattr(import_module("dualops.cuda"), self.name)

    @cached_property
    def operation(self) -> Callable[..., Any]:
        """What that function calls: (inputs, parameters in the spec's order, out, kernel, stream)."""
        import_module("dualops.cuda")
        directions = import_module("dualops.cuda.launch").OPERATIONS[self.spec.name]
        return directions[self.backwards]

    @cached_property
    def schema(self) -> str:
        arguments = [f"Tensor{'?' if wanted.optional else ''} {wanted.name}" for wanted in self.inputs]
        arguments += [declaration(param, self.kinds[param.name]) for param in self.params]
        tensors = ", ".join(f"Tensor {output.name}" for output in self.outputs)
        return f"{self.name}({', '.join(arguments)}) -> {'Tensor' if len(self.outputs) == 1 else f'({tensors})'}"

    # --- implementations

    def compute(self, args: tuple[Any, ...], on_gpu: bool) -> Any:
        """Kernels for CUDA tensors, NumPy for CPU tensors. Results share no memory with the arguments.

        None stands for a result that the call does not have, where it has others behind it.
        """
        if on_gpu:
            results = self.operation(args[: self.count], self.kernel_params(args + self.fixed_values), None, None, None)
        else:
            results = self.on_cpu(args)
        if len(self.outputs) == 1:
            return results if isinstance(results, Tensor) else results[0]
        if not isinstance(results, tuple):
            results = (results,)
        if len(results) < len(self.outputs):
            there = iter(results)
            results = tuple([next(there) if has else None for has in self.having(args)])
        return results

    def on_cpu(self, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """What the reference computes."""
        arrays, params = self.split(args)
        results = self.allocate(args)
        computed = self.reference(**{name: _as_numpy(array) for name, array in arrays.items()}, **params)
        for result, values in zip(results, computed if isinstance(computed, tuple) else (computed,), strict=True):
            _as_numpy(result)[...] = values
        return results

    def compute_and_keep(self, ctx: Any, params: tuple[Any, ...], *tensors: Any) -> Any:
        """`compute`, and what backward needs of it. To torch, all parameters are one: each argument costs."""
        args = tensors + params
        results = self.compute(args, self.on_gpu(args))
        self.rule.keep(ctx, args, results)
        return results

    def differentiate(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of inputs and parameters, of which these have none."""
        wants = ctx.needs_input_grad
        found = self.rule.differentiate(ctx, wants[: self.count], gradients)
        return (*found, *[None] * (len(wants) - self.count))

    def differentiate_what_was_recorded(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The same, in the order in which `compute_and_keep` has them."""
        return (None, *self.rule.differentiate(ctx, ctx.needs_input_grad[1:], gradients))

    def run(self, *args: Any) -> Any:
        """`compute` for the dispatcher, whose operators have all their results."""
        return self.packed(args, self.compute(args, self.on_gpu(args)))

    def on_gpu(self, args: tuple[Any, ...]) -> bool:
        return any(tensor is not None and tensor.is_cuda for tensor in args[: self.count])

    def fake(self, *args: Any) -> Any:
        """Results without values, of the shapes, dtypes and strides that `run` gives."""
        there = iter(self.allocate(args))
        results = [next(there) if has else None for has in self.having(args)]
        return self.packed(args, results[0] if len(results) == 1 else results)

    def flops(self, *args: Any, out_val: Any) -> int:
        return self.cost.flops(self.bind(args))

    def cast_and_call(self, device: str) -> Callable[..., Any]:
        """The autocast rule of a device."""

        def kernel(*args: Any) -> Any:
            dtype = torch.float32 if self.autocast == "float32" else torch.get_autocast_dtype(device)
            cast = (_cast(value, wanted, dtype, device) for wanted, value in zip(self.inputs, args))
            with torch.autocast(device, enabled=False):
                return self.overload(*cast, *args[len(self.inputs) :])

        return kernel

    def vmap(self, call: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        """Inputs of any shape: the mapped axis becomes the first, and a parameter `axis` moves on by one."""
        if any(wanted.axes is not None for wanted in self.inputs):
            raise NotImplementedError(f"{self.name}: vmap is not implemented; put the mapped axis into the arguments")
        arrays, params = self.split(args)
        dims = dict(zip(self.names, in_dims))
        moved = {
            name: array.expand(info.batch_size, *array.shape) if dims[name] is None else array.movedim(dims[name], 0)
            for name, array in arrays.items()
        }
        if "axis" in params:
            metas = self.metas(moved).items()
            one = {name: meta._replace(shape=meta.shape[1:], strides=meta.strides[1:]) for name, meta in metas}
            params["axis"] = self.binder(one, params).axis + 1
        results = call(*(moved.get(wanted.name) for wanted in self.inputs), *(params[p.name] for p in self.params))
        return results, 0 if len(self.outputs) == 1 else (0,) * len(self.outputs)

    def vmap_decoded(self, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        return self.vmap(self.dispatch, info, in_dims, *self.decode(args))

    # --- arguments

    def encode(self, args: tuple[Any, ...]) -> list[Any]:
        """Arguments for the dispatcher."""
        encoded = list(args)
        for place, param in self.texts:
            encoded[place] = as_text(param, args[place])
        return encoded

    def decode(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments as the dispatcher has them, as the caller gave them."""
        left_out = self.params[len(args) - len(self.inputs) :]
        decoded = [*args, *(param.default for param in left_out)]
        for place, _ in self.texts:
            if place < len(args):
                decoded[place] = from_text(args[place])
        return tuple(decoded)

    def decoded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method to be called by the dispatcher."""
        return lambda *args, **more: method(*self.decode(args), **more)

    def checked(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of the schema's types. Raises the spec's error where torch has its own, or takes True for 1."""
        count = len(self.inputs)
        for wanted, value in zip(self.inputs, args):
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"{self.name}: {wanted.name} is a {type(value).__name__}, expected a torch.Tensor")
        params = list(args[count:])
        for place, (param, value) in enumerate(zip(self.params, params)):
            if not fits(self.kinds[param.name], value):
                try:
                    params[place] = param.domain(value)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{self.name}: {param.name} is {value!r}, {error.args[0]}") from None
        return (*args[:count], *params)

    def split(self, args: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs that are there, and all parameters, by name."""
        count = len(self.inputs)
        arrays = {name: value for name, value in zip(self.names, args[:count]) if value is not None}
        return arrays, {**self.fixed, **dict(zip(self.names[count:], args[count:], strict=True))}

    def metas(self, arrays: Mapping[str, Any]) -> dict[str, ArrayMeta]:
        """What the spec needs to know. Sizes and strides stay symbolic where a tensor's are; there is no address."""
        for name, array in arrays.items():
            if array.layout is not torch.strided:
                raise TypeError(f"{self.name}: {name} has layout {array.layout}, expected {torch.strided}")
        numbers = {wanted.name for wanted in self.inputs if wanted.host}
        return {
            name: ArrayMeta(
                tuple(array.shape),
                _DTYPE_NAMES[array.dtype],
                array.stride(),
                "host" if name in numbers and array.ndim == 0 and array.device.type == "cpu" else str(array.device),
                0,
            )
            for name, array in arrays.items()
        }

    def bind(self, args: tuple[Any, ...]) -> Problem:
        arrays, params = self.split(args)
        return self.binder(self.metas(arrays), {name: _settled(value) for name, value in params.items()})

    def refusal(self, args: tuple[Any, ...]) -> Exception | None:
        """The spec's error, if the call is wrong. Under autocast dtypes may differ that must not else."""
        try:
            if torch._C._is_any_autocast_enabled():
                self.metas(self.split(args)[0])
            else:
                self.bind(args)
        except (TypeError, ValueError, NotImplementedError) as error:
            return error
        return None

    # --- results

    def allocate(self, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """New tensors for the results that the call has. Raises the spec's error for a wrong call."""
        return tuple(
            torch.empty_strided(meta.shape, meta.strides, dtype=getattr(torch, meta.dtype), device=meta.device)
            for meta in self.bind(args).outputs(self.outputs).values()
        )

    def packed(self, args: tuple[Any, ...], results: Any) -> Any:
        """Results as the schema has them, an empty tensor in place of one that the call does not have."""
        if isinstance(results, Tensor):
            return results
        like = next(array for array in args if array is not None)
        return tuple(like.new_empty(0) if result is None else result for result in results)

    def having(self, args: tuple[Any, ...]) -> list[bool]:
        """Which results a right call has: parameters say so, and which inputs are there, so nothing is bound for it."""
        try:
            key = (*[arg is None for arg in args[: self.count]], *args[self.count :])
            found = self.known.get(key)
        except TypeError:  # a parameter that is no key
            key = found = None
        if found is None:
            problem = self.unbound(args)
            found = [output.when(problem) for output in self.outputs]
            if key is not None and len(self.known) < MOST_KNOWN:
                self.known[key] = found
        return found

    def unbound(self, args: tuple[Any, ...]) -> Problem:
        """A right call's parameters, and which inputs are there."""
        arrays, params = self.split(args)
        return Problem(self.spec, "", {}, params, arrays)


def _items(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What takes the items in these places, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple([items[place] for place in places])


def _function(name: str, methods: Mapping[str, Callable[..., Any]]) -> Any:
    """An autograd.Function."""
    return type(name, (torch.autograd.Function,), {name: staticmethod(method) for name, method in methods.items()})


def _settled(value: Any) -> Any:
    """A parameter that a compiled function leaves open, as it was seen, or 0: its value is checked when it runs."""
    if not isinstance(value, torch.SymInt):
        return value
    return value.node.hint if value.node.has_hint() else 0


def _cast(value: Any, wanted: Input, dtype: torch.dtype, device: str) -> Any:
    """An input under autocast of `device`: floating tensors there unless they are float64."""
    if wanted.role not in (Role.DATA, Role.WEIGHT) or not isinstance(value, Tensor) or value.device.type != device:
        return value
    if not value.is_floating_point() or value.dtype is torch.float64 or value.dtype is dtype:
        return value
    return value.to(dtype if wanted.role is Role.DATA else torch.float32)


def _as_numpy(tensor: Tensor) -> np.ndarray:
    """The memory of a CPU tensor as an array; bfloat16 by way of its bits."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()
