"""What is special about attention on a GPU: dropout's masks, seeds on the device, memory, determinism with options."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import dualops.cuda
from dualops import reference
from dualops.cuda.launch.operation import OPERATIONS
from dualops.spec import OPERATORS, compare
from dualops.testing.truth import widened
from tests.checks import gradient_inputs
from tests.cuda.gpu.library import numpy, same_bits, tensor
from tests.cuda.operators import GENERAL_RUNGS
from tests.problems import values

SPEC = OPERATORS["flash_attention"]
RUNGS = SPEC.rungs
GENERAL = [rung for rung in RUNGS if rung in GENERAL_RUNGS]  # that do every dtype and width


def identity_values(B: int, H: int, Sq: int, Sk: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k and v for which o is the matrix of probabilities: all scores are 0 and v is the identity."""
    q, k = (torch.zeros(B, H, S, 16, device="cuda", dtype=dtype) for S in (Sq, Sk))
    return q, k, torch.eye(Sk, device="cuda", dtype=dtype).expand(B, H, Sk, Sk).contiguous()


@pytest.mark.parametrize(
    ("rung", "dtype"),
    [*product(("naive", "simt", "sm90"), (torch.float32,)), *product(("simt", "sm80", "sm90"), (torch.bfloat16,))],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, 123456789012345])
def test_dropouts_mask_is_the_references(rung, dtype, seed):
    q, k, v = identity_values(2, 3, 75, 128 if rung == "sm90" else 130, dtype)
    options: dict[str, Any] = {"dropout_p": 0.37, "seed": seed}
    kept = numpy(dualops.cuda.flash_attention(q, k, v, **options, kernel=rung)) != 0
    expected = np.asarray(reference.flash_attention(*map(numpy, (q, k, v)), **options)) != 0
    assert np.array_equal(kept, expected)
    assert 0.6 < kept.mean() < 0.66


@pytest.mark.parametrize("rung", RUNGS)
def test_a_graph_reads_the_seed_when_it_is_replayed(rung):
    q, k, v = identity_values(1, 2, 64, 64, torch.float32 if rung in GENERAL else torch.bfloat16)
    seed = torch.tensor(5, device="cuda")
    dualops.cuda.flash_attention(q, k, v, dropout_p=0.5, seed=seed, kernel=rung)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = dualops.cuda.flash_attention(q, k, v, dropout_p=0.5, seed=seed, kernel=rung)
    for value in (7, -3):
        seed.fill_(value)
        graph.replay()
        assert same_bits(o, dualops.cuda.flash_attention(q, k, v, dropout_p=0.5, seed=value, kernel=rung))


def test_a_seed_is_no_new_plan():
    q, k, v = identity_values(1, 1, 32, 32, torch.float32)
    plans = OPERATIONS["flash_attention"][0].plans
    dualops.cuda.flash_attention(q, k, v, dropout_p=0.5, seed=0)
    before = len(plans)
    results = [dualops.cuda.flash_attention(q, k, v, dropout_p=0.5, seed=seed) for seed in range(10)]
    assert len(plans) == before
    assert not any(same_bits(results[0], other) for other in results[1:])


def extra_memory(call: Callable[[], Any]) -> int:
    """Bytes that a call needs at its peak beyond its results."""
    results = call()
    kept = sum(r.untyped_storage().nbytes() for r in (results if isinstance(results, tuple) else (results,)))
    del results
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - kept


def test_memory_in_addition_to_the_results():
    """simt: none forward, delta backward; naive: all scores, once and twice; sm80: none; sm90: a counter."""
    B, H, S, D = 1, 4, 1024, 64
    case_q = torch.randn(B, H, S, D, device="cuda")
    q, k, v, do = (torch.randn_like(case_q) for _ in range(4))
    o, lse = dualops.cuda.flash_attention(q, k, v, return_lse=True)
    rows, scores, slack = 4 * B * H * S, 4 * B * H * S * S, 4096
    forward, backward = {}, {}
    half = [x.bfloat16() for x in (q, k, v)]
    for rung in ("sm80", "sm90"):
        assert extra_memory(partial(dualops.cuda.flash_attention, *half, kernel=rung)) <= slack
    for rung in GENERAL:
        forward[rung] = extra_memory(partial(dualops.cuda.flash_attention, q, k, v, kernel=rung))
        call = partial(dualops.cuda.flash_attention_backward, q, k, v, o, lse, do, kernel=rung)
        backward[rung] = extra_memory(call)
    assert forward["simt"] <= slack
    assert rows <= backward["simt"] <= rows + slack
    assert scores <= forward["naive"] <= scores + rows + slack
    assert 2 * scores <= backward["naive"] <= 2 * scores + rows + slack


