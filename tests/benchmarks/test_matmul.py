"""matmul's benchmark: the sample that is compared with the reference, and torch as the peer."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import matmul, samples, workload
from benchmarks.contestant import Contestant
from benchmarks.tree import spec
from benchmarks.work import bind
from dualops import testing
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
    monkeypatch.setattr(samples, "SAMPLED_INDICES", 5)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", CASES, ids=["nn", "tt", "nt", "tn"])
def test_the_reference_of_the_sample_is_that_part_of_the_whole(case: spec.Case, direction: str) -> None:
    made = prepared("matmul", case)
    picked, truth, baseline = made.expected(direction)
    function = getattr(referee(OPERATOR, case), direction)
    whole = function(**made._sets(direction)[0])
    named = dict(zip(made._results(direction), whole if isinstance(whole, tuple) else (whole,), strict=True))
    assert truth.keys() == baseline.keys() == picked.keys() == named.keys()
    for name, part in truth.items():
        taken = testing.to_numpy(named[name])[picked[name]]
        assert np.abs(taken - part).max() < 1e-5 * max(np.abs(part).max(), 1)
        assert part.size < named[name].numel()
    for part in made.parts(direction):
        for name in ("a", "b"):
            array = made.arguments(direction)[name]
            assert array[part.picked[name]].size < array.size


# of "nt", a [M, K] and b [N, K]: the sizes of the axes that some of are taken, forward, for da and for db
SOME = {"forward": [((11, None), (12, None))], "backward": [((11, 13), (None, 13)), ((None, 13), (12, 13))]}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rows_and_columns_hold_the_first_and_the_last_and_all_terms(direction: str) -> None:
    made = prepared("matmul", toy("nt", ((3,), (3,))))
    for part, sizes in zip(made.parts(direction), SOME[direction], strict=True):
        batches = {index[0].start for index in part.picked.values()}
        assert len(batches) == 1  # every array has its own
        for name, of_axes in zip("ab", sizes):
            for taken, size in zip(part.picked[name][1:], of_axes, strict=True):
                if size is None:
                    assert taken == slice(None)
                else:
                    assert taken.size < 8 and {0, size - 1} <= set(taken.reshape(-1).tolist())


def test_a_wrong_tile_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 64 x 64, at the size that is sampled in benchmarks."""
    monkeypatch.setattr(samples, "SAMPLED_INDICES", 512)
    shapes, _ = shapes_of(1500, 2500, 8)
    made = workload.Workload(OPERATOR, spec.Case("toy", "float32", shapes), samples.matrices, device="cpu")
    rng = np.random.default_rng(0)
    for m0, n0 in zip(rng.integers(0, 1500 - 64, 20), rng.integers(0, 2500 - 64, 20)):

        def wrong(a: torch.Tensor, b: torch.Tensor, m0: int = m0, n0: int = n0) -> torch.Tensor:
            y = a @ b
            y[m0 : m0 + 64, n0 : n0 + 64] = 0
            return y

        assert not made.check(Contestant("wrong", wrong), "forward").passed
    assert made.check(Contestant("right", lambda a, b: a @ b), "forward").passed


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_computes_what_the_spec_says(layout: str, direction: str) -> None:
    batches = (((2,), ()), ((2,), (2,)))[layout in ("nn", "tt")]
    for params in ({}, {"activation": ("relu", "gelu", "silu", None)[LAYOUTS.index(layout)]}):
        case = toy(layout, batches, **params)
        made = prepared("matmul", case)
        accuracy = made.check(matmul.eager(made.problem), direction)
        assert accuracy.passed, accuracy.message


@pytest.mark.parametrize("precision", [None, "tf32", "3xtf32"])
@pytest.mark.parametrize("peer", ["eager", "compiled"])
def test_torch_uses_tf32_where_that_is_asked_for(peer: str, precision: str | None, monkeypatch: Any) -> None:
    settings, seen = torch.backends.cuda.matmul, []
    forward = matmul._forward

    def watched(problem: spec.Problem) -> Any:
        made = forward(problem)

        def call(**arrays: Any) -> Any:
            seen.append(settings.allow_tf32)
            return made(**arrays)

        return call

    monkeypatch.setattr(matmul, "_forward", watched)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    made = prepared("matmul", toy("nn", ((), ()), precision=precision))
    contestant = getattr(matmul, peer)(made.problem)
    for direction in ("forward", "backward"):
        accuracy = made.check(contestant, direction)
        assert accuracy.passed or precision == "tf32", accuracy.message
    assert set(seen) == {precision == "tf32"} and not settings.allow_tf32


def test_torch_is_refused_where_it_would_use_tf32() -> None:
    case, settings = toy("nn", ((), ())), torch.backends.cuda.matmul
    settings.allow_tf32 = True
    try:
        with pytest.raises(NotImplementedError, match="allow_tf32"):
            matmul.eager(bind(OPERATOR, case))
    finally:
        settings.allow_tf32 = False
