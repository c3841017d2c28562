"""From a Spec to a torch operator: schema, implementations, fakes, autograd, autocast, vmap and flop count.

    _operator = register(SPEC, reference.softmax, reference.softmax_backward, autocast="float32")
    _operator(x, axis)

makes `torch.ops.dualops.softmax` and `torch.ops.dualops.softmax_backward`, and returns what the public function calls.
Its arguments are the spec's inputs (None for a missing optional one) and then its parameters, in the spec's order. The
rest follows from names:

  - one word names an operator in `dualops.reference`, which serves CPU tensors, and in `dualops.cuda`, which serves
    CUDA tensors and is imported when the first one arrives;
  - the gradient of the input or result `x` is called `dx`; an optional `dx` is None if the result was not used;
  - a parameter of backward alone, `x_gradient`, says whether the gradient of `x` is needed;
  - if a call does not have a result (`Output.when`), the dispatcher's operator returns an empty tensor, `register`'s
    returns None, and autograd has no gradient.

A call without autograd, modes or subclasses goes straight to the implementation, at the cost of a microsecond or two.
Plain autograd uses an autograd.Function of the old form, which costs torch the least. torch.func and forward-mode AD
use one of the new form. All else (compilation, modes, subclasses, autocast ...) goes through the dispatcher. Results
are the same on each path, and so are the errors: those of `Spec.bind`. The fakes call it too, with symbolic sizes for
dynamic compiled functions.

`schema` describes parameters for the dispatcher, `ways` chooses the path of a call, `autograd` says what forward saves
and how backward is called. `compiled` and `recomputed` make sure that users' functions read the same values as in
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..spec.base import Cost, Input, Role, Spec
from . import autograd, sharding
from .arguments import Arguments, as_numpy
from .schema import KINDS
from .ways import autocasting, plain, transformed, watched

# autograd.Function needs the signature of forward at every call, which takes 16 microseconds to compute
_SIGNATURE = Signature([Parameter("args", Parameter.VAR_POSITIONAL)])
# A kernel was chosen for these strides: the compiler must not choose other ones.
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
    """Register the torch operators `namespace::<spec.name>` and, with `backward`, `namespace::<spec.name>_backward`.

    forward, backward: the functions of `dualops.reference`. Like those of `dualops.cuda` they take the given arrays and
    all parameters, by name, and return one array, or a tuple of the outputs that the call has. Without `backward` a
    gradient raises NotImplementedError.
    kinds: the schema type of each parameter whose default does not determine it: "bool", "int", "SymInt" (compiled
    functions may leave its value open), "float" or "str", with a question mark if None is allowed too, or "text" for
    all else: tuples, functions, a mixture of strings and booleans.
    fixed: parameters that the caller can't choose, and their values.
    autocast: "float32" or "lower" (autocast's own dtype): the dtype of the data under autocast; None: unchanged.
    Weights of another dtype become float32; float64, statistics and all other inputs are unchanged.

    Returns the forward operator, to be called with all inputs and parameters in order. Raises ValueError for a
    parameter of unknown kind, RuntimeError for a name that is registered already.
    """
    fixed = dict(fixed or {})
    types = {param.name: type(param.default).__name__ for param in (*spec.params, *spec.gradient_params)}
    types |= kinds or {}
    for name, kind in types.items():
        if name not in fixed and kind.removesuffix("?") not in KINDS:
            raise ValueError(f"{spec.name}: parameter {name} is of kind {kind}, expected one of {', '.join(KINDS)}")
    params = tuple(param for param in spec.params if param.name not in fixed)
    library = torch.library.Library(namespace, "FRAGMENT")
    direction = partial(Direction, library=library, spec=spec, kinds=types, fixed=fixed)
    there = direction(
        name=spec.name,
        inputs=spec.inputs,
        params=params,
        outputs=spec.outputs,
        binder=spec.bind,
        cost=spec.forward_cost,
        reference=forward,
        autocast=autocast,
    )
    back = None
    if backward is not None:
        if spec.backward_cost is None:
            raise ValueError(f"{spec.name}: the spec has no backward_cost, expected one with a backward function")
        back = direction(
            name=f"{spec.name}_backward",
            inputs=spec.gradient_inputs,
            params=params + spec.gradient_params,
            outputs=spec.gradients,
            binder=spec.bind_backward,
            cost=spec.backward_cost,
            reference=backward,
            backwards=True,
        )
        back.define(None)
    there.define(back)
    return there


@dataclass(eq=False, kw_only=True)
class Direction(Arguments):
    """An operator's forward or backward for torch, derived from the spec."""

    library: torch.library.Library
    cost: Cost
    reference: Callable[..., Any]
    autocast: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__signature__ = _SIGNATURE

    def __call__(self, *args: Any) -> Any:
        """Return one tensor, or a tuple of all outputs, with None for one that the call does not have.

        Raises the spec's error for a wrong call.
        """
        if torch.compiler.is_dynamo_compiling():
            return self.dispatch(*self.checked(args))
        if not (watched() or transformed()) and (found := plain(args[: self.count])) is not None:
            if autocasting():
                args = self.cast(args)
            if found.requires_grad and torch.is_grad_enabled():
                return self.record(args, found.on_gpu)
            return self.compute(args, found.on_gpu)[0]
        args = self.checked(args)
        try:
            return self.function.apply(*args) if transformed() else self.dispatch(*args)
        except Exception:
            refusal = self.refusal(args)  # a wrong call raises the spec's error, not torch's
            if refusal is None:
                raise
            raise refusal from None

    def dispatch(self, *args: Any) -> Any:
        """Make the call through torch's dispatcher."""
        sharding.offer()
        return self.overload(*self.encode(args))

    # --- registration

    def define(self, backward: Direction | None) -> None:
        """Register everything with torch. Without `backward` the gradient is an error."""
        self.backward = backward
        self.library.define(self.schema, tags=_TAGS)
        sharding.add(self)
        for key in ("CPU", "CUDA"):
            self.library.impl(self.name, self.decoded(self.run), key)
            if self.autocast is not None:
                self.library.impl(self.name, self.cast_and_call(key.lower()), f"Autocast{key}")
        self.rule = autograd.Rule(self, backward) if backward else autograd.Refusal(self)
        qualified = f"{self.library.ns}::{self.name}"
        torch.library.register_fake(qualified, self.decoded(self.fake), lib=self.library)
        torch.library.register_vmap(qualified, self.vmap_decoded, lib=self.library)
        torch.library.register_autograd(
            qualified,
            self.differentiate,
            setup_context=lambda ctx, inputs, output: self.keep(ctx, self.decode(inputs), output),
            lib=self.library,
        )
        register_flop_formula(self.overload.overloadpacket, get_raw=True)(self.decoded(self.flops))
        methods = {"setup_context": self.keep, "backward": self.differentiate, "vmap": partial(self.vmap, self)}
        self.function = _function(self.name, {"forward": self, **methods})
        # skips torch.func's work in torch.autograd.Function.apply, since torch.func is not active here
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
    def operation(self) -> Any:
        """The `dualops.cuda.launch.operation.Operation` that this function calls."""
        import_module("dualops.cuda")
        directions = import_module("dualops.cuda.launch.operation").OPERATIONS[self.spec.name]
        return directions[self.backwards]

    # --- implementations

    def compute(
        self, args: tuple[Any, ...], on_gpu: bool, before: Callable[[Any], None] | None = None
    ) -> tuple[Any, autograd.Kept]:
        """Run kernels for CUDA tensors, NumPy for CPU tensors; return the results and the facts about such calls.

        before: called with a call's problem, choice and device before its kernels are loaded or built.
        Results share no memory with the arguments. None stands for one that the call does not have.
        """
        if on_gpu:
            tensors, operation = args[: self.count], self.operation
            for place in operation.host_places:
                if tensors[place] is not None:
                    tensors = operation.with_numbers(tensors)
            plan, pointers = operation.find(tensors, self.kernel_params(args + self.fixed_values), before=before)
            results = plan.run(tensors, pointers)
            kept = plan.notes
            if kept is None or kept.rule is not self.rule:
                kept = plan.notes = self.rule.kept(args)
        else:
            results, kept = self.on_cpu(args), self.rule.kept(args)
        if kept.lone:
            return results[0], kept
        if len(results) < len(kept.having):
            there = iter(results)
            results = [next(there) if has else None for has in kept.having]
        return tuple(results), kept

    def build_gradient_ahead(self, forward: Any) -> None:
        """Have other processes build backward's kernels, while this one builds forward's."""
        if self.backward:
            import_module("dualops.cuda.compiler.offline").build_gradient_ahead(forward.problem, forward.device)

    def on_cpu(self, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Run the reference."""
        arrays, params = self.split(args)
        results = self.allocate(args)
        computed = self.reference(**{name: as_numpy(array) for name, array in arrays.items()}, **params)
        for result, values in zip(results, computed if isinstance(computed, tuple) else (computed,), strict=True):
            as_numpy(result)[...] = values
        return results

    def run(self, *args: Any) -> Any:
        """`compute` for the dispatcher, whose operators have all their results."""
        on_gpu = any(tensor is not None and tensor.is_cuda for tensor in args[: self.count])
        return self.packed(args, self.compute(args, on_gpu)[0])

    def fake(self, *args: Any) -> Any:
        """Return results without values, with the shapes, dtypes and strides of `run`."""
        there = iter(self.allocate(args))
        results = [next(there) if has else None for has in self.having(args)]
        return self.packed(args, results[0] if len(results) == 1 else results)

    def flops(self, *args: Any, out_val: Any) -> int:
        return self.cost.flops(self.bind(args))

    def decoded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method for a call by the dispatcher."""
        return lambda *args, **more: method(*self.decode(args), **more)

    def allocate(self, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Allocate tensors for the results that the call has. Raises the spec's error for a wrong call."""
        return tuple(
            torch.empty_strided(meta.shape, meta.strides, dtype=getattr(torch, meta.dtype), device=meta.device)
            for meta in self.bind(args).outputs(self.outputs).values()
        )

    def packed(self, args: tuple[Any, ...], results: Any) -> Any:
        """Return results in the schema's form, with an empty tensor for one that the call does not have."""
        if isinstance(results, Tensor):
            return results
        like = next(array for array in args if array is not None)
        return tuple(like.new_empty(0) if result is None else result for result in results)

    # --- gradients

    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what backward needs, when torch has all results."""
        results = output if isinstance(output, tuple) else (output,)
        ctx.kept = kept = self.rule.kept(inputs)
        self.rule.keep(ctx, inputs, results, kept, len(results) > 1)
        ctx.mark_non_differentiable(*[results[i] for i in kept.constant])

    def differentiate(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of inputs and parameters; the parameters' are None."""
        wants = ctx.needs_input_grad
        found = self.rule.differentiate(ctx, wants[: self.count], gradients)
        return (*found, *[None] * (len(wants) - self.count))

    def record(self, args: tuple[Any, ...], on_gpu: bool) -> Any:
        """Make a call that autograd records. Each argument and result costs torch time, so it gets only the tensors,
        and only the results with a gradient.
        """
        call: list[Any] = [args[self.count :], on_gpu]
        found = self.recorded(call, *args[: self.count])
        results, kept = call
        if kept.lone:
            return found
        if not kept.constant and all(kept.having):
            return found
        for place, result in zip(kept.differentiable, found if isinstance(found, tuple) else (found,)):
            results[place] = result
        return tuple(results)

    def compute_and_keep(self, ctx: Any, call: list[Any], *tensors: Any) -> Any:
        """`compute`, and save what backward needs; `call` receives the results."""
        params, on_gpu = call
        args = tensors + params
        results, kept = self.compute(args, on_gpu, self.build_gradient_ahead)
        if kept.lone:
            results = (results,)
        ctx.kept = kept
        self.rule.keep(ctx, args, results, kept, len(kept.differentiable) > 1)
        call[:] = list(results), kept
        return results[0] if kept.lone else tuple([results[i] for i in kept.differentiable])

    def differentiate_what_was_recorded(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """`differentiate` for `compute_and_keep`."""
        kept = ctx.kept
        if len(gradients) < len(kept.having):
            known = dict(zip(kept.differentiable, gradients))
            gradients = tuple([known.get(i) for i in range(len(kept.having))])
        return (None, *self.rule.differentiate(ctx, ctx.needs_input_grad[1:], gradients))

    # --- autocast, vmap

    def cast_and_call(self, device: str) -> Callable[..., Any]:
        """The autocast rule of a device."""

        def kernel(*args: Any) -> Any:
            with torch.autocast(device, enabled=False):
                return self.overload(*self.cast_on(device, args))

        return kernel

    def cast(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Cast arguments by autocast's rule, if it is enabled."""
        for device in ("cuda", "cpu"):
            if self.autocast is not None and torch.is_autocast_enabled(device):
                args = self.cast_on(device, args)
        return args

    def cast_on(self, device: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        dtype = torch.float32 if self.autocast == "float32" else torch.get_autocast_dtype(device)
        inputs = [_cast(value, wanted, dtype, device) for wanted, value in zip(self.inputs, args)]
        return (*inputs, *args[self.count :])

    def vmap(self, call: Callable[..., Any], info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        """Accept inputs of any shape: the mapped axis becomes the first, and a parameter `axis` is shifted by one."""
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


def _function(name: str, methods: Mapping[str, Callable[..., Any]]) -> Any:
    """Build an autograd.Function."""
    return type(name, (torch.autograd.Function,), {name: staticmethod(method) for name, method in methods.items()})


def _cast(value: Any, wanted: Input, dtype: torch.dtype, device: str) -> Any:
    """Cast an input under autocast of `device`: its floating tensors except float64."""
    if wanted.role not in (Role.DATA, Role.WEIGHT) or not isinstance(value, Tensor) or value.device.type != device:
        return value
    if not value.is_floating_point() or value.dtype is torch.float64 or value.dtype is dtype:
        return value
    return value.to(dtype if wanted.role is Role.DATA else torch.float32)
