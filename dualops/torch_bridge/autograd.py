"""How torch's autograd calls the backward operator: what forward keeps, and what becomes of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..spec.base import Input
from . import recomputed

if TYPE_CHECKING:
    from .interop import Direction

Rules = tuple[Callable[..., None], Callable[..., Any]]  # setup_context and backward of an autograd.Function


def rules(forward: Direction, backward: Direction) -> Rules:
    """Both functions, for parameters as the caller gives them."""
    spec, count = forward.spec, len(forward.inputs)
    incoming = {wanted.name: wanted for wanted in backward.inputs}
    derived = [output.name for output in backward.outputs]

    def owner(name: str) -> str:
        return f"d{spec.gradient_shared.get(name, name)}"

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        known = dict(zip(forward.names, inputs)) | {out.name: x for out, x in zip(forward.outputs, results)}
        having = forward.having(inputs)
        there = {out.name for out, has in zip(forward.outputs, having) if has}
        known |= {name: known[result] for name, result in spec.saved_instead.items() if result in there}
        needed = forward.needed(inputs)
        saved = [known[name] if name in needed else None for name in spec.saved]
        ctx.save_for_backward(*saved, recomputed.mark(inputs[count:], inputs[0]) if forward.texts else None)
        ctx.mark_non_differentiable(*(x for out, x in zip(forward.outputs, results) if f"d{out.name}" not in incoming))
        ctx.params = inputs[count:]
        ctx.results = [
            (result.shape, result.dtype, result.device) if has else None for result, has in zip(results, having)
        ]
        ctx.set_materialize_grads(False)  # backward need not read zeros for a result that was not used

    def differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wants = dict(zip(forward.names, ctx.needs_input_grad))
        for wanted in forward.inputs:
            if wants[wanted.name] and owner(wanted.name) not in derived:
                raise NotImplementedError(
                    f"{backward.name}: {wanted.name} requires a gradient, which is not implemented; detach it"
                )
        *saved, mark = ctx.saved_tensors
        recomputed.check(ctx.params, mark)
        known: dict[str, Any] = dict(zip(spec.saved, saved))
        for out, result, gradient in zip(forward.outputs, ctx.results, gradients):
            if f"d{out.name}" in incoming:
                known[f"d{out.name}"] = _readable(gradient, incoming[f"d{out.name}"], result)
        # what a parameter x_gradient says is whether the gradient of x is wanted
        asked = (wants[param.name.removesuffix("_gradient")] for param in spec.gradient_params)
        found = backward(*(known[wanted.name] for wanted in backward.inputs), *ctx.params, *asked)
        by_name = dict(zip(derived, found if isinstance(found, tuple) else (found,)))
        return tuple(by_name[owner(name)] if needed else None for name, needed in wants.items())

    return keep, differentiate


def refusal(name: str) -> Rules:
    """Both functions of an operator that has no gradient."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is needed for an error."""

    def refuse(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise NotImplementedError(f"{name}: its gradient is not implemented")

    return keep, refuse


def _readable(gradient: Tensor | None, wanted: Input, result: tuple[Any, ...] | None) -> Tensor | None:
    """A gradient as backward takes it. result: shape, dtype and device of what it belongs to, None if absent."""
    if result is None:
        return None
    if gradient is None:
        shape, dtype, device = result
        return None if wanted.optional else torch.zeros(shape, dtype=dtype, device=device)
    # the gradient of a sum arrives with strides of 0, which no caller chose
    return gradient.contiguous() if wanted.contiguous_last and gradient.stride(-1) != 1 else gradient