@pytest.mark.parametrize(("rung", "backward"), [("sm90", False), *product(("sm80", "simt"), (False, True))])
def test_rows_do_not_depend_on_other_rows(rung, backward):
    """The same bits for a head alone and for the same head in a batch."""
    dtype = "float32" if rung in GENERAL else "bfloat16"
    case = next(case for case in SPEC.cases if case.id == f"gqa_cross-{dtype}")
    arrays = gradient_inputs(SPEC, case) if backward else values(SPEC, case)
    name = "flash_attention_backward" if backward else "flash_attention"
    function = getattr(dualops.cuda, name)
    params = {"causal": True, "kernel": rung}
    together = function(**{key: tensor(array) for key, array in arrays.items()}, **params)
    alone = function(**{key: tensor(array[1:]) for key, array in arrays.items()}, **params)
    pairs = zip(together, alone, strict=True) if backward else [(together, alone)]
    assert all(same_bits(many[1:].contiguous(), one) for many, one in pairs)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("rung", ["sm80", "sm90"])
def test_a_gradient_in_one_kernel_does_not_depend_on_other_rows(rung, D):
    """The same bits for a head alone, whose blocks are few."""
    q, k, v, do = (torch.randn(3, 12, 700, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    o, lse = dualops.cuda.flash_attention(q, k, v, causal=True, return_lse=True)
    gradient = partial(dualops.cuda.flash_attention_backward, causal=True, kernel=rung)
    together = gradient(q, k, v, o, lse, do)
    alone = gradient(*(x[1:2, 5:6] for x in (q, k, v, o, lse, do)))
    assert all(same_bits(many[1:2, 5:6].contiguous(), one) for many, one in zip(together, alone, strict=True))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("rung", "D", "causal"), [("sm90", 128, False), ("sm90", 128, True), ("sm80", 128, True), ("sm80", 64, True)]
)
def test_a_gradient_repeats_its_bits_during_other_work(rung, D, causal, captured):
    """A thousand times, with products on another stream; and what follows a call finds all of its results."""
    q, k, v, do = (torch.randn(1, 6, 1100, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    o, lse = dualops.cuda.flash_attention(q, k, v, causal=causal, return_lse=True)
    found = tuple(torch.full_like(x, float("nan")) for x in (q, k, v))
    params: dict[str, Any] = {"causal": causal, "out": found, "kernel": rung}
    gradient = partial(dualops.cuda.flash_attention_backward, q, k, v, o, lse, do, **params)
    gradient()
    first, different = [x.clone() for x in found], torch.zeros((), device="cuda", dtype=torch.int64)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    square, product = torch.ones(2, 2048, 2048, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    if captured:
        with torch.cuda.graph(graph):
            gradient()
    for repeat in range(1000):
        if repeat % 4 == 0:
            with torch.cuda.stream(side):
                torch.mm(square, square, out=product)
        for x in found:
            x.fill_(float("nan"))
        graph.replay() if captured else gradient()
        for x, y in zip(first, found):
            different += (x.view(torch.int16) != y.view(torch.int16)).sum()
    assert int(different) == 0


def test_a_function_that_numba_cannot_compile():
    q = torch.zeros(1, 1, 64, 16, device="cuda")

    def reads_a_file(score, b, h, i, j):
        return score + len(open(__file__).readline())

    with pytest.raises(TypeError, match=r"flash_attention: score_mod is reads_a_file#.* compile.*open.*line \d+"):
        dualops.cuda.flash_attention(q, q, q, score_mod=reads_a_file)


@pytest.mark.xdist_group("large")
def test_gradients_of_more_than_2_to_the_31_elements():
    D = 64
    queries = 2**31 // (2 * D) + 5
    generator = torch.Generator("cuda").manual_seed(0)
    q, do = (
        torch.empty(1, 2, queries, D, dtype=torch.bfloat16, device="cuda").normal_(generator=generator) for _ in "ab"
    )
    k, v = (torch.randn(1, 2, 16, D, dtype=torch.bfloat16, device="cuda", generator=generator) for _ in "ab")
    o, lse = dualops.cuda.flash_attention(q, k, v, return_lse=True)
    dq, _, _ = dualops.cuda.flash_attention_backward(q, k, v, o, lse, do)
    near = [0, 1, 2**30 // D - 1, 2**30 // D, queries - 2, queries - 1]
    taken = torch.tensor(near, device="cuda")
    some = [numpy(array[:, :, taken]) for array in (q, o, lse, do)]
    arrays: dict[str, Any] = {"q": some[0], "k": numpy(k), "v": numpy(v), "o": some[1], "lse": some[2], "do": some[3]}
    wide: dict[str, Any] = widened(arrays)
    truth = reference.flash_attention_backward(**wide)[0]
    baseline = reference.flash_attention_backward(**arrays)[0]
    found = compare(numpy(dq[:, :, taken]), truth, baseline, dtype="bfloat16", floor=SPEC.floor, name="dq")
    assert found.passed, found.message
    assert not torch.isnan(dq).any()
