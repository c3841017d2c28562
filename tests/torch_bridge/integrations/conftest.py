"""What the tests of integrations share in addition to the bridge's fixtures."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Tiny models: threads that wait for one another cost more than all the rest, ten times on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Normal numbers, the same ones on each device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
