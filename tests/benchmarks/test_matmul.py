"""matmul's benchmark: the sample that is held against the reference, and torch as the peer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import matmul, samples, workload
from benchmarks.tree import spec
from benchmarks.work import bind
from dualops.spec.matmul import shapes_of

from .test_peers import prepared, referee

OPERATOR = spec.OPERATORS["matmul"]
LAYOUTS = ["nn", "nt", "tn", "tt"]


def toy(layout: str, batches: tuple[tuple[int, ...], tuple[int, ...]], **params: object) -> spec.Case:
    shapes, transposes = shapes_of(11, 12, 13, layout=layout, a=batches[0], b=batches[1], bias="activation" in params)
    return spec.Case("toy", "float32", shapes, {**transposes, **params})


CASES = [
    toy("nn", ((), ())),
    toy("tt", ((3,), (3,))),
    toy("nt", ((2,), ()), activation="gelu", return_preactivation=True),
    toy("tn", ((2, 1), (1, 3)), activation="silu", return_preactivation=True),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "ROTATION_BYTES", 10_000)
    monkeypatch.setattr(samples, "SAMPLED_ELEMENTS", 1)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", CASES, ids=["nn", "tt", "nt", "tn"])
def test_the_reference_of_the_sample_is_that_part_of_the_whole(case: spec.Case, direction: str) -> None:
    """And less of a and b than there is."""
    made = prepared("matmul", case)
    picked, truth, _ = made.expected(direction)
    function = getattr(referee(OPERATOR, case), direction)
    whole = function(**made._sets(direction)[0])
    named = dict(zip(truth, whole if isinstance(whole, tuple) else (whole,), strict=True))
    for name, part in truth.items():
        taken = workload.to_numpy(named[name])[picked[name]]
        assert np.abs(taken - part).max() < 1e-5 * max(np.abs(part).max(), 1)
    assert made.arguments(direction)["a"][picked["a"]].size < made.arguments(direction)["a"].size


def test_one_batch_is_taken_where_each_has_its_own() -> None:
    case = toy("nn", ((3,), (3,)))
    shapes = {**case.shapes, "y": (3, 11, 12)}
    found = samples.matrices(bind(OPERATOR, case), shapes, np.random.default_rng(0))
    assert len({str(index[0]) for index in found.values()}) == 1 and found["a"][0].stop - found["a"][0].start == 1
    assert {0, 10} <= set(found["a"][1].tolist()) and found["b"][1:] == (slice(None), slice(None))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_computes_what_the_spec_says(layout: str, direction: str) -> None:
    batches = (((2,), ()), ((2,), (2,)))[layout in ("nn", "tt")]
    for params in ({}, {"activation": ("relu", "gelu", "silu", None)[LAYOUTS.index(layout)]}):
        case = toy(layout, batches, **params)
        made = prepared("matmul", case)
        accuracy = made.check(matmul.eager(made.problem), direction)
        assert accuracy.passed, accuracy.message


def test_torch_is_refused_where_it_would_use_tf32() -> None:
    case, settings = toy("nn", ((), ())), torch.backends.cuda.matmul
    with pytest.raises(NotImplementedError, match="float32 arithmetic"):
        matmul.eager(bind(OPERATOR, replace(case, params={"precision": "tf32"})))
    settings.allow_tf32 = True
    try:
        with pytest.raises(NotImplementedError, match="allow_tf32"):
            matmul.eager(bind(OPERATOR, case))
    finally:
        settings.allow_tf32 = False
