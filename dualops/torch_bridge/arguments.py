"""The arguments of an operator's direction: from the caller, in torch's dispatcher, and bound to the spec.

`args` are always the caller's inputs followed by the parameters, in order. The dispatcher has some of the parameters as
text, and omits trailing defaults (`encode`, `decode`).
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
from ..spec.domains import shown
from ..spec.meta import ArrayMeta, numpy_dtype
from .schema import as_text, declaration, fits, from_text

DTYPE_NAMES = {value: str(value).removeprefix("torch.") for value in vars(torch).values() if type(value) is torch.dtype}


def longest_or_all(said: Any, tokens: Any) -> Any:
    """Return the length of the longest sequence from the caller; for None the number of tokens of a tensor."""
    return tokens.shape[0] if said is None and isinstance(tokens, Tensor) and tokens.ndim else said


@dataclass(eq=False, kw_only=True)
class Arguments:
    """Arguments of a direction, derived from the spec."""

    spec: Spec
    kinds: Mapping[str, str]  # parameter -> type in the schema
    fixed: Mapping[str, Any]  # parameters that are not among `params`, with their values
    name: str  # in torch.ops, dualops.reference and dualops.cuda
    inputs: tuple[Input, ...]
    params: tuple[Param, ...]
    outputs: tuple[Output, ...]
    binder: Callable[..., Problem]
    backwards: bool = False

    def __post_init__(self) -> None:
        # made here since torch.compile, which may trace a first call, can't follow a cached_property
        self.count = len(self.inputs)
        self.names = (*(wanted.name for wanted in self.inputs), *(param.name for param in self.params))
        texts = enumerate(self.params, self.count)  # parameters that the schema has as text, with their places
        self.texts = tuple((place, param) for place, param in texts if self.kinds[param.name] == "text")
        # turns args and fixed values into the parameters for `dualops.cuda`, in the spec's order
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
        """Convert arguments for the dispatcher."""
        encoded = list(args)
        for place, param in self.texts:
            encoded[place] = as_text(param, args[place])
        return encoded

    def decode(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Convert the dispatcher's arguments back to the caller's."""
        left_out = self.params[len(args) - self.count :]
        decoded = [*args, *(param.default for param in left_out)]
        for place, _ in self.texts:
            if place < len(args):
                decoded[place] = from_text(args[place])
        return tuple(decoded)

    def decoded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method for a call by the dispatcher."""
        return lambda *args, **more: method(*self.decode(args), **more)

    def checked(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return arguments of the schema's types. Raises the spec's error where torch would raise its own, or take True
        for 1.
        """
        for wanted, value in zip(self.inputs, args):
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"{self.name}: {wanted.name} is a {type(value).__name__}, expected a torch.Tensor")
        params = list(args[self.count :])
        for place, (param, value) in enumerate(zip(self.params, params)):
            if not fits(self.kinds[param.name], value):
                try:
                    params[place] = param.domain(value)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{self.name}: {param.name} is {shown(value)}, {error.args[0]}") from None
        return (*args[: self.count], *params)

    def split(self, args: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split into the given inputs and all parameters, by name."""
        arrays = {name: value for name, value in zip(self.names, args[: self.count]) if value is not None}
        return arrays, {**self.fixed, **dict(zip(self.names[self.count :], args[self.count :], strict=True))}

    def metas(self, arrays: Mapping[str, Any]) -> dict[str, ArrayMeta]:
        """Return the metadata for the spec. Symbolic sizes and strides stay symbolic; there is no address."""
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
        """Return the spec's error for a wrong call, else None. Under autocast dtypes may be mixed."""
        try:
            if torch._C._is_any_autocast_enabled():
                self.metas(self.split(args)[0])
            else:
                self.bind(args)
        except (TypeError, ValueError, NotImplementedError) as error:
            return error
        return None

    def having(self, args: tuple[Any, ...]) -> list[bool]:
        """Return which results a valid call has, from the parameters and the given inputs, without binding."""
        problem = self.unbound(args)
        return [output.when(problem) for output in self.outputs]

    def unbound(self, args: tuple[Any, ...]) -> Problem:
        """Return a valid call's parameters, and which inputs are given."""
        arrays, params = self.split(args)
        return Problem(self.spec, "", {}, params, arrays)


def _items(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that takes the items in these places, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple([items[place] for place in places])


def _settled(value: Any) -> Any:
    """Return the value with which torch.compile traced a symbolic parameter, or 0; the real value is checked at run
    time.
    """
    if not isinstance(value, torch.SymInt):
        return value
    return value.node.hint if value.node.has_hint() else 0


def with_dense_rows(x: Tensor) -> Tensor:
    """Return the tensor, or a copy if its last axis is not contiguous, which row operators require."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def as_numpy(tensor: Tensor) -> np.ndarray:
    """Return the memory of a CPU tensor as a writable array; bfloat16 through its bits.

    It uses DLPack: `Tensor.numpy` would keep the tensor's storage from ever being resized, which FSDP does. Raises
    TypeError for a tensor whose memory does not hold its values.
    """
    if tensor.is_neg():
        raise TypeError("expected a tensor that is not lazily negated: resolve_neg() it")
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return np.from_dlpack(tensor.view(torch.uint16)).view(numpy_dtype("bfloat16"))
    return np.from_dlpack(tensor)
