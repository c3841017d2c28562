"""torch's own context_parallel over dualops, by `activate_flash_attention_impl`. Needs two GPUs."""

import pytest
import torch

from ..sharded import Found, found_by
from .models import close
from .ring import NAMES, alone, on_dualops, ring

pytestmark = [pytest.mark.cuda(2), pytest.mark.xdist_group("ring")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return found_by((2,), {"torch's": ring, "dualops": on_dualops}, tmp_path_factory.mktemp("ring"), "cuda")


@pytest.mark.parametrize("name", NAMES)
def test_the_ring_is_as_exact_as_over_torchs_kernels(name: str, found: list[Found]) -> None:
    exact = alone(torch.float32)[name]
    for each in found:
        close(each["dualops"][name], each["torch's"][name], exact, name)


def test_its_kernels_are_dualops(found: list[Found]) -> None:
    for each in found:
        names = each["dualops"]["kernels"]
        assert names and all("dualops" in name for name in names), names
