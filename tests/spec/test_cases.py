"""Cases, generators and costs of every operator."""

from collections import Counter
from collections.abc import Mapping
from itertools import combinations

import numpy as np
import pytest

from dualops.spec import OPERATORS, Case, Problem, Spec, Tag, flash_attention, flash_attention_varlen, softmax
from dualops.spec.attention import OPTIONS
from dualops.spec.attention.blocks import made_of
from dualops.spec.attention.cases import COLUMNS, PAIRS, paired
from dualops.spec.meta import FLOATS, itemsize, numpy_dtype
from tests.problems import elements, random_problems, scores_of, values
from tests.spec.calls import metas_of

every_operator = pytest.mark.parametrize("spec", OPERATORS.values(), ids=OPERATORS)


def problem_of(spec: Spec, dtype: str, shapes: Mapping[str, tuple[int, ...]], params: Mapping | None = None) -> Problem:
    return spec.bind(metas_of(spec.inputs, dtype, shapes), params or {})


@every_operator
def test_every_case_binds_and_its_costs_are_counts(spec):
    for case in spec.cases:
        problem = problem_of(spec, case.dtype, case.shapes, case.params)
        for cost in (spec.forward_cost, spec.backward_cost):
            if cost is None:
                continue
            for count in (cost.flops, cost.bytes_read, cost.bytes_written, cost.extra_memory):
                assert isinstance(count(problem), int), case.id
                assert count(problem) >= 0, case.id
        written = sum(meta.size * itemsize(meta.dtype) for meta in problem.outputs().values())
        assert spec.forward_cost.bytes_written(problem) == written, case.id


@pytest.mark.parametrize("op", OPERATORS)
def test_the_set_of_cases(op):
    spec = OPERATORS[op]
    ids = [case.id for case in spec.cases]
    assert len(ids) == len(set(ids))
    assert spec.name == op
    for tag in set(Tag) - {Tag.COMPARE}:
        assert spec.tagged(tag), f"{op} has no case tagged {tag}"
    # a variant has its parent's kernels, so that one build of its own form is enough
    for tag in (Tag.TEST, Tag.SIM, *([] if spec.parent else [Tag.COMPILE])):
        assert {case.dtype for case in spec.tagged(tag)} == set(FLOATS)
    assert len(spec.tagged(Tag.COMPILE)) <= 60
    assert any(0 in shape for case in spec.tagged(Tag.EDGE) for shape in case.shapes.values())
    for case in spec.cases:
        assert case.tags
        assert case.shapes.keys() <= {entry.name for entry in spec.inputs}
        assert case.shapes.keys() >= {entry.name for entry in spec.inputs if not entry.optional}
        assert not case.backward or spec.gradients


def test_softmax_tests_rows_from_1_to_1048576_and_every_place_of_the_axis():
    lengths = {case.shapes["x"][case.params.get("axis", -1)] for case in softmax.tagged(Tag.TEST)}
    assert {0, 1, 1048576} <= lengths
    assert {case.params.get("axis", -1) for case in softmax.tagged(Tag.TEST)} >= {-1, 0, 1, -3}


@every_operator
def test_values_have_the_cases_shapes_and_dtypes_and_repeat(spec):
    for case in spec.cases:
        if elements(case) > 1 << 20:
            continue
        arrays = values(spec, case)
        again = values(spec, case)
        assert {name: array.shape for name, array in arrays.items()} == dict(case.shapes), case.id
        dtypes = {entry.name: case.dtype_of(entry) for entry in spec.inputs}
        for name, array in arrays.items():
            assert array.dtype == numpy_dtype(dtypes[name]), case.id
            assert array.tobytes() == again[name].tobytes(), case.id
            varies = array.size > 1 and not (name.startswith("cu_seqlens") and array[-1] == 0)
            assert not varies or len(set(array.reshape(-1)[:50].tolist())) > 1, case.id
        if spec.values:
            spec.values(spec.name, arrays, problem_of(spec, case.dtype, case.shapes, case.params))


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
        ({"window": (0, 0)}, 2, 40),  # query 0 sees key 1; query 1 key 2
        ({"window": (1, None)}, 5, 40),  # query 0 sees all three; query 1 keys 1, 2
    ],
)
def test_attention_costs_by_hand(params, pairs, written):
    problem = problem_of(flash_attention, "float16", ATTENTION, params)
    cost = flash_attention.forward_cost
    assert cost.flops(problem) == 2 * pairs * 2 * (4 + 5)  # 2 heads, a multiplication and an addition
    assert cost.bytes_read(problem) == 2 * (16 + 12 + 15)
    assert cost.bytes_written(problem) == written
    assert cost.extra_memory(problem) == 0


