"""Which tests run on a GPU: few kernels that have all pairs of the values that kernels are built with."""

from types import SimpleNamespace
from typing import Any

import pytest

from dualops.cuda.launch import device as devices
from dualops.spec import Tag
from tests.cuda.calls import Call, calls_of_case, steps_of
from tests.cuda.gpu import warm
from tests.cuda.gpu.cover import Value, choose, covered_by, values_of
from tests.cuda.operators import DIRECTIONS

DEVICE = devices.known("sm_90a")
OPERATORS = ("softmax", "layer_norm", "flash_attention_backward")


@pytest.fixture(scope="module")
def calls() -> dict[str, tuple[Call, ...]]:
    """Of some operators' cases, on the rung that is the best for each."""
    return {
        f"{direction.name} {case.id}": tuple(calls_of_case(direction, None, case))
        for direction in DIRECTIONS
        for case in direction.spec.tagged(Tag.TEST)
        if direction.name in OPERATORS and (case.backward or not direction.backward)
    }


@pytest.fixture(scope="module")
def kernels(calls) -> dict[str, Any]:
    steps = [step for each in calls.values() for call in each for step in steps_of(call, DEVICE) or ()]
    return {f"{step.kernel.identity} {step.shared_bytes}": step.kernel for step in steps}


@pytest.fixture(scope="module")
def needs(calls) -> dict[str, frozenset[str]]:
    return {
        name: frozenset(
            f"{step.kernel.identity} {step.shared_bytes}" for call in each for step in steps_of(call, DEVICE) or ()
        )
        for name, each in calls.items()
    }


def test_the_values_of_a_kernel(kernels):
    name, kernel = next((name, kernel) for name, kernel in kernels.items() if "sm90.dq.build_dq" in name)
    values = {value[1:] for value in values_of(kernel)}
    assert {
        ("0.block_kv", str(kernel.made_by.args[0].block_kv)),
        ("1.dtype", repr(kernel.made_by.args[1].dtype)),
    } <= values
    assert any(place == "1.having.softcap" for place, _ in values), name
    assert len(covered_by(kernel)) == len(values) * (len(values) + 1) // 2


def test_all_pairs_are_there_with_fewer_kernels(needs, kernels):
    chosen = choose(needs, kernels, (), len(kernels))
    assert chosen.share == 1 and len(chosen.kernels) < 0.8 * len(kernels)
    pairs = set().union(*map(covered_by, kernels.values()))
    assert set().union(*(covered_by(kernels[name]) for name in chosen.kernels)) == pairs


def test_no_more_kernels_than_may_be(needs, kernels):
    few = choose(needs, kernels, (), 40)
    assert len(few.kernels) <= 40 and 0.4 < few.share < 1
    given = sorted(kernels)[:50]
    assert choose(needs, kernels, given, 40).kernels == {*given}


def test_facts_count_as_pairs_do(calls, needs, kernels):
    """With facts, few kernels serve calls with more of them, such as a bias of each head."""
    facts = warm.facts_of_tests(calls)

    def covered(chosen: set[str]) -> set[tuple[Any, ...]]:
        return set().union(*(facts[name] for name, wanted in needs.items() if wanted <= chosen))

    every = set().union(*facts.values())
    few, without = choose(needs, kernels, (), 80, facts).kernels, choose(needs, kernels, (), 80).kernels
    assert len(few) <= 80 and len(covered(without)) < len(covered(few)) <= len(every)


def test_what_is_chosen_does_not_depend_on_the_order(needs, kernels):
    assert choose(needs, kernels, (), 60) == choose(dict(reversed(needs.items())), kernels, (), 60)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(devices, "current", lambda: DEVICE)


def test_tests_whose_kernels_are_there_run_too(here, calls, needs):
    found = warm.select(calls, 60, None)
    assert found.kept | found.left_out == {*calls} and found.kept.isdisjoint(found.left_out)
    there = set().union(*(needs[name] for name in found.kept))
    assert len(there) <= 60 and not any(needs[name] <= there for name in found.left_out)
    assert "of all pairs of values" in found.summary


def test_every_test_of_an_edited_module_runs(here, calls, needs, monkeypatch):
    monkeypatch.setattr(warm, "SAMPLE", 5)
    found = warm.select(calls, 60, frozenset(["dualops.cuda.rows.registers", "dualops.cuda.launch.operation"]))
    edited = {name for name, wanted in needs.items() if any("cuda.rows.registers." in each for each in wanted)}
    assert edited and edited <= found.kept
    others = {each for name in found.kept for each in needs[name] if "rows.registers" not in each}
    assert 0 < len(others) <= 5


def values_of_cases(*tags: Tag, every_rung: bool) -> set[Value]:
    """The values that kernels of all operators' cases with these tags are built with, on the best rung, or on each."""
    return {
        value
        for direction in DIRECTIONS
        for tag in tags
        for case in direction.spec.tagged(tag)
        if case.backward or not direction.backward
        for rung in (direction.spec.rungs if every_rung else (None,))
        if rung != "naive"
        for call in calls_of_case(direction, rung, case)
        for step in steps_of(call, DEVICE) or ()
        for value in values_of(step.kernel)
    }


def test_what_benchmarks_build_is_tested(here):
    """Large problems have Configs that small ones would not have: each value of them has a TEST or SIM case too."""
    timed = values_of_cases(Tag.BENCH, Tag.COMPARE, every_rung=False)
    assert timed - values_of_cases(Tag.TEST, Tag.SIM, every_rung=True) == set()


def test_the_calls_of_collected_tests(here):
    direction = next(direction for direction in DIRECTIONS if direction.name == "softmax")
    case = next(iter(direction.spec.tagged(Tag.EDGE)))

    def item(name: str, **params: Any) -> Any:
        return SimpleNamespace(nodeid=name, name=name, callspec=SimpleNamespace(params=params))

    given = {"direction": direction, "rung": "simt", "case": case}
    items = [item("test_case", **given), item("test_odd", **given), item("test_again", **given)]
    items += [
        item("test_random", direction=direction, number=0),
        item("test_other", seed=1),
        SimpleNamespace(nodeid="x"),
    ]
    found = warm.calls_of_tests(items)
    assert found.keys() == {"test_case", "test_odd", "test_again", "test_random"}
    assert found["test_case"] == found["test_again"] != found["test_odd"] and found["test_random"]
