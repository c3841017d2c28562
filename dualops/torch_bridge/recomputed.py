"""Calls that torch.utils.checkpoint repeats in backward: with the same functions as before, or an error.

Variables that a user's function reads may have changed by then. The gradient would then match neither function: the
saved tensors come from the second call, the incoming gradients from the first. So the first call records its functions
in two places:

  - among its saved tensors, as their digests. The second call saves its own digests in their place. Backward knows the
    functions of the first call and compares. A compiled call has no such tensor, one with reentry saves none;
  - on the checkpointed region. With reentry this is the node of the torch.autograd.Function up the stack, which repeats
    the call in its backward. Without reentry it is the state of the hooks that drop the saved tensors and repeat the
    call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from inspect import unwrap
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor
from torch.utils import checkpoint

from ..spec.attention import UserFunction
from ..spec.attention.frozen import content
from .ways import plain, transformed

_C: Any = torch._C
NOTE = "dualops_functions"  # attribute name on a region
REENTRANT = checkpoint.CheckpointFunction.forward.__code__
Frame: Any = getattr(checkpoint, "_CheckpointFrame", ())  # a region without reentry


def note(user: UserFunction) -> None:
    """Record a function before its use. Raises RuntimeError if a repeated call uses another one than the first call."""
    for region, again in _regions():
        noted = getattr(region, NOTE, None)
        if not again:
            setattr(region, NOTE, {user, *(noted or ())})
        elif noted is not None and user not in noted:
            raise _changed([user], sorted(noted, key=repr))


def _regions() -> Iterator[tuple[Any, bool]]:
    """Yield the checkpointed regions around this call, and whether they are being repeated."""
    if _C._current_graph_task_id() != -1:
        yield _C._current_autograd_node(), True
    for hook in (_C._autograd._top_saved_tensors_default_hooks(True) or ())[:1]:
        for cell in getattr(unwrap(hook), "__closure__", None) or ():
            value = content(cell)
            if isinstance(value, Frame):
                yield value, False
            elif isinstance(value, ReferenceType) and isinstance(value(), Frame):
                yield value(), True
    frame = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None:
        if frame.f_code is REENTRANT:
            yield frame.f_locals["ctx"], False
        frame = frame.f_back


def mark(params: Sequence[Any], like: Any) -> Tensor | None:
    """Return the mark that a call with these parameters saves with its other tensors (`like` is one); None without
    functions.

    A traced or transformed call keeps its functions, and needs no mark.
    """
    digests = _digests(params)
    return None if not digests or plain((like,)) is None or transformed() else _tensor_of(digests)


def check(params: Sequence[Any], found: Tensor | None) -> None:
    """Raise RuntimeError if backward's mark differs from that of its own call."""
    if found is not None and found.tolist() != _words(_digests(params)):
        raise _changed(["others"], [param for param in params if isinstance(param, UserFunction)])


def _digests(params: Sequence[Any]) -> str:
    return "".join([param.digest for param in params if type(param) is UserFunction])


def _words(digests: str) -> list[int]:
    """Split into words of 48 bits."""
    return [int(digests[place : place + 12], 16) for place in range(0, len(digests), 12)]


@lru_cache(maxsize=256)
def _tensor_of(digests: str) -> Tensor:
    return torch.tensor(_words(digests), dtype=torch.int64, device="cpu")


def _changed(found: Sequence[Any], first: Sequence[Any]) -> RuntimeError:
    second, before = (", ".join(map(str, functions)) for functions in (found, first))
    return RuntimeError(
        f"a call had {before}, and {second} when torch.utils.checkpoint made it again: "
        "what score_mod or mask_mod reads has changed since"
    )
