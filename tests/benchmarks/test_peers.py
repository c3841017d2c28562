"""What torch has of attention, as contestants: that it computes what the spec says, and what it refuses."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import cases, workload
from benchmarks.contestant import Contestant, with_autograd
from benchmarks.samples import one_head
from benchmarks.tree import reference, spec
from benchmarks.work import bind
from benchmarks.workload import Workload, to_torch
from dualops.spec.attention.cases import tanh_softcap, woven
from dualops.testing import to_numpy

ATTENTION = spec.OPERATORS["flash_attention"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "ROTATION_BYTES", 40_000)


def referee(operator: spec.Spec, case: spec.Case) -> Contestant:
    """NumPy on torch's tensors, in dualops' place."""

    def on_tensors(name: str) -> Callable[..., Any]:
        def call(**given: Any) -> tuple[torch.Tensor, ...]:
            arrays = {name: to_numpy(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
            results = getattr(reference, name)(**{**case.params, **arrays})
            return tuple(to_torch(x, "cpu") for x in (results if isinstance(results, tuple) else (results,)))

        return call

    return Contestant("dualops", on_tensors(operator.name), on_tensors(f"{operator.name}_backward"))


def attention(Sk: int = 9, **params: Any) -> spec.Case:
    shapes = {"q": (2, 4, 7, 8), "k": (2, 4, Sk, 8), "v": (2, 4, Sk, 8)}
    return spec.Case("toy", "float32", shapes, params)


def packed(**params: Any) -> spec.Case:
    shapes = {"q": (19, 2, 8), "k": (23, 2, 8), "v": (23, 2, 8), "cu_seqlens_q": (4,), "cu_seqlens_k": (4,)}
    return spec.Case("toy", "float32", shapes, {"max_seqlen_q": 12, "max_seqlen_k": 14, **params})


def prepared(name: str, case: spec.Case, sample: Any = None) -> Workload:
    operator = spec.OPERATORS[name]
    made = Workload(operator, case, sample or cases.find(name).sample, device="cpu")
    made.prepare_backward(referee(operator, case))
    return made


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("causal", "Sk"), [(False, 9), (True, 7), ("top_left", 9)])
def test_sdpa_computes_what_the_spec_says(causal: bool | str, Sk: int, direction: str) -> None:
    """torch has a flash backend for the CPU too; the masks are the same."""
    work = prepared("flash_attention", attention(Sk, causal=causal, scale=0.5))
    peer = cases.find("flash_attention").peers["SDPA flash"](work.problem)
    assert work.check(peer, direction).passed


def by_sequence(q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, *longest: int, scale: float, window_size: Any) -> Any:
    """torch.nn.attention.varlen's function, which needs a GPU, on the CPU: masks aligned at the last key."""
    assert longest == (12, 14) and (ends_q.diff() != ends_k.diff()).any()  # by which alignments differ
    outs = []
    for b in range(len(ends_q) - 1):
        one, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        scores = torch.einsum("ihd,jhd->hij", q[one], k[keys]) * scale
        position = torch.arange(scores.shape[1])[:, None] + scores.shape[2] - scores.shape[1]
        hidden = torch.arange(scores.shape[2]) > position
        if window_size == (-1, 0):
            scores = scores.masked_fill(hidden, -1e30)
            probs = torch.softmax(scores, -1).masked_fill(hidden, 0)
        else:
            assert window_size == (-1, -1)
            probs = torch.softmax(scores, -1)
        outs.append(torch.einsum("hij,jhd->ihd", probs, v[keys]))
    return torch.cat(outs)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True])
def test_varlen_is_asked_for_what_the_spec_says(causal: bool, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_sequence)
    work = prepared("flash_attention_varlen", packed(causal=causal))
    peer = cases.find("flash_attention_varlen").peers["torch varlen"](work.problem)
    assert work.check(peer, direction).passed


