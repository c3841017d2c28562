"""How an operation joins its rungs: what is theirs to say, and what is done once for all of them. No GPU is needed."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

import dualops.cuda  # noqa: F401  registers the operations
from dualops.cuda.launch import operation as launch
from dualops.cuda.launch.device import known
from dualops.cuda.launch.operation import OPERATIONS, Choice, Operation
from dualops.spec import ArrayMeta, softmax as SPEC
from dualops.spec.meta import contiguous_strides

DEVICE = replace(known("sm_80"), shared_memory_per_block=1000)


def meta(*shape: int, dtype: str = "float32") -> ArrayMeta:
    return ArrayMeta(shape, dtype, contiguous_strides(shape), "cuda:0", 0)


def choices(op: str, metas: Mapping[str, ArrayMeta], *, backward: bool = False, **params: Any) -> list[Choice]:
    operation = OPERATIONS[op][backward]
    problem = (operation.spec.bind_backward if backward else operation.spec.bind)(dict(metas), params)
    return list(operation.choices(problem, problem.outputs(operation.outputs), known("sm_90a")))


@pytest.fixture
def operation(monkeypatch: pytest.MonkeyPatch) -> Operation:
    """Of two rungs in three functions, one of which wants too much shared memory at first."""

    def quick(problem: Any, results: Any, device: Any) -> Iterator[Choice]:
        for need in (1001, 1000):
            yield Choice("sm90", need, "quick", list, shared_bytes=need)

    def plain(problem: Any, results: Any, device: Any) -> Iterator[Choice]:
        yield Choice("simt", None, "plain", list)

    def last(problem: Any, results: Any, device: Any) -> Iterator[Choice]:
        yield Choice("sm90", None, "what is left", list)

    monkeypatch.setattr(launch, "OPERATIONS", {})
    return Operation(SPEC, rungs=(quick, plain, last))


def chosen(operation: Operation, x: ArrayMeta, rung: str | None) -> Choice:
    problem = operation.spec.bind({"x": x}, {"axis": -1})
    return operation.choose(problem, problem.outputs(operation.outputs), DEVICE, rung)


def test_the_first_that_fits_is_taken_or_the_first_of_the_rung_asked_for(operation):
    problem = SPEC.bind({"x": meta(4, 8)}, {"axis": -1})
    found = list(operation.choices(problem, problem.outputs(operation.outputs), DEVICE))
    assert [(choice.reason, choice.config) for choice in found] == [
        ("quick", 1000),
        ("plain", None),
        ("what is left", None),
    ]
    assert chosen(operation, meta(4, 8), None) == found[0] == chosen(operation, meta(4, 8), "sm90")
    assert chosen(operation, meta(4, 8), "simt") == found[1]
    with pytest.raises(NotImplementedError, match="softmax: rung naive does not do"):
        chosen(operation, meta(4, 8), "naive")


def test_every_rung_makes_an_empty_result_without_being_asked(operation):
    for rung in (None, *SPEC.rungs):
        choice = chosen(operation, meta(0, 8), rung)
        assert (choice.rung, choice.reason, list(choice.steps())) == (rung or SPEC.rungs[-1], "nothing to do", [])


def test_the_sums_of_no_rows_are_all_that_a_norm_without_rows_launches():
    given = {"x": meta(0, 64), "mean": meta(0), "rstd": meta(0), "dy": meta(0, 64), "w": meta(64), "b": meta(64)}
    found = choices("layer_norm", given, backward=True, eps=1e-5)
    assert {choice.rung for choice in found} == {"naive", "simt", "sm90"}
    for choice in found:
        kernel = "norm_naive_sums" if choice.rung == "naive" else "norm_sums"
        assert [step.kernel.name for step in choice.steps()] == [kernel], choice


def test_no_dimension_is_rotated_in_place_by_no_launch():
    heads, table = meta(1, 2, 3, 8), meta(3, 0)
    found = choices("rope", {"q": heads, "k": heads, "cos": table, "sin": table}, dim=0, inplace=True)
    assert [(choice.rung, list(choice.steps())) for choice in found] == [("simt", []), ("naive", [])]
