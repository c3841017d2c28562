"""Tensors for the bridge's tests: on the CPU, and on the GPU where there is one."""

import os
from collections.abc import Callable, Iterator, Sequence
from math import prod

import pytest
import torch

from tests.poison import new_memory_is_nan

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS warns that its bits may change
torch.set_num_threads(1)  # tensors are small: threads would only wait for one another
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def memory_on_the_gpu_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a kernel leaves unwritten, or reads before it is written, shows."""
    on_cpu = getattr(request.node, "callspec", None) and request.node.callspec.params.get("device") == "cpu"
    if on_cpu or not torch.cuda.is_available():
        yield
        return
    with new_memory_is_nan():
        yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # an error of a kernel belongs to the test that launched it


def values(shape: Sequence[int], dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Normal numbers, row-major."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(prod(shape), generator=generator, dtype=torch.float64) * 2
    return numbers.to(dtype).to(device).reshape(tuple(shape))


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, its axes in memory in reverse order."""
    axes = tuple(reversed(range(x.ndim)))
    return x.permute(axes).contiguous().permute(axes)


def stepped(x: torch.Tensor) -> torch.Tensor:
    """The same tensor with gaps of one element in memory."""
    wide = torch.full((*x.shape, 2), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


def offset(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, one element behind an aligned address."""
    flat = torch.full((x.numel() + 1,), float("nan"), dtype=x.dtype, device=x.device)
    flat[1:] = x.reshape(-1)
    return flat[1:].reshape(x.shape)


def broadcast(x: torch.Tensor) -> torch.Tensor:
    """The first entry along the first axis in place of all of them, with stride 0."""
    return x[:1].expand(x.shape)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": transposed,
    "stepped": stepped,
    "offset": offset,
    "broadcast": broadcast,
}
