"""Cases, generators and costs of every operator."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dualops.reference import flash_attention as reference_attention
from dualops.spec import OPERATORS, ArrayMeta, Problem, Spec, Tag, flash_attention, softmax
from dualops.spec.base import FLOATS, compute_dtype, contiguous_strides, itemsize, numpy_dtype
from tests.problems import elements, values

EVERY = [(spec, case) for spec in OPERATORS.values() for case in spec.cases]
CASES = [pytest.param(spec, case, id=f"{spec.name}-{case.id}") for spec, case in EVERY]
SMALL = [pytest.param(spec, case, id=f"{spec.name}-{case.id}") for spec, case in EVERY if elements(case) <= 1 << 20]


def problem_of(spec: Spec, dtype: str, shapes: Mapping[str, tuple[int, ...]], params: Mapping | None = None) -> Problem:
    metas = {name: ArrayMeta(shape, dtype, contiguous_strides(shape), "cpu", 0) for name, shape in shapes.items()}
    return spec.bind(metas, params or {})


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_every_case_binds_and_its_costs_are_counts(spec, case):
    problem = problem_of(spec, case.dtype, case.shapes, case.params)
    for cost in (spec.forward_cost, spec.backward_cost):
        if cost is None:
            continue
        for count in (cost.flops, cost.bytes_read, cost.bytes_written, cost.extra_memory):
            assert isinstance(count(problem), int)
            assert count(problem) >= 0
    written = sum(meta.size * itemsize(meta.dtype) for meta in problem.outputs().values())
    assert spec.forward_cost.bytes_written(problem) == written


@pytest.mark.parametrize("op", OPERATORS)
def test_the_set_of_cases(op):
    spec = OPERATORS[op]
    ids = [case.id for case in spec.cases]
    assert len(ids) == len(set(ids))
    assert spec.name == op
    for tag in Tag:
        assert spec.tagged(tag), f"{op} has no case tagged {tag}"
    for tag in (Tag.TEST, Tag.COMPILE, Tag.SIM):
        assert {case.dtype for case in spec.tagged(tag)} == set(FLOATS)
    assert len(spec.tagged(Tag.COMPILE)) <= 60
    assert any(0 in shape for case in spec.tagged(Tag.EDGE) for shape in case.shapes.values())
    for case in spec.cases:
        assert case.tags
        assert list(case.shapes) == [entry.name for entry in spec.inputs]
        assert not case.backward or spec.gradients


def test_softmax_tests_rows_from_1_to_1048576_and_every_place_of_the_axis():
    lengths = {case.shapes["x"][case.params.get("axis", -1)] for case in softmax.tagged(Tag.TEST)}
    assert {0, 1, 1048576} <= lengths
    assert {case.params.get("axis", -1) for case in softmax.tagged(Tag.TEST)} >= {-1, 0, 1, -3}


@pytest.mark.parametrize(("spec", "case"), SMALL)
def test_values_have_the_cases_shapes_and_dtypes_and_repeat(spec, case):
    arrays = values(spec, case)
    again = values(spec, case)
    assert {name: array.shape for name, array in arrays.items()} == dict(case.shapes)
    for name, array in arrays.items():
        assert array.dtype == numpy_dtype(case.dtype)
        assert array.tobytes() == again[name].tobytes()
        assert array.size < 2 or len(set(array.reshape(-1)[:50].tolist())) > 1


def test_softmax_costs_by_hand():
    # 6 elements of 4 bytes; subtract, exp, add, compare, divide | multiply, add, subtract, multiply
    problem = problem_of(softmax, "float32", {"x": (2, 3)})
    forward, backward = softmax.forward_cost, softmax.backward_cost
    assert backward is not None
    assert (forward.flops(problem), forward.bytes_read(problem), forward.bytes_written(problem)) == (30, 24, 24)
    assert (backward.flops(problem), backward.bytes_read(problem), backward.bytes_written(problem)) == (24, 48, 24)
    assert forward.extra_memory(problem) == backward.extra_memory(problem) == 0
    assert forward.bytes_read(problem_of(softmax, "bfloat16", {"x": (2, 3)})) == 12


ATTENTION = {"q": (1, 2, 2, 4), "k": (1, 1, 3, 4), "v": (1, 1, 3, 5)}


@pytest.mark.parametrize(
    ("params", "pairs", "written"),
    [
        ({}, 6, 40),  # 1 * 2 * 2 rows of 5 halves
        ({"return_lse": True}, 6, 40 + 16),  # and 4 float32
        ({"causal": True}, 5, 40),  # query 0 sees keys 0, 1; query 1 all three
        ({"causal": "top_left"}, 3, 40),  # query 0 sees key 0; query 1 keys 0, 1
    ],
)
def test_attention_costs_by_hand(params, pairs, written):
    problem = problem_of(flash_attention, "float16", ATTENTION, params)
    cost = flash_attention.forward_cost
    assert cost.flops(problem) == 2 * pairs * 2 * (4 + 5)  # 2 heads, a multiplication and an addition
    assert cost.bytes_read(problem) == 2 * (16 + 12 + 15)
    assert cost.bytes_written(problem) == written
    assert cost.extra_memory(problem) == 0


def test_attention_results_are_what_the_spec_says():
    for case in flash_attention.tagged(Tag.SIM):
        arrays = values(flash_attention, case)
        params = {**case.params, "return_lse": True}
        o, lse = reference_attention(**arrays, **params)
        promised = problem_of(flash_attention, case.dtype, case.shapes, params).outputs()
        assert (o.shape, o.dtype) == (promised["o"].shape, numpy_dtype(case.dtype))
        assert (lse.shape, lse.dtype.name) == (promised["lse"].shape, compute_dtype(case.dtype))
