"""What each of several processes does with DTensors, for the tests that start them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

Check = Callable[[Any], Any]


def found_by(world: int, checks: dict[str, Check], folder: Path) -> list[dict[str, Any]]:
    """What each of `world` processes got from each check: a function of a mesh of all of them, on the CPU.

    The checks are functions of a module. Raises AssertionError with the tracebacks of those that failed.
    """
    spawn(_work, (world, checks, str(folder)), nprocs=world)
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
    failed = [f"{name}:\n{one}" for each in found for name, one in each.items() if isinstance(one, Failed)]
    assert not failed, "\n".join(failed)
    return found


class Failed(str):
    """The traceback of a check that raised: the other checks go on."""


def _work(rank: int, world: int, checks: dict[str, Check], folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
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
