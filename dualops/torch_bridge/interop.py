"""From a Spec to a torch operator: schema, implementations, fakes, autograd, autocast, vmap and flop count.

    _operator = register(SPEC, reference.softmax, reference.softmax_backward, autocast="float32")
    _operator(x, axis)

makes `torch.ops.dualops.softmax` and `torch.ops.dualops.softmax_backward` and returns what the public function calls,
with the spec's inputs (None for an optional one that is not there) and then its parameters, in the spec's order. The
rest follows from names:

  - one word names an operator in `dualops.reference`, which serves CPU tensors, and in `dualops.cuda`, which serves
    CUDA tensors and is imported when the first one arrives;
  - the gradient of the input or result `x` is called `dx`;
  - where an optional input of backward is None there is no gradient for it; the operator has an empty tensor there.

A call that torch's machinery has no interest in goes straight to the implementation, at a microsecond's cost or two.
Plain autograd, torch.func and forward-mode AD get an autograd.Function; all else (compilation, modes, subclasses,
autocast ...) goes through the dispatcher. Results are the same on each way, and so are the errors: those of
`Spec.bind`, which the fakes call too, with symbolic sizes where a compiled function is dynamic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from ..spec.base import ArrayMeta, Cost, Input, Output, Problem, Spec, numpy_dtype

_C: Any = torch._C
_DTYPE_NAMES = {
    value: str(value).removeprefix("torch.") for value in vars(torch).values() if type(value) is torch.dtype
}
_KINDS = {"bool": (bool,), "int": (int,), "float": (float, int), "str": (str,), "choice": ()}
_CHOICES = {"None": None, "True": True, "False": False}  # how the schema of a "choice" spells what is not a string
# Strides are part of what a kernel was found right for: the compiler must not choose other ones.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def register(
    spec: Spec,
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    *,
    kinds: Mapping[str, str] | None = None,
    autocast: str | None = None,
    namespace: str = "dualops",
) -> Direction:
    """Make the torch operators `namespace::<spec.name>` and, with `backward`, `namespace::<spec.name>_backward`.

    forward, backward: the functions of `dualops.reference`. Like those of `dualops.cuda` they are given the arrays that
    are there, and all parameters, by name, and return one array, or a tuple of those outputs that the call has. Without
    `backward` a gradient raises NotImplementedError.
    kinds: the schema type of each parameter whose default does not tell it: "bool", "int", "float" or "str", with a
    question mark where None is allowed too, or "choice" for a mixture of strings, booleans and None.
    autocast: "float32" or "lower" (autocast's own dtype): what it makes of tensors that are not float64; None: nothing.

    Returns the forward operator, to be called with all inputs and parameters in order. Raises ValueError for a
    parameter whose kind is not known, RuntimeError for a name that is registered already.
    """
    types = {param.name: (kinds or {}).get(param.name) or type(param.default).__name__ for param in spec.params}
    for name, kind in types.items():
        if kind.removesuffix("?") not in _KINDS:
            raise ValueError(f"{spec.name}: parameter {name} is of kind {kind}, expected one of {', '.join(_KINDS)}")
    library = torch.library.Library(namespace, "FRAGMENT")
    direction = partial(Direction, library, spec, types)
    there = direction(spec.name, spec.inputs, spec.outputs, spec.bind, spec.forward_cost, forward, autocast)
    back = None
    if backward is not None:
        if spec.backward_cost is None:
            raise ValueError(f"{spec.name}: the spec has no backward_cost, expected one beside a backward function")
        name, inputs, results = f"{spec.name}_backward", spec.gradient_inputs, spec.gradients
        back = direction(name, inputs, results, spec.bind_backward, spec.backward_cost, backward)
        back.define(None)
    there.define(back)
    return there


@dataclass(eq=False)
class Direction:
    """Forward or backward of an operator: what torch must know of it, derived from the spec.

    `args` below are always the inputs and parameters in order, as in the schema.
    """

    library: torch.library.Library
    spec: Spec
    kinds: Mapping[str, str]  # parameter -> type in the schema
    name: str  # in torch.ops, dualops.reference and dualops.cuda
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    binder: Callable[..., Problem]
    cost: Cost
    reference: Callable[..., Any]
    autocast: str | None = None

    def __call__(self, *args: Any) -> Any:
        """One tensor, or a tuple of all outputs. Raises the spec's error for a wrong call."""
        if torch.compiler.is_dynamo_compiling():
            return self.dispatch(*args)
        tensors = args[: len(self.inputs)]
        if not (_watched() or _transformed()) and all(map(_dense, tensors)):
            if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
                return self.function.apply(*args)
            return self.run(*args)
        if not self.exactly_typed(args):
            self.bind(args)  # torch would take True for 1
        try:
            return self.function.apply(*args) if _transformed() else self.dispatch(*args)
        except Exception:
            refusal = self.refusal(args)  # a wrong call gets the spec's words, whatever torch said
            if refusal is None:
                raise
            raise refusal from None

    def dispatch(self, *args: Any) -> Any:
        """The same, by way of torch's dispatcher."""
        kinds = (*("Tensor" for _ in self.inputs), *self.kinds.values())
        return self.overload(*(str(value) if kind == "choice" else value for kind, value in zip(kinds, args)))

    # --- registration

    def define(self, backward: Direction | None) -> None:
        """Tell torch all of it. Without `backward` the gradient is an error."""
        self.library.define(self.schema, tags=_TAGS)
        for key in ("CPU", "CUDA"):
            self.library.impl(self.name, self.run, key)
            if self.autocast is not None:
                self.library.impl(self.name, self.cast_and_call(key.lower()), f"Autocast{key}")
        keep, differentiate = self.autograd(backward) if backward else (_keep_nothing, self.refuse_gradient)
        qualified = f"{self.library.ns}::{self.name}"
        torch.library.register_fake(qualified, self.fake, lib=self.library)
        torch.library.register_vmap(qualified, partial(self.vmap, self.dispatch), lib=self.library)
        torch.library.register_autograd(qualified, differentiate, setup_context=keep, lib=self.library)
        register_flop_formula(self.overload.overloadpacket, get_raw=True)(self.flops)
        methods = {"forward": self, "setup_context": keep, "backward": differentiate, "vmap": partial(self.vmap, self)}
        static = {name: staticmethod(method) for name, method in methods.items()}
        self.function: Any = type(self.name, (torch.autograd.Function,), static)

    @cached_property
    def overload(self) -> Any:
        return getattr(getattr(torch.ops, self.library.ns), self.name).default

    @cached_property
    def kernel(self) -> Callable[..., Any]:
        """The function of `dualops.cuda`."""
        return getattr(import_module("dualops.cuda"), self.name)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return (*(wanted.name for wanted in self.inputs), *self.kinds)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        return {param.name: param.default for param in self.spec.params}

    @cached_property
    def choices(self) -> tuple[str, ...]:
        return tuple(name for name, kind in self.kinds.items() if kind == "choice")

    @cached_property
    def schema(self) -> str:
        arguments = [f"Tensor{'?' if wanted.optional else ''} {wanted.name}" for wanted in self.inputs]
        for param, kind in zip(self.spec.params, self.kinds.values(), strict=True):
            default = str(param.default) if kind == "choice" else param.default
            text = f'"{default}"' if isinstance(default, str) else repr(default)
            arguments.append(f"{'str' if kind == 'choice' else kind} {param.name}={text}")
        tensors = ", ".join(f"Tensor {output.name}" for output in self.outputs)
        return f"{self.name}({', '.join(arguments)}) -> {'Tensor' if len(self.outputs) == 1 else f'({tensors})'}"

    # --- implementations

    def run(self, *args: Any) -> Any:
        """Kernels for CUDA tensors, NumPy for CPU tensors. Results share no memory with the arguments."""
        arrays, params = self.split(args)
        if any(array.is_cuda for array in arrays.values()):
            return self.packed(arrays, self.kernel(**arrays, **params))
        results = self.allocate(arrays, self.bind(args))
        computed = self.reference(**{name: _as_numpy(array) for name, array in arrays.items()}, **params)
        for result, values in zip(results, _as_tuple(computed), strict=True):
            _as_numpy(result)[...] = values
        return self.packed(arrays, results)

    def fake(self, *args: Any) -> Any:
        """Results without values, of the shapes, dtypes and strides that `run` gives."""
        arrays, _ = self.split(args)
        return self.packed(arrays, self.allocate(arrays, self.bind(args)))

    def flops(self, *args: Any, out_val: Any) -> int:
        return self.cost.flops(self.bind(args))

    def cast_and_call(self, device: str) -> Callable[..., Any]:
        """The autocast rule of a device."""

        def kernel(*args: Any) -> Any:
            dtype = torch.float32 if self.autocast == "float32" else torch.get_autocast_dtype(device)
            cast = (value.to(dtype) if _narrow(value, device) else value for value in args)
            with torch.autocast(device, enabled=False):
                return self.overload(*cast)

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
        results = call(*(moved.get(wanted.name) for wanted in self.inputs), *params.values())
        return results, 0 if len(self.outputs) == 1 else (0,) * len(self.outputs)

    def autograd(self, backward: Direction) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """What forward keeps, and how backward is called."""
        spec, count = self.spec, len(self.inputs)
        contiguous = {wanted.name for wanted in backward.inputs if wanted.contiguous_last}

        def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            known = dict(zip(self.names, inputs)) | {out.name: x for out, x in zip(self.outputs, _as_tuple(output))}
            ctx.save_for_backward(*(known[name] for name in spec.saved))
            ctx.params = inputs[count:]

        def differentiate(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
            known: dict[str, Any] = dict(zip(spec.saved, ctx.saved_tensors))
            for out, gradient in zip(self.outputs, incoming):
                # the gradient of a sum arrives with strides of 0, which no caller chose
                known[f"d{out.name}"] = gradient.contiguous() if f"d{out.name}" in contiguous else gradient
            results = backward(*(known[wanted.name] for wanted in backward.inputs), *ctx.params)
            gradients = {out.name: gradient for out, gradient in zip(backward.outputs, _as_tuple(results))}
            wanted = (gradients.get(f"d{name}") for name in self.names)
            return tuple(gradient if needed else None for gradient, needed in zip(wanted, ctx.needs_input_grad))

        return keep, differentiate

    def refuse_gradient(self, ctx: Any, *incoming: Tensor) -> NoReturn:
        raise NotImplementedError(f"{self.name}: its gradient is not implemented")

    # --- arguments and results

    def split(self, args: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs that are there, and parameters, by name. The dispatcher leaves out defaults at the end."""
        arrays = {name: value for name, value in zip(self.names, args[: len(self.inputs)]) if value is not None}
        params = self.defaults | dict(zip(self.kinds, args[len(self.inputs) :]))
        for name in self.choices:
            value = params[name]
            params[name] = _CHOICES.get(value, value) if isinstance(value, str) else value
        return arrays, params

    def exactly_typed(self, args: tuple[Any, ...]) -> bool:
        given = args[len(self.inputs) :]
        return all(type(value) in _KINDS.get(kind, ()) for kind, value in zip(self.kinds.values(), given))

    def metas(self, arrays: Mapping[str, Any]) -> dict[str, ArrayMeta]:
        """What the spec needs to know. Sizes and strides stay symbolic where a tensor's are; there is no address."""
        for name, array in arrays.items():
            if not isinstance(array, Tensor):
                raise TypeError(f"{self.name}: {name} is a {type(array).__name__}, expected a torch.Tensor")
            if array.layout is not torch.strided:
                raise TypeError(f"{self.name}: {name} has layout {array.layout}, expected {torch.strided}")
        return {
            name: ArrayMeta(tuple(array.shape), _DTYPE_NAMES[array.dtype], array.stride(), str(array.device), 0)
            for name, array in arrays.items()
        }

    def bind(self, args: tuple[Any, ...]) -> Problem:
        arrays, params = self.split(args)
        return self.binder(self.metas(arrays), params)

    def refusal(self, args: tuple[Any, ...]) -> Exception | None:
        """The spec's error, if the call is wrong."""
        try:
            self.bind(args)
        except (TypeError, ValueError, NotImplementedError) as error:
            return error
        return None

    def absent(self, output: Output, arrays: Mapping[str, Any]) -> bool:
        """Whether `output` is the gradient of an optional input that is not there."""
        optional = (wanted.name for wanted in self.inputs if wanted.optional and wanted.name not in arrays)
        return output.name in (f"d{name}" for name in optional)

    def allocate(self, arrays: Mapping[str, Any], problem: Problem) -> tuple[Tensor, ...]:
        metas = problem.outputs([output for output in self.outputs if not self.absent(output, arrays)])
        return tuple(
            torch.empty_strided(meta.shape, meta.strides, dtype=getattr(torch, meta.dtype), device=meta.device)
            for meta in metas.values()
        )

    def packed(self, arrays: Mapping[str, Any], results: Tensor | tuple[Tensor, ...]) -> Any:
        """Results as the schema has them, an empty tensor in place of an absent one."""
        if len(self.outputs) == 1:
            return _as_tuple(results)[0]
        given, like = iter(_as_tuple(results)), next(iter(arrays.values()))
        return tuple(like.new_empty(0) if self.absent(output, arrays) else next(given) for output in self.outputs)


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """A setup_context for a gradient that is an error."""


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def _watched() -> bool:
    """Whether a mode, autocast, a trace or a profile has to see what is called."""
    return bool(
        _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._is_any_autocast_enabled()
        or _C._is_tracing()
        or _C._autograd._profiler_enabled()
    )


def _transformed() -> bool:
    """Whether torch.func or forward-mode AD is at work."""
    return _C._functorch.peek_interpreter_stack() is not None or (
        forward_ad._current_level >= 0 and _C._is_fwd_grad_enabled()
    )


def _dense(tensor: Any) -> bool:
    """Whether this is nothing, or a tensor proper whose memory holds its values."""
    return tensor is None or (
        (type(tensor) is Tensor or type(tensor) is torch.nn.Parameter)
        and (tensor.is_cuda or tensor.is_cpu)
        and tensor.layout is torch.strided
        and not (tensor.is_neg() or tensor.is_nested)
    )


def _narrow(value: Any, device: str) -> bool:
    """Whether autocast of `device` has to do with it: a floating tensor there, unless it is float64."""
    if not isinstance(value, Tensor) or value.device.type != device:
        return False
    return value.is_floating_point() and value.dtype is not torch.float64


def _as_numpy(tensor: Tensor) -> np.ndarray:
    """The memory of a CPU tensor as an array; bfloat16 by way of its bits."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()
