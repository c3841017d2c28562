"""Lion's benchmark: data that calls overwrite, peers that compute what the spec says, steps on many tensors."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import lion as module, workload
from benchmarks.contestant import Contestant
from benchmarks.lion import Lion, LionLists, Model, elements, lion_pytorch
from benchmarks.tree import reference, spec
from benchmarks.work import bind
from benchmarks.workload import Workload, to_torch
from dualops.testing import to_numpy

SPEC = spec.OPERATORS["lion"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few enough bytes for a CPU: inputs of more than 512 elements repeat."""
    monkeypatch.setattr(workload, "ROTATION_BYTES", 20_000)
    monkeypatch.setattr(workload, "GENERATED_ELEMENTS", 512)


def case(dtype: str = "float32", *, master: bool = False) -> spec.Case:
    names = ("params", "grads", "momenta", *(["master"] if master else []))
    shapes: dict[str, tuple[int, ...]] = {**dict.fromkeys(names, (1300,)), "lr": ()}
    own: dict[str, str] = dict.fromkeys(("grads", "momenta"), dtype)
    return spec.Case("toy", dtype, shapes, {"weight_decay": 0.1}, dtypes=own)


def in_place(**given: Any) -> tuple[torch.Tensor, ...]:
    """NumPy on torch's tensors, which are overwritten."""
    arrays: dict[str, Any] = {name: to_numpy(x) for name, x in given.items()}
    written = [given[name] for name in SPEC.updates.values() if name in given]
    for tensor, values in zip(written, reference.lion(**arrays, weight_decay=0.1)):
        tensor.copy_(to_torch(values, "cpu"))
    return tuple(written)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_check_leaves_the_data_as_they_are(dtype: str) -> None:
    work = Workload(SPEC, case(dtype), elements, device="cpu")
    contestant = Contestant("dualops", in_place)
    for _ in range(2):
        found = work.check(contestant, "forward")
        assert found.passed and found.kernel == found.baseline
    call = work.call(contestant, "forward")
    call()
    assert not work.check(contestant, "forward").passed  # what is timed does move on


def test_generated_elements_repeat_and_lr_is_one() -> None:
    work = Workload(SPEC, case(), elements, device="cpu")
    given: list[dict[str, torch.Tensor]] = []
    work.call(Contestant("spy", lambda **tensors: given.append(tensors)), "forward")()
    (tensors,) = given
    assert tensors["params"].shape == (1300,) and tensors["lr"].shape == ()
    assert torch.equal(tensors["grads"][512:1024], tensors["grads"][:512])


@pytest.mark.parametrize("master", [False, True])
def test_torch_computes_what_the_spec_says(master: bool) -> None:
    work = Workload(SPEC, case(master=master), elements, device="cpu")
    assert work.check(Lion.peers["torch eager"](work.problem), "forward").passed


def test_lion_pytorch_has_no_masters() -> None:
    with pytest.raises(NotImplementedError, match="no master weights"):
        lion_pytorch(bind(SPEC, case(master=True)))


def test_the_sample_holds_lr_and_elements_of_all_arrays() -> None:
    problem = bind(SPEC, case())
    shapes = {"params": (5000,), "grads": (5000,), "lr": (), "new_params": (5000,)}
    picked = elements(problem, shapes, np.random.default_rng(0))
    assert picked["lr"] is ... and picked["params"] is picked["new_params"]
    assert {0, 4999} <= {*picked["grads"].tolist()}


def test_steps_on_many_tensors_come_to_the_same() -> None:
    found = []
    for start in (module.dualops_step, module.foreach_step):
        torch.manual_seed(0)
        params = Model(7, 33, "float32", device="cpu").params
        step = start(params)
        for _ in range(3):
            step()
        found.append(torch.stack([param.detach() for param in params]))
    torch.testing.assert_close(*found)
    assert set(module.STEPS) == {"dualops", "lion-pytorch", "torch foreach", "torch.compile"}


def test_without_a_gpu_asv_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotImplementedError, match="benchmarks need a GPU"):
        LionLists().setup(LionLists.params[0][0])
