"""What each of several processes does with DTensors, for the tests that start them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

Check = Callable[[Any], Any]


class Failed(str):
    """The traceback of a check that raised: the other checks go on."""


class Found(dict[str, Any]):
    """What the checks of a process gave, by name. AssertionError for one that failed."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        assert not isinstance(found, Failed), found
        return found


def found_by(mesh: tuple[int, ...], checks: dict[str, Check], folder: Path) -> list[Found]:
    """What each of the processes of a mesh of this shape got from each check: a function of the mesh, on the CPU.

    The checks are functions of a module, or partial ones. The axes of the mesh are "data" and "tensor", or "tensor".
    """
    spawn(_work, (mesh, checks, str(folder)), nprocs=prod(mesh))
    return [Found(torch.load(folder / f"{rank}.pt", weights_only=False)) for rank in range(prod(mesh))]


def _work(rank: int, shape: tuple[int, ...], checks: dict[str, Check], folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=prod(shape))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[-len(shape) :])
    found: dict[str, Any] = {}
    try:
        for name, check in checks.items():
            try:
                found[name] = check(mesh)
            except Exception:
                found[name] = Failed(traceback.format_exc())
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        distributed.destroy_process_group()
