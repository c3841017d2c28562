"""The processes of a group: collectives between them, and a stream for these."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, distributed

_SIDES: dict[int, torch.cuda.Stream] = {}


@dataclass(frozen=True)
class Ranks:
    """A group, and the rank of this process."""

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, op: str, group: Any) -> Ranks:
        """Wrap a ProcessGroup or a DeviceMesh of one axis.

        Raises TypeError for anything else, ValueError for more axes and for a group without this process.
        """
        outside: Any = distributed.GroupMember.NON_GROUP_MEMBER
        if outside is not None and group is outside:
            raise ValueError(f"{op}: this process is no member of group, expected a group that it is in")
        if isinstance(group, distributed.ProcessGroup):
            rank = distributed.get_rank(group)
            return cls(group, rank, distributed.get_world_size(group))
        if hasattr(group, "get_group") and hasattr(group, "mesh_dim_names"):
            if group.ndim != 1:
                raise ValueError(f"{op}: group is a DeviceMesh of {group.ndim} axes, expected one: mesh['name']")
            return cls.of(op, group.get_group())
        raise TypeError(
            f"{op}: group is a {type(group).__name__}, expected a torch.distributed.ProcessGroup or a DeviceMesh"
        )

    @cached_property
    def device(self) -> torch.device:
        """The device of the exchanged tensors: the current GPU, unless this group has only gloo for GPUs."""
        backends = dict(pair.split(":") for pair in distributed.get_backend_config(self.group).split(","))
        if backends.get("cuda", "gloo") != "gloo":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def check_device(self, op: str, name: str, x: Tensor) -> None:
        """Raise ValueError for a tensor on another device."""
        if x.device != self.device:
            current = ", the current one of this process" if self.device.type == "cuda" else ""
            raise ValueError(f"{op}: {name} is on {x.device}, and group exchanges tensors on {self.device}{current}")

    def all_gather(self, out: Tensor, x: Tensor) -> Any:
        """Gather each rank's x, in rank order. Returns the work, to be waited for."""
        # the name since torch 2.13; before, all_gather_into_tensor
        gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        return gather(out, x, group=self.group, async_op=True)

    def all_to_all(self, out: Tensor, x: Tensor, of_out: list[int], of_x: list[int]) -> Any:
        """Send rows of x to each rank in rank order, and receive theirs. Returns the work."""
        return distributed.all_to_all_single(out, x, of_out, of_x, group=self.group, async_op=True)

    def aside(self) -> AbstractContextManager[Any]:
        """Queue the work inside on the second stream, if the device has streams."""
        return nullcontext() if self.device.type == "cpu" else torch.cuda.stream(self._side)

    def aside_waits(self) -> None:
        """Let the second stream wait for all work queued on the current one."""
        if self.device.type != "cpu":
            self._side.wait_stream(torch.cuda.current_stream(self.device))

    def wait_for_aside(self) -> None:
        """Let the current stream wait for all work queued on the second one."""
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).wait_stream(self._side)

    @property
    def _side(self) -> torch.cuda.Stream:
        """Return the second stream. Its priority is high: its copies are short, and other work waits for them."""
        index = self.device.index
        if index not in _SIDES:
            _SIDES[index] = torch.cuda.Stream(self.device, priority=-1)
        return _SIDES[index]
