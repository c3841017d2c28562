"""Two processes with half of each batch come to what one process with all of it comes to."""

import numpy as np
import pytest
import torch
from torch.multiprocessing.spawn import spawn

from dualops.spec import compare
from tests.torch_bridge.ddp import WORLD, train, work

Found = dict[str, torch.Tensor]
NAMES = ("float64", "plain", "autocast")
FLOOR = 16.0  # eps of float32: twice the floor of the operators, of which a dozen follow one another

pytestmark = pytest.mark.xdist_group("ddp")  # the processes start once


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda(WORLD))])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def together(kind: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    """What each of the processes found, for each of NAMES."""
    folder = tmp_path_factory.mktemp(kind)
    spawn(work, (kind, NAMES, str(folder)), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def of_gradients(found: Found) -> Found:
    return {name: x for name, x in found.items() if name.startswith("d ")}


def joined(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> np.ndarray:
    """All gradients as one array, each in units of its truth's largest."""
    assert found.keys() == truth.keys()
    parts = [(found[name].double().cpu() / truth[name].abs().max()).reshape(-1) for name in truth]
    return torch.cat(parts).numpy()


def test_two_processes_train_as_one(kind: str, together: list[dict[str, Found]]) -> None:
    """In float64 the order of a sum is all that is left between them, which turns no sign of a momentum."""
    first, second = (found["float64"] for found in together)
    assert all(torch.equal(first[name], second[name]) for name in first)
    alone = train("float64", kind)
    for name, expected in alone.items():
        torch.testing.assert_close(first[name], expected, rtol=1e-10, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("name", NAMES[1:])
def test_gradients_are_as_near_to_float64_as_those_of_one_process(
    name: str, kind: str, together: list[dict[str, Found]]
) -> None:
    first, second = (found[name] for found in together)
    assert all(torch.equal(first[key], second[key]) for key in first)
    truth = of_gradients(train("float64", "cpu"))
    arrays = [joined(of_gradients(found), truth) for found in (first, truth, train(name, kind))]
    result = compare(arrays[0], arrays[1], arrays[2], dtype="float32", floor=FLOOR, name="all gradients")
    assert result.passed, result.message
