"""The fuzzer's own tests: its problems are legal, various and repeatable, and a stray write is seen."""

from collections import Counter
from itertools import combinations
from math import prod

import numpy as np
import pytest

from dualops.spec import OPERATORS, ArrayMeta, Case
from dualops.spec.attention.cases import COLUMNS
from dualops.spec.attention.draws import MASK_MODS, SCORE_MODS
from dualops.spec.meta import FLOATS, numpy_dtype
from tests import problems


@pytest.mark.parametrize("op", OPERATORS)
def test_every_problem_is_legal_and_no_larger_than_asked(op, fuzz_count):
    for case in problems.random_problems(op, seed=3, count=fuzz_count, max_elements=3000):
        assert problems.elements(case) <= 3000, case
        spec = OPERATORS[op]
        inputs = problems.materialize(spec, case, problems.random_layouts(spec, case), special=True)
        spec.bind({name: ArrayMeta.of_numpy(guarded.array) for name, guarded in inputs.items()}, case.params)
        for guarded in inputs.values():
            guarded.check()


@pytest.mark.parametrize("op", OPERATORS)
def test_problems_repeat_and_a_longer_run_begins_with_a_shorter_one(op):
    short, long = list(problems.random_problems(op, 5, 20)), list(problems.random_problems(op, 5, 40))
    assert short == long[:20]
    assert short != list(problems.random_problems(op, 6, 20))
    spec = OPERATORS[op]
    for case in short:
        assert problems.random_layouts(spec, case) == problems.random_layouts(spec, case)
        for one, two in zip(*(problems.values(spec, case, special=True).values() for _ in range(2)), strict=True):
            assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize("op", ["flash_attention", "flash_attention_varlen"])
