"""The sample that is compared with the reference: which part it is, and that its reference is a part of the whole's."""

import numpy as np
import pytest
import torch

from benchmarks import workload
from benchmarks.contestant import Contestant
from benchmarks.samples import Selection, one_head
from benchmarks.tree import spec
from benchmarks.work import bind
from benchmarks.workload import Workload

from .test_peers import referee

ATTENTION, VARLEN = (spec.OPERATORS[name] for name in ("flash_attention", "flash_attention_varlen"))
CASES = {
    case.id: (operator, case)
    for operator in (ATTENTION, VARLEN)
    for case in operator.cases
    if case.dtype == "float32" and case.name.startswith(("options_", "varlen_")) and spec.Tag.TEST in case.tags
}


def picked(shapes: dict[str, tuple[int, ...]], operator: spec.Spec = ATTENTION, **params: object) -> Selection:
    """The sample of forward's inputs and of all results."""
    case = spec.Case("toy", "float32", shapes, params)
    results = {}
    for direction, which in (("forward", operator.outputs), ("backward", operator.gradients)):
        metas = bind(operator, case, direction).outputs(which)
        results |= {name: meta.shape for name, meta in metas.items()}
    return one_head(bind(operator, case), {**shapes, **results}, np.random.default_rng(1))


QKV = {"q": (3, 12, 5, 8), "k": (3, 4, 7, 8), "v": (3, 4, 7, 6)}
WHOLE = slice(None)


def test_a_key_head_comes_with_the_query_heads_that_read_it() -> None:
    found = picked({**QKV, "alibi_slopes": (12,), "key_padding_mask": (3, 7), "bias": (3, 12, 1, 7)})
    (b, q_heads, *_), (k_b, k_heads, *_) = found["q"], found["k"]
    assert b == k_b == found["key_padding_mask"][0]
    assert b.stop - b.start == k_heads.stop - k_heads.start == 1
    assert (q_heads.start, q_heads.stop) == (3 * k_heads.start, 3 * k_heads.stop)
    assert found["alibi_slopes"] == (q_heads,)
    for name in ("o", "dq"):
        assert found[name] == found["q"]
    assert found["dv"] == found["v"]


@pytest.mark.parametrize(
    ("options", "batches", "heads"),
    [
        ({"bias": (3, 12, 5, 7)}, 1, 3),
        ({"bias": (5, 7)}, 3, 12),
        ({"bias": (3, 1, 1, 7)}, 1, 12),
        ({"bias": (12, 5, 1)}, 3, 3),
        ({"sinks": (12,)}, 3, 3),
    ],
)
def test_what_a_gradient_is_summed_over_is_taken_whole(
    options: dict[str, tuple[int, ...]], batches: int, heads: int
) -> None:
    found = picked({**QKV, **options})
    assert np.empty(QKV["q"])[found["q"]].shape == (batches, heads, 5, 8)
    ((name, shape),) = options.items()
    assert found[f"d{name}"] == found[name]
    np.broadcast_to(np.empty(shape)[found[name]] if name == "bias" else 0.0, (batches, heads, 5, 7))


def test_options_that_know_where_they_are_get_the_first_head() -> None:
    first = (slice(0, 1), slice(0, 3), WHOLE, WHOLE)
    assert picked({**QKV, "seed": ()}, dropout_p=0.5)["q"] == first
    assert picked(QKV, mask_mod=lambda b, h, i, j: i >= j)["q"] == first
    assert picked({**QKV, "seed": (), "sinks": (12,)}, dropout_p=0.5)["q"] == (WHOLE,) * 4


def test_of_sequences_all_are_taken() -> None:
    shapes = {"q": (30, 12, 8), "k": (20, 4, 8), "v": (20, 4, 6), "cu_seqlens_q": (4,), "cu_seqlens_k": (4,)}
    found = picked(shapes, VARLEN, max_seqlen_q=20, max_seqlen_k=20, return_lse=True)
    _, heads, _ = found["q"]
    assert heads.stop - heads.start == 3
    assert found["lse"] == (heads, WHOLE)
    assert found["cu_seqlens_q"] == (WHOLE,)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_the_reference_of_the_sample_is_that_part_of_the_whole(
    name: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every option: where a sample were not the same problem, it would be wrong by more than rounding."""
    monkeypatch.setattr(workload, "ROTATION_BYTES", 1)
    operator, case = CASES[name]
    work, right = Workload(operator, case, one_head, device="cpu"), referee(operator, case)
    work.prepare_backward(right)
    assert work.check(right, direction).passed
    picks, truth, baseline = work.expected(direction)
    for place, wrong in enumerate(truth):
        known = np.isfinite(truth[wrong])
        exact, near = truth[wrong][known], baseline[wrong][known]
        if np.abs(exact - near).max(initial=0) >= 0.01 * np.abs(exact).max(initial=0):
            continue  # empty, or the gradient of what is added to all scores of a row, which is 0 but for rounding

        def spoiled(place: int = place, wrong: str = wrong, **arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results = list((right.forward if direction == "forward" else right.backward)(**arrays))  # type: ignore
            results[place][picks[wrong]] *= 1.01
            return tuple(results)

        assert not work.check(Contestant("wrong", spoiled, spoiled), direction).passed, wrong
