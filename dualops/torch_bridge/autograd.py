"""How torch's autograd calls the backward operator: what forward keeps, and what becomes of the gradients.

Which results a call has and what its backward reads follow from its parameters and from which inputs are there. It is
worked out once for each combination (`Recipe`): every call of every training step comes through here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .interop import Direction

MOST_RECIPES = 1000  # an operator keeps so many, and then begins anew


class Rules(NamedTuple):
    """Functions of an autograd.Function: keep(ctx, inputs, output) and differentiate(ctx, *gradients)."""

    keep: Callable[..., None]
    differentiate: Callable[..., Any]


class Recipe(NamedTuple):
    """What forward and backward of a right call do. Places count inputs, then results."""

    having: list[bool]  # which results there are
    saved: list[int | None]  # place of each tensor that is kept, None for one that backward does not read
    constant: list[int]  # results that have no gradient


class Rule:
    """The rules of an operator with a gradient, for inputs and parameters as a caller gives them."""

    def __init__(self, forward: Direction, backward: Direction):
        self.forward, self.backward, self.spec = forward, backward, forward.spec
        self.recipes: dict[Any, Recipe] = {}
        self.count = len(forward.inputs)
        places = {wanted.name: place for place, wanted in enumerate(forward.inputs)}
        self.places = places | {output.name: self.count + i for i, output in enumerate(forward.outputs)}
        incoming = {f"d{output.name}": i for i, output in enumerate(forward.outputs)}
        # what backward is given: of each input the gradient of which result, or which saved tensor
        self.arguments = [
            (incoming.get(wanted.name), self.spec.saved.index(wanted.name) if wanted.name in self.spec.saved else None)
            for wanted in backward.inputs
        ]
        self.differentiable = {place for place, _ in self.arguments if place is not None}
        # of each input its gradient among backward's results
        derived = [output.name for output in backward.outputs]
        owners = [f"d{self.spec.gradient_shared.get(wanted.name, wanted.name)}" for wanted in forward.inputs]
        self.gradients = [derived.index(name) if name in derived else None for name in owners]
        # what a parameter x_gradient says is whether the gradient of x is wanted
        self.asked = [places[param.name.removesuffix("_gradient")] for param in self.spec.gradient_params]

    def recipe(self, args: tuple[Any, ...]) -> Recipe:
        """Of a right call."""
        try:
            key = (*[arg is None for arg in args[: self.count]], *args[self.count :])
            found = self.recipes.get(key)
        except TypeError:  # a parameter that is no key
            return self._recipe(args)
        if found is None:
            if len(self.recipes) >= MOST_RECIPES:
                self.recipes.clear()
            found = self.recipes[key] = self._recipe(args)
        return found

    def _recipe(self, args: tuple[Any, ...]) -> Recipe:
        spec, problem = self.spec, self.forward.unbound(args)
        having = [output.when(problem) for output in self.forward.outputs]
        there = {output.name for output, has in zip(self.forward.outputs, having) if has}
        instead = {name: result for name, result in spec.saved_instead.items() if result in there}
        saved: list[int | None] = []
        for name in spec.saved:
            needed = name not in spec.saved_when or spec.saved_when[name](problem)
            saved.append(self.places[instead.get(name, name)] if needed else None)
        constant = [i for i, has in enumerate(having) if has and i not in self.differentiable]
        return Recipe(having, saved, constant)

    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        recipe = self.recipe(inputs)
        results = output if isinstance(output, tuple) else (output,)
        tensors = (*inputs[: self.count], *results)
        ctx.save_for_backward(*[None if place is None else tensors[place] for place in recipe.saved])
        ctx.params = inputs[self.count :]
        if recipe.constant:
            ctx.mark_non_differentiable(*[results[i] for i in recipe.constant])
        if len(results) > 1:
            ctx.results = [
                (result.shape, result.dtype, result.device) if has else None
                for result, has in zip(results, recipe.having)
            ]
            ctx.set_materialize_grads(False)  # backward need not read zeros for a result that was not used

    def differentiate(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wants = ctx.needs_input_grad
        for wanted, gradient, wants_one in zip(self.forward.inputs, self.gradients, wants):
            if wants_one and gradient is None:
                raise NotImplementedError(
                    f"{self.backward.name}: {wanted.name} requires a gradient, which is not implemented; detach it"
                )
        saved = ctx.saved_tensors
        arrays = [
            self._incoming(gradients, result, place, ctx) if result is not None else saved[which]
            for place, (result, which) in enumerate(self.arguments)
        ]
        found = self.backward(*arrays, *ctx.params, *[wants[place] for place in self.asked])
        if not isinstance(found, tuple):
            found = (found,)
        owned = [
            found[gradient] if wants_one and gradient is not None else None
            for gradient, wants_one in zip(self.gradients, wants)
        ]
        return (*owned, *[None] * (len(wants) - self.count))

    def _incoming(self, gradients: Sequence[Tensor | None], result: int, place: int, ctx: Any) -> Tensor | None:
        """The gradient of a result, as the input of backward at `place`."""
        wanted, gradient = self.backward.inputs[place], gradients[result]
        if gradient is None:
            meta = ctx.results[result]  # None if the call does not have the result
            if meta is None or wanted.optional:
                return None
            shape, dtype, device = meta
            return torch.zeros(shape, dtype=dtype, device=device)
        if len(gradients) > 1 and ctx.results[result] is None:
            return None
        # the gradient of a sum arrives with strides of 0, which no caller chose
        return gradient.contiguous() if wanted.contiguous_last and gradient.stride(-1) != 1 else gradient


def rules(forward: Direction, backward: Direction) -> Rules:
    """Of an operator with a gradient."""
    rule = Rule(forward, backward)
    return Rules(rule.keep, rule.differentiate)


def refusal(name: str) -> Rules:
    """Of an operator that has no gradient."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is needed for an error."""

    def refuse(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise NotImplementedError(f"{name}: its gradient is not implemented")

    return Rules(keep, refuse)
