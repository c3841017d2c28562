"""Retention's costs by hand, how its results lie in memory, and what is kept for backward."""

from typing import Any

import numpy as np
import pytest

from dualops.spec import Problem, retention, retention_varlen
from dualops.spec.retention import CHUNK, default_gamma
from dualops.spec.retention_cases import options_of
from tests.spec.calls import metas_of


def problem_of(S: int = 150, Sk: int | None = None, **options: Any) -> Problem:
    """float16, B = 2, H = 3, D = 5, Dv = 7."""
    shapes, params = options_of((2, 3, S, 5), 7, Sk=Sk, **options)
    return retention.bind(metas_of(retention.inputs, "float16", shapes), params)


PAIRS = 2 * (64 * 65 // 2) + 22 * 23 // 2  # of two chunks of 64 tokens and one of 22


@pytest.mark.parametrize(
    ("options", "pairs", "tokens"),
    [
        ({}, PAIRS, 150),
        ({"form": "recurrent"}, 0, 150),
        ({"form": "parallel"}, 150 * 151 // 2, 0),
        ({"form": "parallel", "return_state": True}, 150 * 151 // 2, 150),
        ({"form": "parallel", "S": 2, "Sk": 3}, 5, 0),  # query 0 sees keys 0, 1; query 1 all three
        ({"form": "parallel", "S": 3, "Sk": 2}, 3, 0),  # query 0 sees none
        ({"form": "parallel", "mask": 1, "S": 3, "Sk": 2}, 6, 0),
    ],
)
def test_flops_by_hand(options, pairs, tokens):
    problem = problem_of(**options)
    backward = retention.backward_cost
    assert CHUNK == 64 and backward is not None
    # a multiplication and an addition each, of 6 heads: q @ k.T and s @ v; k.T @ v and q @ state
    assert retention.forward_cost.flops(problem) == 6 * 2 * (pairs * (5 + 7) + tokens * 2 * 35)
    # q @ k.T, e @ k, e.T @ q; do @ v.T, s.T @ do; the states, their gradients, and what dq, dk and dv have of them
    assert backward.flops(problem) == 6 * 2 * (pairs * (3 * 5 + 2 * 7) + tokens * 5 * 35)


def test_flops_are_linear_in_the_length():
    short, long = (retention.forward_cost.flops(problem_of(S=S)) for S in (4096, 8192))
    assert long == 2 * short


def test_bytes_by_hand():
    tokens, state, norm = 2 * 3 * 10, 4 * 2 * 3 * 35, 4 * 2 * 3 * 5
    problem = problem_of(S=10, gamma=1, states=1, normalize="signed", return_state=True, return_row_sum=True)
    cost = retention.forward_cost
    assert cost.bytes_read(problem) == 2 * tokens * (5 + 5 + 7) + 4 * 3 + state + norm
    assert cost.bytes_written(problem) == 2 * tokens * 7 + state + norm + 4 * tokens
    shapes = {name: meta.shape for name, meta in problem.arrays.items()} | {"o": (2, 3, 10, 7), "do": (2, 3, 10, 7)}
    shapes |= {"row_sum": (2, 3, 10), "dstate": (2, 3, 5, 7)}
    for normalize, extra in ((None, 0), ("signed", 2 * tokens * 7 + 4 * tokens)):
        given = {name: shape for name, shape in shapes.items() if normalize or name != "initial_norm"}
        params = {"normalize": normalize}
        gradient = retention.bind_backward(metas_of(retention.gradient_inputs, "float16", given), params)
        cost = retention.backward_cost
        norms = norm if normalize else 0
        assert cost is not None
        assert cost.bytes_read(gradient) == 2 * tokens * (5 + 5 + 7 + 7) + 12 + 2 * state + norms + extra
        assert cost.bytes_written(gradient) == 2 * tokens * (5 + 5 + 7) + state + norms


def test_no_sequence_is_taken_for_longer_than_all_of_them():
    shapes = {"q": (9, 2, 5), "k": (9, 2, 5), "v": (9, 2, 7), "cu_seqlens": (3,)}
    problem = retention_varlen.bind(metas_of(retention_varlen.inputs, "float16", shapes), {"max_seqlen": 100_000})
    assert (problem.Sq, problem.Sk, problem.max_seqlen) == (9, 9, 100_000)
    problem = retention_varlen.bind(metas_of(retention_varlen.inputs, "float16", shapes))
    assert (problem.Sq, problem.Sk, problem.max_seqlen) == (9, 9, 9)


def test_states_lie_in_the_order_of_their_axes_and_tokens_in_that_of_q():
    shapes, params = options_of((2, 3, 10, 5), 7, normalize="signed", return_state=True, return_row_sum=True)
    made = metas_of(retention.inputs, "float16", shapes)
    for name in "qkv":
        meta = made[name]
        assert meta is not None
        made[name] = meta._replace(strides=(3 * 10 * meta.shape[3], meta.shape[3], 3 * meta.shape[3], 1))
    outputs = retention.bind(made, params).outputs()
    assert {name: meta.strides for name, meta in outputs.items()} == {
        "o": (210, 7, 21, 1),
        "state": (105, 35, 7, 1),
        "state_norm": (15, 5, 1),
        "row_sum": (30, 10, 1),
    }


@pytest.mark.parametrize(("normalize", "needed"), [(None, set()), ("abs", {"row_sum"}), ("signed", {"o", "row_sum"})])
@pytest.mark.parametrize("spec", [retention, retention_varlen], ids=lambda spec: spec.name)
def test_backward_needs_the_results_of_normalized_calls_alone(spec, normalize, needed):
    problem = Problem(spec, "", {}, {"normalize": normalize}, {})
    assert {name for name, when in spec.saved_when.items() if when(problem)} == needed
    assert spec.saved_when.keys() == {"o", "row_sum"} <= set(spec.saved)


def test_the_decay_of_heads_is_that_of_the_paper():
    assert default_gamma(4).tolist() == [31 / 32, 63 / 64, 127 / 128, 255 / 256]
    assert default_gamma(40).max() < 1 and default_gamma(0).shape == (0,)
    assert default_gamma(3).dtype == np.float64
