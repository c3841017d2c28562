"""rope's peers on the CPU: that they compute what the spec says, what they refuse, and where data lies in memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import cases, workload
from benchmarks.contestant import Contestant
from benchmarks.tree import spec
from benchmarks.work import bind
from benchmarks.workload import Workload, in_order

from .test_peers import prepared, referee

OPERATOR, TABLES = spec.OPERATORS["rope"], spec.OPERATORS["rope_tables"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "ROTATION_BYTES", 40_000)


def toy(dtype: str = "float32", *, D: int = 16, tables: tuple[int, ...] = (9, 8), **more: Any) -> spec.Case:
    shapes = {"q": (2, 4, 7, D), "k": (2, 2, 7, D), "cos": tables, "sin": tables}
    return spec.Case("toy", dtype, shapes, more, orders={"q": (0, 2, 1, 3), "k": (0, 2, 1, 3)})


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_formula_computes_what_the_spec_says(interleaved: bool, direction: str) -> None:
    work = prepared("rope", toy(interleaved=interleaved))
    assert work.check(cases.find("rope").peers["torch eager"](work.problem), direction).passed


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_sample_is_held_against_its_own_rows(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.rope.SAMPLED_TOKENS", 3)
    work = prepared("rope", toy())
    assert work.check(referee(OPERATOR, work.case), direction).passed
    _, truth, _ = work.expected(direction)
    (part,) = work.parts(direction)
    assert 3 <= len(part.picked["cos"]) < 7 and {0, 6} <= set(part.picked["cos"].tolist())
    assert all(array.shape[2] == len(part.picked["cos"]) for array in truth.values())


def test_data_lies_as_the_case_says() -> None:
    work, seen = prepared("rope", toy()), []
    work.call(Contestant("spy", lambda **given: seen.append(given), lambda **given: seen.append(given)), "forward")()
    work.call(Contestant("spy", lambda **given: None, lambda **given: seen.append(given)), "backward")()
    forward, backward = seen
    for tensor in (forward["q"], backward["dq_rotated"]):
        assert tensor.shape == (2, 4, 7, 16) and tensor.stride() == (448, 16, 64, 1)
    assert backward["dk_rotated"].stride() == (224, 16, 32, 1) and forward["cos"].is_contiguous()


def test_an_order_of_axes_changes_no_value() -> None:
    x = torch.arange(24).reshape(2, 3, 4)
    assert in_order(x, None) is x
    for order, strides in (((1, 2, 0), (1, 8, 2)), ((2, 0, 1), (3, 1, 6)), ((0, 1, 2), (12, 4, 1))):
        assert torch.equal(in_order(x, order), x) and in_order(x, order).stride() == strides


@pytest.mark.parametrize("peer", ["torch eager", "torch.compile", "Liger"])
@pytest.mark.parametrize(
    "case", [toy(D=20, dim=16), toy(tables=(9, 16)), toy(tables=(2, 7, 8))], ids=["partial", "both halves", "batches"]
)
def test_peers_refuse_what_they_have_otherwise(case: spec.Case, peer: str) -> None:
    with pytest.raises(NotImplementedError, match="only all dimensions, by tables that have a row for each token"):
        cases.find("rope").peers[peer](bind(OPERATOR, case))


def test_liger_refuses_interleaved_pairs() -> None:
    with pytest.raises(NotImplementedError, match="Liger has no interleaved pairs"):
        cases.find("rope").peers["Liger"](bind(OPERATOR, toy(interleaved=True)))


def test_bench_cases_are_none_that_torch_refuses() -> None:
    for case in OPERATOR.tagged(spec.Tag.BENCH):
        assert cases.find("rope").peers["torch eager"](bind(OPERATOR, case)).backward is not None


def test_tables_of_torch_are_what_the_spec_says() -> None:
    params = {"dim": 16, "base": 500000.0, "scaling": ("llama3", 8.0, 1.0, 4.0, 64)}
    case = spec.Case("toy", "float32", {"positions": (33,)}, params, backward=False)
    work = Workload(TABLES, case, cases.find("rope_tables").sample, device="cpu")
    make: Callable[..., Contestant] = cases.find("rope_tables").peers["torch eager"]
    assert work.check(make(bind(TABLES, case, device="cpu")), "forward").passed
    _, truth, baseline = work.expected("forward")
    assert {x.dtype for x in truth.values()} == {np.dtype("float64")}
    assert {x.dtype for x in baseline.values()} == {np.dtype("float32")}