def test_attention_problems_cover_the_domain(op):
    cases = list(problems.random_problems(op, 0, 300))
    q, k, v = ([case.shapes[name] for case in cases] for name in "qkv")
    rows = 2 if op == "flash_attention" else 0  # the axis of queries, and of keys
    assert {a[1] // b[1] for a, b in zip(q, k, strict=True)} >= {1, 2, 3}
    for relation in (int.__lt__, int.__eq__, int.__gt__):
        assert sum(relation(a[rows], b[rows]) for a, b in zip(q, k, strict=True)) >= 10
        assert sum(relation(a[-1], b[-1]) for a, b in zip(q, v, strict=True)) >= 10
    assert any(0 in shape for shape in q)
    assert any(0 in shape for shape in k)
    assert max(shape[-1] for shape in (*q, *v)) > 300
    assert 0.02 < np.mean([max(a[-1], b[-1]) > 128 for a, b in zip(q, v, strict=True)]) < 0.15
    drawn = {name: [case.params.get(name) for case in cases] for param in OPERATORS[op].params for name in [param.name]}
    assert set(drawn["causal"]) == {False, True, "top_left"}
    assert set(drawn["scale"]) >= {None, 0.0, 1.0, -0.25}
    sides = {side for window in drawn["window"] if window for side in window}
    assert {None, 0, 1, 10**6} <= sides and any(side and 8 < side <= 300 for side in sides)
    assert set(drawn["dropout_p"]) == {None, 0.0, 0.1, 0.5, 0.9, 0.999}
    assert set(drawn["score_mod"]) == {None, *SCORE_MODS}
    assert set(drawn["mask_mod"]) == {None, *MASK_MODS}
    for entry in OPERATORS[op].inputs:
        if entry.optional:
            assert 30 < sum(entry.name in case.shapes for case in cases) < 200, entry.name


def test_attention_problems_have_options_alone_and_every_two_together():
    def given(case: Case) -> frozenset[str]:
        chosen = {name for name, value in case.params.items() if value not in (None, False, 0.0)}
        return frozenset({*case.shapes, *chosen} - {"q", "k", "v", "seed", "block_mask", "scale", "return_lse"})

    found = Counter(given(case) for case in problems.random_problems("flash_attention", 0, 300))
    options = frozenset().union(*found)
    assert options == COLUMNS.keys()
    assert found[frozenset()] > 15
    assert sum(len(names) == 1 for names in found.elements()) > 30
    for pair in combinations(options, 2):
        assert sum(names >= {*pair} for names in found.elements()) >= 5, pair


def test_layouts_cover_what_a_caller_may_bring():
    rng = np.random.default_rng(0)
    layouts = [problems.random_layout((3, 4, 5), rng) for _ in range(200)]
    assert any(layout == problems.Layout.dense(3) for layout in layouts)
    assert len({layout.order for layout in layouts}) == 6
    assert any(layout.step > 1 for layout in layouts)
    assert any(layout.broadcast for layout in layouts)
    assert not any(problems.random_layout((3, 4, 5), rng, broadcast=False).broadcast for _ in range(200))
    assert {layout.misalignment for layout in layouts} == set(range(8))
    for layout in [problems.random_layout((3, 4, 5), rng, contiguous_last=True) for _ in range(200)]:
        assert layout.strides((3, 4, 5))[-1] == 1


@pytest.mark.parametrize("dtype", [*FLOATS, "int64", "int32", "bool"])
@pytest.mark.parametrize(
    "layout",
    [
        problems.Layout.dense(3),
        problems.Layout((2, 0, 1), (0, 3, 2)),
        problems.Layout((0, 1, 2), (0, 0, 5), step=2, misalignment=3),
        problems.Layout((0, 1, 2), (0, 0, 1), broadcast=frozenset({1})),
    ],
)
def test_a_guarded_array_holds_its_values_and_notices_each_stray_element(dtype, layout):
    given = (3 * np.random.default_rng(1).standard_normal((3, 4, 5))).astype(numpy_dtype(dtype))
    expected = np.broadcast_to(given[:, :1], given.shape) if layout.broadcast else given
    guarded = problems.Guarded.of(given, layout)
    assert np.array_equal(guarded.array, expected)
    assert ArrayMeta.of_numpy(guarded.array).strides == guarded.strides == layout.strides(given.shape)
    assert (guarded.buffer.ctypes.data + guarded.offset * given.itemsize) % 128 == (
        (problems.GUARD + layout.misalignment) * given.itemsize % 128
    )
    inside = {
        guarded.offset + sum(i * s for i, s in zip(index, guarded.strides, strict=True))
        for index in np.ndindex(*given.shape)
    }
    assert len(inside) == prod(given.shape) // (4 if layout.broadcast else 1)
    for place in range(guarded.buffer.size):
        kept = guarded.buffer[place]
        guarded.buffer[place] = (not kept if dtype == "bool" else 0) if place not in inside else kept
        if place in inside:
            guarded.check()
        else:
            with pytest.raises(AssertionError, match=rf"at offsets \[{place - guarded.offset}\] from element 0"):
                guarded.check()
            guarded._bits(guarded.buffer)[place] = guarded._canaries()[place]
    guarded.check()


def test_a_canary_copied_to_a_neighbour_is_seen():
    guarded = problems.Guarded((4,), "bfloat16")
    guarded.buffer[2], guarded.buffer[3] = guarded.buffer[3], guarded.buffer[2]
    with pytest.raises(AssertionError, match="2 elements outside"):
        guarded.check()


def test_a_copy_that_came_back_from_elsewhere_can_be_checked():
    guarded = problems.Guarded((4,), "float32")
    other = guarded.buffer.copy()
    other[0] = 1
    guarded.check()
    with pytest.raises(AssertionError, match="1 elements outside"):
        guarded.check(other)


@pytest.mark.parametrize("dtype", FLOATS)
def test_an_element_that_was_never_written_is_named_but_a_nan_result_is_not(dtype):
    out = problems.Guarded((3, 5), dtype, problems.Layout((1, 0), (1, 0)))
    assert np.isnan(out.array.astype(np.float64)).all()
    out.array[...] = np.nan
    out.check_written()
    out.check()
    untouched = problems.Guarded((3, 5), dtype)
    untouched.array[:, :3] = 1
    untouched.array[0, 3:] = 1
    with pytest.raises(AssertionError, match=r"4 elements were never written, the first at \(1, 3\)"):
        untouched.check_written()


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_are_what_they_are_called(dtype):
    special = problems.special_values(dtype, 8.0).astype(np.float64)
    info = {"bfloat16": (2.0**-133, 2.0**-126)}.get(dtype)
    denormal, normal = info or (np.finfo(dtype).smallest_subnormal, np.finfo(dtype).smallest_normal)
    assert np.isnan(special[0])
    assert {np.inf, -np.inf, 8.0, -8.0, 0.0, float(denormal), float(normal)} <= set(special)
    assert np.isfinite(problems.special_values(dtype, 8.0, infinities=False)[1:].astype(np.float64)).all()
