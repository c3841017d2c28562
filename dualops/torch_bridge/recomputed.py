"""Calls that torch.utils.checkpoint makes again in backward: with the same functions as before, or an error.

What a user's function reads from outside may have changed by then. A gradient would be that of neither function: what
is saved comes from the second call, the incoming gradients from what the first one gave. So the first call leaves word
of its functions, in two places:

  - among the tensors that it saves, as their digests. The second call saves its own in their place, and backward, which
    knows the functions of the first, reads those. A compiled call has no such tensor, one with reentry saves none;
  - on the checkpointed region: the node of the torch.autograd.Function up the stack, which makes the second call in its
    backward; without reentry what the hooks know by which it saves nothing and makes the call again.
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
NOTE = "dualops_functions"  # an attribute of a region
REENTRANT = checkpoint.CheckpointFunction.forward.__code__
Frame: Any = getattr(checkpoint, "_CheckpointFrame", ())  # a region without reentry


def note(user: UserFunction) -> None:
    """To be called wherever a function is about to be used. RuntimeError where the first call did not use it."""
    for region, again in _regions():
        noted = getattr(region, NOTE, None)
        if not again:
            setattr(region, NOTE, {user, *(noted or ())})
        elif noted is not None and user not in noted:
            raise _changed([user], sorted(noted, key=repr))


def _regions() -> Iterator[tuple[Any, bool]]:
    """The checkpointed regions that this is in, and whether their calls are being made again."""
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
    """What a call with these parameters saves beside its other tensors, of which `like` is one; None without functions.

    What is traced or transformed has its functions for good, and needs none.
    """
    digests = _digests(params)
    return None if not digests or plain((like,)) is None or transformed() else _tensor_of(digests)


def check(params: Sequence[Any], found: Tensor | None) -> None:
    """RuntimeError where the mark that backward gets is not that of the call which it belongs to."""
    if found is not None and found.tolist() != _words(_digests(params)):
        raise _changed(["others"], [param for param in params if isinstance(param, UserFunction)])


def _digests(params: Sequence[Any]) -> str:
    return "".join([param.digest for param in params if type(param) is UserFunction])


def _words(digests: str) -> list[int]:
    """In words of 48 bits."""
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
