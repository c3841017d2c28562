"""How torch's autograd calls the backward operator: what forward saves, and where the gradients go.

Backward's reads follow from a call's parameters and its given inputs. They are computed once for each combination
(`Kept`), since every call of every training step comes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torch import Tensor

from . import recomputed

if TYPE_CHECKING:
    from .interop import Direction

MOST_KNOWN = 1000  # most combinations that an operator remembers before it starts over


class Kept(NamedTuple):
    """Facts about all valid calls with the same parameters and given inputs. Places count inputs, then results."""

    rule: Rule | Refusal
    having: list[bool]  # which results exist
    saved: Sequence[int | None] = ()  # place of each tensor that backward may read, None for one that it does not read
    differentiable: Sequence[int] = ()  # results with a gradient
    constant: Sequence[int] = ()  # results without one
    needed: Sequence[int] = ()  # results whose gradient backward needs even if they were not used

    @property
    def lone(self) -> bool:
        """Whether the operator has one result."""
        return len(self.having) == 1


class Rule:
    """What an operator with a gradient saves, and returns, for the caller's inputs and parameters."""

    def __init__(self, forward: Direction, backward: Direction):
        self.forward, self.backward, self.spec = forward, backward, forward.spec
        self.known: dict[Any, Kept] = {}
        self.count = len(forward.inputs)
        places = {wanted.name: place for place, wanted in enumerate(forward.inputs)}
        self.places = places | {output.name: self.count + i for i, output in enumerate(forward.outputs)}
        incoming = {f"d{output.name}": i for i, output in enumerate(forward.outputs)}
        # each input of backward: the gradient of a result, or a saved tensor
        self.sources = [
            (wanted, incoming.get(wanted.name), saved.index(wanted.name) if wanted.name in saved else None)
            for saved in [self.spec.saved]
            for wanted in backward.inputs
        ]
        self.optional = {result: wanted.optional for wanted, result, _ in self.sources if result is not None}
        # for each input, the place of its gradient among backward's results
        derived = [output.name for output in backward.outputs]
        owners = [f"d{self.spec.gradient_shared.get(wanted.name, wanted.name)}" for wanted in forward.inputs]
        self.gradients = [derived.index(name) if name in derived else None for name in owners]
        # a parameter x_gradient says whether the gradient of x is needed
        self.asked = [places[param.name.removesuffix("_gradient")] for param in self.spec.gradient_params]
        self.without = [place for place, gradient in enumerate(self.gradients) if gradient is None]

    def kept(self, args: tuple[Any, ...]) -> Kept:
        """Return the facts about a valid call."""
        try:
            key = (*[arg is None for arg in args[: self.count]], *args[self.count :])
            found = self.known.get(key)
        except TypeError:  # a parameter is not hashable
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
        results = [i for i, has in enumerate(having) if has]
        differentiable = [i for i in results if i in self.optional]
        constant = [i for i in results if i not in self.optional]
        return Kept(self, having, saved, differentiable, constant, [i for i in differentiable if not self.optional[i]])

    def keep(self, ctx: Any, args: tuple[Any, ...], results: tuple[Any, ...], kept: Kept, several: bool) -> None:
        """Save what backward will need of a call. several: some gradients may be missing."""
        tensors = args[: self.count] + results
        saved = [None if place is None else tensors[place] for place in kept.saved]
        ctx.params = params = args[self.count :]
        if self.forward.texts:  # functions may be among the parameters
            saved.append(recomputed.mark(params, args[0]))
        ctx.save_for_backward(*saved)
        if several:
            ctx.set_materialize_grads(False)  # backward need not read zeros for unused results
            ctx.needed = {i: (results[i].shape, results[i].dtype, results[i].device) for i in kept.needed}

    def differentiate(self, ctx: Any, wants: Sequence[bool], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs that need one, from the gradients of the results."""
        for place in self.without:
            if wants[place]:
                name = self.forward.inputs[place].name
                raise NotImplementedError(
                    f"{self.backward.name}: {name} requires a gradient, which is not implemented; detach it"
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
                # the gradient of a sum has strides of 0, which no caller chose
                apart = wanted.contiguous_last and gradient.stride(-1) != 1
                arrays.append(gradient.contiguous() if apart else gradient)
            elif wanted.optional:
                arrays.append(None)
            else:
                # zeros of the same kind, such as a DTensor
                like = next(x for x in (*gradients, *saved) if x is not None)
                shape, dtype, device = ctx.needed[result]
                arrays.append(like.new_zeros(shape, dtype=dtype, device=device))
        found = self.backward(*arrays, *ctx.params, *[wants[place] for place in self.asked])
        if not isinstance(found, tuple):
            found = (found,)
        return [found[i] if wants_one and i is not None else None for i, wants_one in zip(self.gradients, wants)]


class Refusal:
    """Replaces a Rule for an operator without a gradient."""

    def __init__(self, forward: Direction):
        self.forward = forward

    def kept(self, args: tuple[Any, ...]) -> Kept:
        having = self.forward.having(args)
        # differentiable, or torch would not ask for a gradient
        return Kept(self, having, differentiable=[i for i, has in enumerate(having) if has])

    def keep(self, ctx: Any, args: tuple[Any, ...], results: tuple[Any, ...], kept: Kept, several: bool) -> None:
        """Save nothing, for an error."""

    def differentiate(self, ctx: Any, wants: Sequence[bool], gradients: Sequence[Tensor | None]) -> NoReturn:
        raise NotImplementedError(f"{self.forward.name}: its gradient is not implemented")
