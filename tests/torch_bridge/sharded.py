"""What each of several processes does with DTensors, for the tests that start them; and calls to be compared."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from .conftest import values
from .operators import incoming_gradient

Check = Callable[[Any], Any]


Found = dict[str, Any]


def found_by(mesh: tuple[int, ...], checks: dict[str, Check], folder: Path, kind: str = "cpu") -> list[Found]:
    """What each of the processes of a mesh of this shape got from each check, a function of the mesh.

    kind: "cpu" (gloo), or "cuda" (NCCL), with a GPU for each process.
    The checks are functions of a module, or partial ones. The axes of the mesh are "data" and "tensor", or "tensor".
    A check that raises in one of the processes ends all of them, for the others would wait for it.
    """
    spawn(_work, (mesh, checks, str(folder), kind), nprocs=prod(mesh))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(prod(mesh))]


def _work(rank: int, shape: tuple[int, ...], checks: dict[str, Check], folder: str, kind: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink's multicast: nothing that is tested here
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    backend, meeting = "nccl" if kind == "cuda" else "gloo", f"file://{folder}/meeting"
    distributed.init_process_group(backend, init_method=meeting, rank=rank, world_size=prod(shape))
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("data", "tensor")[-len(shape) :])
    found: Found = {}
    for name, check in checks.items():
        try:
            found[name] = check(mesh)
        except Exception as error:
            error.add_note(f"in {name}")
            raise
    torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()


# --- calls ---------------------------------------------------------------------------------------

R, P, S0, S1, S2, S3 = "R", "P(sum)", "S(0)", "S(1)", "S(2)", "S(3)"


@dataclass(frozen=True)
class Case:
    """A call, how its tensors are sharded, and how results and gradients then are.

    Placements have a word for each axis of the mesh: one for "tensor" alone, two in a tuple for "data" and "tensor".
    """

    call: Callable[..., Any]
    tensors: dict[str, tuple[int, ...] | Tensor]  # a shape: of normal numbers, with a gradient
    given: dict[str, Any]  # placements of tensors; all others are whole
    results: tuple[Any, ...]
    gradients: dict[str, Any]  # all others are whole
    params: dict[str, Any] = field(default_factory=dict)

    def plain(self, device: str) -> dict[str, Tensor]:
        return {
            name: x.to(device) if isinstance(x, Tensor) else values(x, torch.float32, device, seed=i).requires_grad_()
            for i, (name, x) in enumerate(self.tensors.items())
        }

    def run(self, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        found = self.call(**tensors, **self.params)
        return found if isinstance(found, tuple) else (found,)

    @property
    def axes(self) -> int:
        return 2 if any(isinstance(each, tuple) for each in (*self.given.values(), *self.results)) else 1


def placements(word: Any) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    words = word if isinstance(word, tuple) else (word,)
    known = {R: Replicate(), P: Partial(), **{f"S({i})": Shard(i) for i in range(4)}}
    return [known[each] for each in words]


def agrees(found: Any, expected: Tensor, word: Any, what: str) -> None:
    """Placements, and values. None: any placements.

    On a CPU bits are equal, unless they come from a sum over processes. A GPU may tile a smaller call in another way.
    """
    assert word is None or list(found.placements) == placements(word), (what, found.placements)
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    whole = found.full_tensor()
    if found.device.type == "cuda" or any(placement.is_partial() for placement in found.placements):
        torch.testing.assert_close(whole, expected, msg=lambda text: f"{what}: {text}")
    else:
        assert torch.equal(whole, expected), (what, whole, expected)


def check_case(case: Case, mesh: Any) -> bool:
    """Compare a call of DTensors, and its gradient, with the same call of plain tensors."""
    from torch.distributed.tensor import distribute_tensor

    if case.axes == 1:
        mesh = mesh["tensor"]

    def placed(x: Tensor, word: Any) -> Any:
        """Whole where it is not said, and what is a sum over processes."""
        word = word or (R,) * case.axes
        words = word if isinstance(word, tuple) else (word,)
        return distribute_tensor(x.detach(), mesh, placements(tuple(R if one == P else one for one in words)))

    plain = case.plain(mesh.device_type)
    sharded = {key: placed(x, case.given.get(key)).requires_grad_(x.requires_grad) for key, x in plain.items()}
    leaves = [key for key in plain if plain[key].requires_grad]
    expected, found = case.run(plain), case.run(sharded)
    for i, (one, other, word) in enumerate(zip(found, expected, case.results, strict=True)):
        agrees(one.detach(), other.detach(), word, f"result {i}")
    used = [i for i, result in enumerate(expected) if result.requires_grad]
    incoming = [incoming_gradient(expected[i]) for i in used]
    theirs = [placed(gradient, case.results[i]) for i, gradient in zip(used, incoming)]
    wanted = torch.autograd.grad([expected[i] for i in used], [plain[key] for key in leaves], incoming)
    got = torch.autograd.grad([found[i] for i in used], [sharded[key] for key in leaves], theirs)
    for key, one, other in zip(leaves, got, wanted, strict=True):
        agrees(one, other, case.gradients.get(key, (R,) * case.axes), f"gradient of {key}")
    return True
