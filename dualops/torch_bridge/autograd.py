"""How torch's autograd calls the backward operator: what forward keeps, and what becomes of the gradients.

What backward reads follows from a call's parameters and from which inputs are there. It is worked out once for each
combination (`Kept`): every call of every training step comes through here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from . import recomputed

if TYPE_CHECKING:
    from .interop import Direction

MOST_KNOWN = 1000  # combinations of which an operator keeps what they mean, before it begins anew


class Rules(NamedTuple):
    """What an autograd.Function does."""

    keep: Callable[..., None]  # (ctx, inputs and parameters, results)
    differentiate: Callable[..., Any]  # (ctx, which inputs want a gradient, gradients of results) -> of the inputs


class Kept(NamedTuple):
    """What a right call keeps. Places count inputs, then results."""

    having: list[bool]  # which results there are
    saved: list[int | None]  # place of each tensor that backward may read, None for one that it does not
    constant: list[int]  # results that have no gradient
    needed: list[int]  # results whose gradient backward needs also where they were not used


class Rule:
    """The rules of an operator with a gradient, for inputs and parameters as a caller gives them."""

    def __init__(self, forward: Direction, backward: Direction):
        self.forward, self.backward, self.spec = forward, backward, forward.spec
        self.known: dict[Any, Kept] = {}
        self.count = len(forward.inputs)
        places = {wanted.name: place for place, wanted in enumerate(forward.inputs)}
        self.places = places | {output.name: self.count + i for i, output in enumerate(forward.outputs)}
        incoming = {f"d{output.name}": i for i, output in enumerate(forward.outputs)}
        # what each input of backward is: the gradient of a result, or a saved tensor
        self.sources = [
            (wanted, incoming.get(wanted.name), saved.index(wanted.name) if wanted.name in saved else None)
            for saved in [self.spec.saved]
            for wanted in backward.inputs
        ]
        self.optional = {result: wanted.optional for wanted, result, _ in self.sources if result is not None}
        # of each input its gradient among backward's results
        derived = [output.name for output in backward.outputs]
        owners = [f"d{self.spec.gradient_shared.get(wanted.name, wanted.name)}" for wanted in forward.inputs]
        self.gradients = [derived.index(name) if name in derived else None for name in owners]
        # what a parameter x_gradient says is whether the gradient of x is wanted
        self.asked = [places[param.name.removesuffix("_gradient")] for param in self.spec.gradient_params]

    def kept(self, args: tuple[Any, ...]) -> Kept:
        """Of a right call."""
        try:
            key = (*[arg is None for arg in args[: self.count]], *args[self.count :])
            found = self.known.get(key)
        except TypeError:  # a parameter that is no key
            return self._kept(args)
        if found is None:
            if len(self.known) >= MOST_KNOWN:
                self.known.clear()
            found = self.known[key] = self._kept(args)
        return found

    def _kept(self, args: tuple[Any, ...]) -> Kept:
        spec, problem = self.spec, self.forward.unbound(args)
        having = self.forward.having(args)
        there = {output.name for output, has in zip(self.forward.outputs, having) if has}
        instead = {name: result for name, result in spec.saved_instead.items() if result in there}
        saved: list[int | None] = []
        for name in spec.saved:
            needed = name not in spec.saved_when or spec.saved_when[name](problem)
            saved.append(self.places[instead.get(name, name)] if needed else None)
        constant = [i for i, has in enumerate(having) if has and i not in self.optional]
        needed = [i for i, has in enumerate(having) if has and not self.optional.get(i, True)]
        return Kept(having, saved, constant, needed)

    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.kept = kept = self.kept(inputs)
        results = output if isinstance(output, tuple) else (output,)
        tensors = (*inputs[: self.count], *results)
        saved = [None if place is None else tensors[place] for place in kept.saved]
        if self.forward.texts:  # functions may be among the parameters
            saved.append(recomputed.mark(inputs[self.count :], inputs[0]))
        ctx.save_for_backward(*saved)
        ctx.params = inputs[self.count :]
        if kept.constant:
            ctx.mark_non_differentiable(*[results[i] for i in kept.constant])
        if len(results) > 1:
            ctx.set_materialize_grads(False)  # backward need not read zeros for a result that was not used
            ctx.needed = {i: (results[i].shape, results[i].dtype, results[i].device) for i in kept.needed}

    def differentiate(self, ctx: Any, wants: Sequence[bool], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        for wanted, gradient, wants_one in zip(self.forward.inputs, self.gradients, wants):
            if wants_one and gradient is None:
                raise NotImplementedError(
                    f"{self.backward.name}: {wanted.name} requires a gradient, which is not implemented; detach it"
                )
        saved, having = ctx.saved_tensors, ctx.kept.having
        if self.forward.texts:
            recomputed.check(ctx.params, saved[-1])
        arrays = []
        for wanted, result, place in self.sources:
            if result is None:
                arrays.append(saved[place])
            elif not having[result]:
                arrays.append(None)
            elif (gradient := gradients[result]) is not None:
                # that of a sum arrives with strides of 0, which no caller chose
                apart = wanted.contiguous_last and gradient.stride(-1) != 1
                arrays.append(gradient.contiguous() if apart else gradient)
            else:
                arrays.append(None if wanted.optional else _zeros(*ctx.needed[result]))
        found = self.backward(*arrays, *ctx.params, *[wants[place] for place in self.asked])
        if not isinstance(found, tuple):
            found = (found,)
        return [found[i] if wants_one and i is not None else None for i, wants_one in zip(self.gradients, wants)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def rules(forward: Direction, backward: Direction) -> Rules:
    """Of an operator with a gradient."""
    rule = Rule(forward, backward)
    return Rules(rule.keep, rule.differentiate)


def refusal(name: str) -> Rules:
    """Of an operator that has no gradient."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is needed for an error."""

    def refuse(ctx: Any, wants: Sequence[bool], gradients: Sequence[Tensor | None]) -> NoReturn:
        raise NotImplementedError(f"{name}: its gradient is not implemented")

    return Rules(keep, refuse)