def test_autograd_makes_its_graph_once_for_each_copy_of_the_data_until_a_release() -> None:
    work, seen = prepared("flash_attention", attention()), []

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append(q.data_ptr())
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    contestant = with_autograd("spy", work.problem, forward)
    with torch.no_grad():  # as everything is timed
        call = work.call(contestant, "backward")
        results = [call() for _ in range(9)]
        assert 2 <= len(set(seen)) == len(seen) <= 5
        for found in results:
            assert isinstance(found, tuple)
            assert [x.shape for x in found] == [(2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8)]
        seen.clear()
        for _ in range(2):
            contestant.release()
            work.restore("backward")  # which a graph that is still there would notice
            assert work.check(contestant, "backward").passed
            assert work.check(contestant, "backward").passed
    assert len(seen) == 2


REFUSED = {
    "window": ({"window": (3, 0)}, {}),
    "softcap": ({"softcap": 2.0}, {}),
    "dropout_p, seed": ({"dropout_p": 0.5}, {"seed": ()}),
    "sinks": ({}, {"sinks": (4,)}),
    "bias": ({}, {"bias": (1, 9)}),
}
TAKEN = {*(("FlashAttention-4", option) for option in ("window", "softcap", "sinks")), ("SDPA efficient", "bias")}


@pytest.mark.parametrize("option", REFUSED)
@pytest.mark.parametrize("peer", cases.find("flash_attention").peers)
def test_peers_refuse_options_that_they_do_not_have(option: str, peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params, shapes = REFUSED[option]
    case = attention(**params)
    dtype = "bfloat16" if peer == "FlashAttention-4" else "float32"
    problem = bind(spec.OPERATORS["flash_attention"], spec.Case("toy", dtype, {**case.shapes, **shapes}, params))
    make = cases.find("flash_attention").peers[peer]
    if (peer, option) in TAKEN:
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", SimpleNamespace(_flash_attn_fwd=None))
        assert make(problem).forward is not None
    else:
        with pytest.raises(NotImplementedError, match=f"has no {option}$"):
            make(problem)


class TestFlex:
    """Not compiled, on a CPU: what it is asked for is what dualops does."""

    @pytest.fixture(autouse=True)
    def _on_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("benchmarks.flash_attention.DEVICE", "cpu")
        monkeypatch.setattr(torch, "compile", lambda function: function)
        flag = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
        monkeypatch.setattr(flag, True)

    @pytest.mark.parametrize(
        "options",
        [{}, {"causal": True}, {"score_mod": tanh_softcap}, {"mask_mod": woven}, {"causal": True, "mask_mod": woven}],
    )
    def test_options(self, options: dict[str, Any]) -> None:
        shapes = {"q": (1, 2, 130, 16), "k": (1, 2, 140, 16), "v": (1, 2, 140, 16)}
        case = spec.Case("toy", "float32", shapes, options)
        work = Workload(ATTENTION, case, one_head, device="cpu")
        assert work.check(cases.find("flash_attention").peers["flex_attention"](work.problem), "forward").passed


def test_sdpa_refuses_a_mask_that_is_aligned_at_the_last_key() -> None:
    problem = bind(spec.OPERATORS["flash_attention"], attention(causal=True))
    with pytest.raises(NotImplementedError, match="aligns the causal mask at the first key"):
        cases.find("flash_attention").peers["SDPA flash"](problem)


def test_varlen_refuses_a_mask_that_is_aligned_at_the_first_key_and_grouped_heads() -> None:
    operator = spec.OPERATORS["flash_attention_varlen"]
    case = packed(causal="top_left")
    grouped = packed()
    shapes = {**grouped.shapes, "k": (23, 1, 8), "v": (23, 1, 8)}
    for each in (case, spec.Case("toy", "float32", shapes, grouped.params)):
        with pytest.raises(NotImplementedError, match="neither grouped heads nor a causal mask from the first key"):
            cases.find(operator.name).peers["torch varlen"](bind(operator, each))


def test_bench_cases_are_none_that_every_peer_refuses() -> None:
    for name in ("flash_attention", "flash_attention_varlen"):
        for case in spec.OPERATORS[name].tagged(spec.Tag.BENCH):
            for peer, make in cases.find(name).peers.items():
                if peer not in ("FlashAttention-4", "flex_attention"):  # 16 bits, forward; a GPU
                    assert make(bind(spec.OPERATORS[name], case)).backward is not None
