"""One of several processes that train a small Llama together, each on its share of every batch."""

import os
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from dualops.torch_bridge.optim import Lion
from tests.torch_bridge.llama import MODES, Mode, batches

WORLD, STEPS = 2, 3


def train(name: str, device: str, rank: int = 0, world: int = 1) -> dict[str, torch.Tensor]:
    """Parameters after STEPS steps, and the gradients of the first, of a process that has every world-th sequence."""
    mode = Mode(dtype=torch.float64) if name == "float64" else MODES[name]
    model = mode.model(device)
    run = mode.running(model, device)
    if world > 1:
        run = DistributedDataParallel(model, device_ids=[torch.device(device)] if "cuda" in device else None)
    optimizer, found = Lion(model.parameters(), 2e-3, weight_decay=0.1), {}
    for batch in batches(STEPS, device):
        optimizer.zero_grad()
        with mode.casting(torch.device(device).type):
            run(batch[rank::world], mode.seeds(device)).backward()
        if not found:
            found = {f"d {key}": p.grad.cpu() for key, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return found | {key: p.detach().cpu() for key, p in model.named_parameters()}


def work(rank: int, kind: str, names: tuple[str, ...], folder: str) -> None:
    """What one of WORLD processes does for each mode: kind is "cpu" (gloo) or "cuda" (NCCL), a GPU each."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink's multicast: nothing that is tested here
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    meeting = f"file://{folder}/meeting"
    backend = "nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=meeting, rank=rank, world_size=WORLD)
    try:
        torch.save({name: train(name, device, rank, WORLD) for name in names}, Path(folder) / f"{rank}.pt")
    finally:
        distributed.destroy_process_group()
