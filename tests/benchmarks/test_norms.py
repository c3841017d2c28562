"""The norms' peers on the CPU: that they compute what the spec says, and that rows that repeat are held to it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch._decomp import decomposition_table

from benchmarks import cases, workload
from benchmarks.contestant import Contestant
from benchmarks.samples import rows
from benchmarks.tree import spec
from benchmarks.work import Work, bind
from benchmarks.workload import WrongResult

from .test_peers import prepared, referee

VECTORS = {"rms_norm": ("w",), "layer_norm": ("w", "b")}
BOTH = pytest.mark.parametrize("name", VECTORS)
DIRECTIONS = pytest.mark.parametrize("direction", ["forward", "backward"])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of more than 256 elements repeat: of 24 rows, 8. torch has one of the kernels for GPUs alone."""
    monkeypatch.setattr(workload, "ROTATION_BYTES", 20_000)
    monkeypatch.setattr(workload, "GENERATED_ELEMENTS", 256)
    on_gpu = torch.ops.aten._fused_rms_norm_backward
    monkeypatch.setattr(torch.ops.aten, "_fused_rms_norm_backward", decomposition_table[on_gpu.default])


def toy(name: str, *, residual: bool = False, M: int = 24, N: int = 32, **params: Any) -> spec.Case:
    shapes = {"x": (M, N), **dict.fromkeys(VECTORS[name], (N,)), **({"residual": (M, N)} if residual else {})}
    return spec.Case("toy", "float32", shapes, params)


@BOTH
@DIRECTIONS
@pytest.mark.parametrize("residual", [False, True])
def test_torch_computes_what_the_spec_says(residual: bool, direction: str, name: str) -> None:
    work = prepared(name, toy(name, residual=residual, eps=0.1))
    assert work.check(cases.find(name).peers["torch eager"](work.problem), direction).passed


@pytest.mark.parametrize(
    ("name", "shapes", "peer", "reason"),
    [
        ("rms_norm", {"x": (2, 3, 8), "w": (8,)}, "Liger", r"rms_norm of x \(2, 3, 8\): only of two axes"),
        ("rms_norm", {"x": (3, 8)}, "QuACK", "rms_norm without w"),
        ("layer_norm", {"x": (3, 8), "w": (8,)}, "QuACK", "layer_norm without b"),
    ],
)
def test_peers_refuse(name: str, shapes: dict[str, tuple[int, ...]], peer: str, reason: str) -> None:
    problem = bind(spec.OPERATORS[name], spec.Case("toy", "float32", shapes))
    with pytest.raises(NotImplementedError, match=reason):
        cases.find(name).peers[peer](problem)


@BOTH
def test_backward_of_a_residual_is_given_the_gradient_of_the_sum(name: str) -> None:
    operator = spec.OPERATORS[name]
    work = prepared(name, toy(name, residual=True))
    given = work.arguments("backward")
    assert "dsummed" in given
    assert (given["x"] == work.arguments("forward")["x"] + work.arguments("forward")["residual"]).all()
    # x, dy, dsummed and the statistics of each row are read, and w; dx, dw and db are written
    statistics, vectors = len(operator.saved) - 1 - len(VECTORS[name]), len(VECTORS[name])
    assert Work.of(operator, work.case, "backward")[1:] == (
        4 * (3 * 24 * 32 + statistics * 24 + 32),
        4 * (24 * 32 + vectors * 32),
    )


@BOTH
def test_rows_repeat_and_weights_do_not(name: str) -> None:
    work = prepared(name, toy(name, N=24))  # as many columns as rows: names tell weights apart, not sizes
    seen: dict[str, torch.Tensor] = {}
    work.call(Contestant("spy", lambda **given: seen.update(given)), "forward")()
    assert torch.equal(seen["x"][8:16], seen["x"][:8])
    assert not torch.equal(seen["w"][8:16], seen["w"][:8])
    assert workload.generated_batch(work.operator, toy(name, M=21)) == 7  # a whole number of times


@BOTH
def test_sums_over_rows_that_repeat_are_held_to_the_truth(name: str) -> None:
    work = prepared(name, toy(name))
    right = referee(work.operator, work.case)
    assert right.backward is not None
    for direction in ("forward", "backward"):
        assert work.check(right, direction).passed
    names = list(work.expected("backward")[1])

    def spoiled(place: int, where: int | slice) -> Contestant:
        def backward(**arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results = list(right.backward(**arrays))  # type: ignore[misc]
            results[place][where] *= 1.001
            return tuple(results)

        return Contestant("wrong", right.forward, backward)

    for place, where in enumerate((slice(3, None, 8), *range(3, 2 + len(names)))):
        assert not work.check(spoiled(place, where), "backward").passed, names[place]
    with pytest.raises(WrongResult, match="dx differs between row 0 on and row 16 on"):
        work.check(spoiled(0, 20), "backward")


def test_a_gradient_of_weights_takes_all_rows() -> None:
    problem = bind(spec.OPERATORS["rms_norm"], toy("rms_norm"))
    forward = {"x": (5000, 4096), "w": (4096,), "y": (5000, 4096)}
    generator = np.random.default_rng(0)
    picked = rows(problem, forward, generator)
    assert picked["w"] == slice(None)
    assert picked["x"] is picked["y"] and (picked["x"][0], picked["x"][-1]) == (0, 4999)
    assert 512 <= len(picked["x"]) <= 514
    assert set(map(str, rows(problem, {**forward, "dw": (4096,)}, generator).values())) == {str(slice(None))}
