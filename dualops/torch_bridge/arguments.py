"""The arguments of a direction of an operator: as a caller gives them, as torch's dispatcher has them, as bound.

`args` are always the inputs and then the parameters in order, as a caller gives them. The dispatcher has some of the
parameters as text and leaves out defaults at the end (`encode`, `decode`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..spec.base import Input, Output, Param, Problem, Spec
from ..spec.meta import ArrayMeta, numpy_dtype
from .schema import as_text, declaration, fits, from_text

DTYPE_NAMES = {value: str(value).removeprefix("torch.") for value in vars(torch).values() if type(value) is torch.dtype}


def longest_or_all(said: Any, tokens: Any) -> Any:
    """The length of the longest sequence, as the caller said it; for None the tokens of a tensor that there are."""
    return tokens.shape[0] if said is None and isinstance(tokens, Tensor) and tokens.ndim else said


@dataclass(eq=False, kw_only=True)
class Arguments:
    """What a direction takes, derived from the spec."""

    spec: Spec
    kinds: Mapping[str, str]  # parameter -> type in the schema
    fixed: Mapping[str, Any]  # parameters that are not among `params`, and their values
    name: str  # in torch.ops, dualops.reference and dualops.cuda
    inputs: tuple[Input, ...]
    params: tuple[Param, ...]
    outputs: tuple[Output, ...]
    binder: Callable[..., Problem]
    backwards: bool = False

    def __post_init__(self) -> None:
        # whatever torch.compile may meet in a first call is made here: it cannot follow a cached_property
        self.count = len(self.inputs)
        self.names = (*(wanted.name for wanted in self.inputs), *(param.name for param in self.params))
        texts = enumerate(self.params, self.count)  # parameters that the schema has as text, and their places
        self.texts = tuple((place, param) for place, param in texts if self.kinds[param.name] == "text")
        # what makes of args and fixed values the parameters for `dualops.cuda`, in the spec's order
        self.fixed_values = tuple(self.fixed.values())
        places = {name: place for place, name in enumerate((*self.names, *self.fixed))}
        accepted = (*self.spec.params, *(self.spec.gradient_params if self.backwards else ()))
        self.kernel_params = _items([places[param.name] for param in accepted])

    @property
    def schema(self) -> str:
        arguments = [f"Tensor{'?' if wanted.optional else ''} {wanted.name}" for wanted in self.inputs]
        arguments += [declaration(param, self.kinds[param.name]) for param in self.params]
        tensors = ", ".join(f"Tensor {output.name}" for output in self.outputs)
        return f"{self.name}({', '.join(arguments)}) -> {'Tensor' if len(self.outputs) == 1 else f'({tensors})'}"

    def encode(self, args: tuple[Any, ...]) -> list[Any]:
        """Arguments for the dispatcher."""
        encoded = list(args)
        for place, param in self.texts:
            encoded[place] = as_text(param, args[place])
        return encoded

    def decode(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments as the dispatcher has them, as the caller gave them."""
        left_out = self.params[len(args) - self.count :]
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
        for wanted, value in zip(self.inputs, args):
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"{self.name}: {wanted.name} is a {type(value).__name__}, expected a torch.Tensor")
        params = list(args[self.count :])
        for place, (param, value) in enumerate(zip(self.params, params)):
            if not fits(self.kinds[param.name], value):
                try:
                    params[place] = param.domain(value)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{self.name}: {param.name} is {value!r}, {error.args[0]}") from None
        return (*args[: self.count], *params)

    def split(self, args: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs that are there, and all parameters, by name."""
        arrays = {name: value for name, value in zip(self.names, args[: self.count]) if value is not None}
        return arrays, {**self.fixed, **dict(zip(self.names[self.count :], args[self.count :], strict=True))}

    def metas(self, arrays: Mapping[str, Any]) -> dict[str, ArrayMeta]:
        """What the spec needs to know. Sizes and strides stay symbolic where a tensor's are; there is no address."""
        for name, array in arrays.items():
            if array.layout is not torch.strided:
                raise TypeError(f"{self.name}: {name} has layout {array.layout}, expected {torch.strided}")
        numbers = {wanted.name for wanted in self.inputs if wanted.host}
        return {
            name: ArrayMeta(
                tuple(array.shape),
                DTYPE_NAMES[array.dtype],
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

    def having(self, args: tuple[Any, ...]) -> list[bool]:
        """Which results a right call has: parameters say so, and which inputs are there, so nothing is bound for it."""
        problem = self.unbound(args)
        return [output.when(problem) for output in self.outputs]

    def unbound(self, args: tuple[Any, ...]) -> Problem:
        """A right call's parameters, and which inputs are there."""
        arrays, params = self.split(args)
        return Problem(self.spec, "", {}, params, arrays)


def _items(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What takes the items in these places, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple([items[place] for place in places])


def _settled(value: Any) -> Any:
    """A parameter that a compiled function leaves open, as it was seen, or 0: its value is checked when it runs."""
    if not isinstance(value, torch.SymInt):
        return value
    return value.node.hint if value.node.has_hint() else 0


def as_numpy(tensor: Tensor) -> np.ndarray:
    """The memory of a CPU tensor as an array."""
    dtype = numpy_dtype(DTYPE_NAMES[tensor.dtype])
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), dtype)
    return np.asarray(_Memory(tensor, dtype)).view(dtype)


class _Memory:
    """A tensor's memory in NumPy's words. With Tensor.numpy() its size would be fixed, and FSDP could not free it."""

    def __init__(self, tensor: Tensor, dtype: np.dtype):
        self.tensor = tensor  # kept as long as the array is
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            # NumPy's own types have a name there; bfloat16 goes by way of its bits
            "typestr": dtype.str if dtype.kind in "biuf" else f"<u{dtype.itemsize}",
            "strides": tuple(stride * dtype.itemsize for stride in tensor.stride()),
            "data": (tensor.data_ptr(), False),
        }