def test_the_costs_of_attentions_options_and_gradient_by_hand():
    shapes = {**ATTENTION, "bias": (2, 3), "sinks": (2,), "key_padding_mask": (1, 3), "seed": ()}
    problem = problem_of(flash_attention, "float16", shapes, {"dropout_p": 0.5, "return_lse": True})
    qkv, o, lse, own = 2 * (16 + 12 + 15), 2 * 20, 4 * 4, 2 * 6 + 4 * 2 + 3  # bias, sinks in float32, mask
    forward, backward = flash_attention.forward_cost, flash_attention.backward_cost
    assert backward is not None
    assert forward.bytes_read(problem) == qkv + own
    results = {"o": (1, 2, 2, 5), "lse": (1, 2, 2), "do": (1, 2, 2, 5), "dlse": (1, 2, 2)}
    arrays = metas_of(flash_attention.gradient_inputs, "float16", shapes | results)
    problem = flash_attention.bind_backward(arrays, {"dropout_p": 0.5})
    assert backward.bytes_read(problem) == qkv + own + 2 * o + 2 * lse
    assert backward.bytes_written(problem) == qkv + 2 * 6 + 4 * 2
    assert backward.flops(problem) == 2 * 6 * 2 * (3 * 4 + 2 * 5)  # dq, dk, scores; dv, dP
    assert backward.extra_memory(problem) == lse


def test_every_two_values_of_attentions_options_meet_in_some_row():
    values_of = {name: set(map(str, column)) for name, column in COLUMNS.items()}
    assert [len(found) for found in values_of.values()][:4] == [3, 3, 2, 5] and min(map(len, values_of.values())) == 2
    for one, two in combinations(COLUMNS, 2):
        present = {(str(row[one]), str(row[two])) for row in PAIRS}
        assert present == {(a, b) for a in values_of[one] for b in values_of[two]}, (one, two)


def test_rows_of_pairs_become_cases_in_full():
    """Each row is tested in float32 and in another dtype, is simulated, and says what its options are."""
    tested: dict[str, set[str]] = {}
    for case in flash_attention.tagged(Tag.TEST):
        assert not case.name.startswith("options_") or Tag.EDGE in case.tags
        tested.setdefault(case.name, set()).add(case.dtype)
    simulated = {case.id for case in flash_attention.tagged(Tag.SIM)}
    assert set().union(*(tested[f"options_{number}"] for number in range(len(PAIRS)))) == set(FLOATS)
    for number, row in enumerate(PAIRS):
        assert "float32" in tested[f"options_{number}"] and len(tested[f"options_{number}"]) > 1
        assert f"sim_options_{number}-float32" in simulated
        shapes, params = paired(row, (2, 4, 5, 8), (2, 9), 4)
        problem = problem_of(flash_attention, "float32", shapes, params)
        assert all(getattr(problem, name) == row[name] for name in ("causal", "window", "softcap"))
        for name, value in row.items():
            given = problem.params[name] if name in problem.params else problem.dtype_of(name)
            assert bool(given) == bool(value), name


def test_every_option_is_a_column():
    arguments = {entry.name for option in OPTIONS for entry in (*option.inputs, *option.params)}
    assert arguments - {"seed", "block_mask"} == COLUMNS.keys()


