"""DTensors: tensors that several processes share, `torch.distributed.tensor`.

`lion` steps the shards of this process where they lie (`local_shards`).

A DTensor exists only where torch.distributed.tensor was imported. Nothing here imports it before, so that the bridge
works with a torch that was built without it, and plain tensors cost nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version


def local_shards(op: str, lists: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    """Lists of parameters and what belongs to them, with the shard of this process in place of each DTensor.

    Shards are the DTensors' own memory, and all but gradients count as modified for autograd. A gradient that has other
    placements than its parameter gets the parameter's, by communication. Raises TypeError where one of the tensors of a parameter is a DTensor and another is
    not; ValueError where momentum or master have other placements, and for a Partial parameter, whose values are a sum
    that no process has.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return {name: list(each) for name, each in lists.items()}
    DTensor = module.DTensor
    for i, first in enumerate(lists["params"]):
        if isinstance(first, DTensor) and any(placement.is_partial() for placement in first.placements):
            raise ValueError(f"{op}: params[{i}] has placements {_told(first)}, expected Shard or Replicate")

    def local(name: str, i: int, tensor: Tensor) -> Tensor:
        first: Any = lists["params"][i]
        if isinstance(tensor, DTensor) != isinstance(first, DTensor):
            kinds = [type(each).__name__ for each in (tensor, first)]
            raise TypeError(f"{op}: {name}[{i}] is a {kinds[0]}, params[{i}] is a {kinds[1]}, expected the same")
        if not isinstance(tensor, DTensor):
            return tensor
        if tensor.device_mesh != first.device_mesh:
            raise ValueError(
                f"{op}: {name}[{i}] is on {tensor.device_mesh}, params[{i}] is on {first.device_mesh}, "
                "expected the same"
            )
        if tensor.shape != first.shape:
            raise ValueError(
                f"{op}: {name}[{i}] has shape {tuple(tensor.shape)}, params[{i}] has shape {tuple(first.shape)}, "
                "expected the same"
            )
        if tensor.placements != first.placements:
            if name != "grads":
                raise ValueError(
                    f"{op}: {name}[{i}] has placements {_told(tensor)}, params[{i}] has {_told(first)}, "
                    "expected the same"
                )
            tensor = tensor.redistribute(placements=first.placements)
        if name != "grads" and not tensor.is_inference():
            increment_version(tensor)
        shard = tensor.to_local()
        wait = getattr(shard, "wait", None)  # a gradient may still be on its way
        return shard if wait is None else wait()

    return {name: [local(name, i, tensor) for i, tensor in enumerate(each)] for name, each in lists.items()}


def _told(tensor: Any) -> str:
    return ", ".join(map(str, tensor.placements))
