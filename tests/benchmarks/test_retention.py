"""Retention's benchmark: the sample that is compared with the reference, and the calls of flash-linear-attention."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import cases, retention, workload
from benchmarks.contestant import Contestant
from benchmarks.retention import one_batch
from benchmarks.tree import spec
from benchmarks.work import bind
from dualops.spec.retention_cases import TOKENS_FIRST, options_of

from .test_peers import prepared, referee

PLAIN, VARLEN = spec.OPERATORS["retention"], spec.OPERATORS["retention_varlen"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "ROTATION_BYTES", 40_000)


def toy(**options: Any) -> spec.Case:
    shapes, params = options_of((2, 3, 9, 4), 5, **options)
    return spec.Case("toy", "float32", shapes, params)


def packed(**params: Any) -> spec.Case:
    shapes = {"q": (19, 2, 4), "k": (19, 2, 4), "v": (19, 2, 5), "cu_seqlens": (4,)}
    return spec.Case("toy", "float32", shapes, {"max_seqlen": 12, **params})


def test_a_batch_comes_with_all_of_its_heads() -> None:
    case = toy(gamma=1, states=1, normalize="signed", return_state=True)
    results = {"o": (2, 3, 9, 5), "state": (2, 3, 4, 5), "state_norm": (2, 3, 4), "dq": (2, 3, 9, 4)}
    found = one_batch(bind(PLAIN, case), {**case.shapes, **results}, np.random.default_rng(1))
    assert isinstance(found, dict) and found.keys() >= results.keys()
    batch, whole = found["q"][0], slice(None)
    assert batch.stop - batch.start == 1
    for name, index in found.items():
        assert index == ((whole,) if name == "gamma" else (batch, *(whole,) * (len(index) - 1))), name
    of_sequences = one_batch(bind(VARLEN, packed()), packed().shapes, np.random.default_rng(1))
    assert of_sequences == {name: (whole,) * len(shape) for name, shape in packed().shapes.items()}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("operator", "case"), [(PLAIN, toy()), (VARLEN, packed())], ids=["plain", "varlen"])
def test_the_reference_of_the_sample_is_that_part_of_the_whole(
    operator: spec.Spec, case: spec.Case, direction: str
) -> None:
    assert prepared(operator.name, case, one_batch).check(referee(operator, case), direction).passed


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_two_heads_of_a_long_sequence_stand_for_all(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    monkeypatch.setattr(retention, "LONG", 9)
    shapes, params = options_of((2, 5, 9, 4), 5)
    case = spec.Case("toy", "float32", shapes, params)
    work, right = prepared("retention", case, one_batch), referee(PLAIN, case)
    assert work.check(right, direction).passed
    picked, truths, _ = work.expected(direction)
    assert {name: x.shape[:2] for name, x in truths.items()} == dict.fromkeys(truths, (1, 2))
    assert {len(picked[name][1]) for name in truths} == {2}


def test_tokens_lie_before_heads_where_batches_repeat_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "GENERATED_ELEMENTS", 200)
    shapes, params = options_of((5, 3, 9, 4), 4)
    case = spec.Case("toy", "float32", shapes, params, orders=TOKENS_FIRST)
    work, right = prepared("retention", case, one_batch), referee(PLAIN, case)
    for direction in ("forward", "backward"):
        assert work.check(right, direction).passed
        seen: dict[str, Any] = {}
        work.lone_call(Contestant("spy", seen.update, seen.update), direction)()
        assert {x.stride() for x in seen.values()} == {(108, 4, 12, 1)}
        assert all(torch.equal(x[0], x[1]) for x in seen.values())


def theirs(q: Any, k: Any, v: Any, *, scale: float, cu_seqlens: Any = None) -> tuple[Any, None]:
    """fla's functions, which need a GPU, as their documentation has them: [B, T, H, K], decays 1 - 2^(-5 - h)."""
    T, H = q.shape[1:3]
    gamma = 1 - 2.0 ** (-5.0 - torch.arange(H, dtype=torch.float64))
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = distance >= 0
    if cu_seqlens is not None:
        assert q.shape[0] == 1
        owner = torch.searchsorted(cu_seqlens[1:].long(), torch.arange(T), right=True)
        seen = seen & (owner[:, None] == owner)
    decay = torch.where(seen, gamma[:, None, None] ** distance.clamp(min=0), 0)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * decay * scale
    return torch.einsum("bhij,bjhe->bihe", scores, v.double()).to(q.dtype), None


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = ("chunk_retention", "fused_chunk_retention", "parallel_retention")
    monkeypatch.setitem(sys.modules, "fla.ops.retention", SimpleNamespace(**dict.fromkeys(functions, theirs)))


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", cases.find("retention").peers)
def test_peers_are_asked_for_what_the_spec_says(name: str, direction: str) -> None:
    work = prepared("retention", toy(scale=0.5))
    assert work.check(cases.find("retention").peers[name](work.problem), direction).passed


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sequences_are_asked_for_as_one_batch(direction: str) -> None:
    work = prepared("retention_varlen", packed())
    peer = cases.find("retention_varlen").peers["fla chunk"](work.problem)
    assert work.check(peer, direction).passed


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1}, "fla is not asked for gamma"),
        ({"states": 1, "return_state": True}, "fla is not asked for return_state, initial_state"),
        ({"normalize": "signed"}, "fla is not asked for normalize"),
        ({"form": "parallel", "Sk": 12}, "fla has as many queries as keys"),
    ],
)
def test_what_peers_do_not_do(options: dict[str, Any], message: str) -> None:
    for make in cases.find("retention").peers.values():
        with pytest.raises(NotImplementedError, match=f"^{message}$"):
            make(bind(PLAIN, toy(**options)))


@pytest.mark.usefixtures("fla")
def test_bench_cases_are_none_that_a_peer_refuses() -> None:
    for operator in (PLAIN, VARLEN):
        for case in operator.tagged(spec.Tag.BENCH):
            for make in cases.find(operator.name).peers.values():
                assert make(bind(operator, case)).backward is not None