@pytest.mark.parametrize("seed", range(40))
def test_sequences_are_drawn_as_long_as_the_case_says(seed):
    rng = np.random.default_rng(seed)
    B = int(rng.integers(1, 8))
    totals = [int(total) for total in rng.integers(0, 40, 2)]
    shapes = {"q": (totals[0], 2, 8), "k": (totals[1], 1, 8), "v": (totals[1], 1, 8)}
    shapes |= {"cu_seqlens_q": (B + 1,), "cu_seqlens_k": (B + 1,)}
    longest = [int(rng.integers(-(-total // B), total + 2)) for total in totals]
    case = Case("drawn", "float32", shapes, {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}, seed=seed)
    arrays = values(flash_attention_varlen, case)
    for side, total, most in zip("qk", totals, longest, strict=True):
        ends = arrays[f"cu_seqlens_{side}"]
        assert ends.dtype == np.int32 and ends[0] == 0 and ends[-1] == total
        assert np.diff(ends).min() >= 0 and np.diff(ends).max() <= most
    pairs = np.prod([np.diff(arrays[f"cu_seqlens_{side}"]) for side in "qk"], axis=0).sum()
    assert 2 * pairs <= scores_of(case)


@pytest.mark.parametrize("seed", range(40))
def test_key_ranges_are_drawn_as_the_case_says(seed):
    rng = np.random.default_rng(seed)
    B, total, longest = (int(rng.integers(low, high)) for low, high in ((0, 8), (0, 40), (0, 50)))
    shapes = {"q": (5, 2, 8), "k": (total, 1, 8), "v": (total, 1, 8), "cu_seqlens_q": (B + 1,)}
    shapes |= {"k_starts": (B,), "k_lengths": (B,)}
    most = None if seed % 2 else int(rng.integers(0, 60))
    params = {"max_seqlen_q": 5, "max_seqlen_k": longest, "total_k_lengths": most}
    arrays = values(flash_attention_varlen, Case("drawn", "float32", shapes, params, seed=seed))
    starts, lengths = arrays["k_starts"], arrays["k_lengths"]
    assert starts.dtype == lengths.dtype == np.int32 and starts.shape == lengths.shape == (B,)
    assert (starts >= 0).all() and (lengths >= 0).all() and (starts + lengths <= total).all()
    assert lengths.max(initial=0) <= longest and (most is None or lengths.sum() <= most)


def test_key_ranges_overlap_repeat_leave_gaps_and_come_in_any_order():
    seen = Counter[str]()
    for case in random_problems("flash_attention_varlen", 3, 200, max_elements=4096):
        if "k_starts" in case.shapes:
            arrays = values(flash_attention_varlen, case)
            starts, lengths = arrays["k_starts"].tolist(), arrays["k_lengths"].tolist()
            there = [(start, start + length) for start, length in zip(starts, lengths) if length]
            keys = [key for start, end in there for key in range(start, end)]
            seen["empty"] += len(there) < len(lengths)
            seen["overlap"] += len(keys) > len(set(keys))
            seen["one start"] += len({start for start, _ in there}) < len(there)
            seen["gaps"] += len(set(keys)) < case.shapes["k"][0]
            seen["falling"] += there != sorted(there)
            seen["bounded"] += "total_k_lengths" in case.params
    assert len(seen) == 6 and min(seen.values()) > 10


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id)
        for case in OPERATORS["flash_attention"].cases
        if case.dtype == "bfloat16" and "block_mask" in case.shapes
    ],
)
def test_block_masks_of_cases_say_what_their_functions_say(case):
    (B, H, Sq, _), Sk, own = case.shapes["q"], case.shapes["k"][2], case.shapes["block_mask"]
    found = made_of(case.params["mask_mod"], own[0], own[1], Sq, Sk)
    expected = made_of(case.params["mask_mod"], B, H, Sq, Sk)
    assert np.array_equal(np.broadcast_to(found, expected.shape), expected)
