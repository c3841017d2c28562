"""Traced sizes: a call of other sizes has the result that it has alone, or an error: it needs another family."""

from collections.abc import Iterator
from typing import Any

import pytest

from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.launch import device as devices
from dualops.cuda.launch.operation import OPERATIONS, Operation
from dualops.cuda.launch.plans import Call
from dualops.cuda.launch.sizes import Size, Trace, concrete
from dualops.cuda.launch.step import leaves
from dualops.spec import ArrayMeta, Tag
from dualops.spec.meta import contiguous_strides
from tests.cuda.operators import every_direction


def traced(*values: int) -> tuple[Trace, list[Size]]:
    trace = Trace()
    return trace, [trace.size(value) for value in values]


def test_arithmetic_is_done_again():
    trace, (a, b) = traced(300, 64)
    made = trace.function((a + b, b - a, 3 * a, -(-a // b), a % b, 1 << b, [a * b, (a * b + 1,)], None, "a", -a))
    for x, y in ((300, 64), (7, 5), (1, 1000)):
        assert made((x, y)) == (x + y, y - x, 3 * x, -(-x // y), x % y, 1 << y, [x * y, (x * y + 1,)], None, "a", -x)


@pytest.mark.parametrize(
    ("ask", "same", "others"),
    [
        (lambda a, b: a < b, [(1, 9), (0, 1)], [(5, 5), (6, 5)]),
        (lambda a, b: a == b, [], [(5, 5)]),
        (lambda a, b: a != 4, [], [(5, 4), (3, 7)]),
        (lambda a, b: bool(a - 4), [(4, 0)], [(5, 0)]),
        (lambda a, b: min(a, b), [(1, 2), (5, 5)], [(3, 2)]),
        (lambda a, b: (a, b) == (4, 8), [(4, 8)], [(4, 9), (5, 8)]),
        (lambda a, b: 0 in (a, b), [(1, 1)], [(0, 1), (1, 0)]),
        (lambda a, b: range(10)[a], [(4, 1)], [(5, 1)]),
        (lambda a, b: f"{a}", [(4, 1)], [(5, 1)]),
        (lambda a, b: 1.5 * b, [(1, 8)], [(1, 9)]),
        (lambda a, b: float(a), [(4, 1)], [(5, 1)]),
        (lambda a, b: sorted([a, b]), [(1, 3)], [(3, 1)]),
    ],
)
def test_an_answer_holds_for_those_who_would_get_it_too(ask, same, others):
    trace, (a, b) = traced(4, 8)
    ask(a, b)
    made = trace.function(())
    assert made((4, 8)) == ()
    assert all(made(sizes) == () for sizes in same)
    assert all(made(sizes) is None for sizes in others)


def test_equal_sizes_are_one():
    trace, (a, b, c) = traced(4, 4, 8)
    assert a == b
    assert a < c
    assert b < c  # no new question
    assert len(trace.lines) == 2


def test_what_is_not_used_is_not_computed():
    trace, (a,) = traced(8)
    _ = a // (a - 8 + 1)
    assert trace.function(a)((7,)) == 7  # no division by 0


def test_a_size_is_no_key():
    trace, (a,) = traced(4)
    with pytest.raises(TypeError, match="unhashable"):
        _ = {a}
    assert {concrete(a): 1} == {4: 1}
    assert trace.function(1)((5,)) is None


def test_sizes_of_two_calls_do_not_meet():
    (_, (a,)), (_, (b,)) = traced(1), traced(1)
    with pytest.raises(RuntimeError, match="traced call"):
        _ = a + b


def settle(operation: Operation, call: Call) -> tuple[str, Any]:
    """What says which kernels do a call, and all numbers that its plan has."""
    problem = operation._bind(call)
    results = problem.outputs(operation.outputs)
    choice = operation.choose(problem, results, devices.known("sm_90a"), call.rung)
    steps = [(step.grid, [*leaves(step.args)], step.shared_bytes) for step in choice.steps()]
    metas = (*results.values(), *choice.workspace.values())
    kernels = [step.kernel.identity for step in choice.steps()]
    return f"{choice.rung} {kernels}", (steps, [(meta.shape, meta.strides) for meta in metas])


def calls(operation: Operation) -> Iterator[Call]:
    """Of the tested cases."""
    for case in operation.spec.cases:
        if case.tags & {Tag.TEST, Tag.EDGE} and (case.backward or not operation.backward):
            problem = absent_problem(operation.spec, case, operation.backward)
            params = {name: problem.params[name] for name in operation.defaults}
            yield Call(problem.arrays, None, params, None)


def lengths_of(operation: Operation, call: Call) -> list[str]:
    """The parameters of a call that are sizes."""
    return [name for name in operation.lengths if call.params[name] is not None]


def kind(operation: Operation, call: Call) -> str:
    lengths = lengths_of(operation, call)
    arrays = {name: (meta.dtype, meta.device, len(meta.shape)) for name, meta in call.arrays.items()}
    return f"{arrays} { {name: value for name, value in call.params.items() if name not in lengths} }"


@every_direction
def test_a_family_gives_each_of_its_calls_what_it_would_get_alone(direction):
    operation = OPERATIONS[direction.spec.name][direction.backward]
    kinds: dict[str, list[tuple[Call, Any]]] = {}
    for call in calls(operation):
        kinds.setdefault(kind(operation, call), []).append((call, settle(operation, call)))
    for members in kinds.values():
        lengths = lengths_of(operation, members[0][0])
        for call, (kernels, numbers) in members:
            trace = Trace()
            traced_kernels, traced_numbers = settle(operation, call.traced(trace, lengths))
            assert traced_kernels == kernels
            made = trace.function(traced_numbers)
            assert repr(made(call.sizes(lengths))) == repr(numbers)
            for other, (other_kernels, expected) in members:
                if (found := made(other.sizes(lengths))) is not None:
                    assert (other_kernels, repr(found)) == (kernels, repr(expected)), (call, other)


@pytest.mark.parametrize(
    ("operator", "shapes", "grown", "params"),
    [
        ("softmax", {"x": (100, 512)}, {"x": (1234, 512)}, {}),
        ("rms_norm", {"x": (100, 512), "w": (512,)}, {"x": (1234, 512), "w": (512,)}, {}),
        (
            "flash_attention",
            {"q": (1, 8, 1, 64), "k": (1, 2, 300, 64), "v": (1, 2, 300, 64)},
            {"q": (1, 8, 1, 64), "k": (1, 2, 301, 64), "v": (1, 2, 301, 64)},
            {"causal": True},
        ),
    ],
)
def test_a_new_length_is_of_the_same_family(operator, shapes, grown, params):
    operation = OPERATIONS[operator][0]

    def call(shapes: dict[str, tuple[int, ...]]) -> Call:
        arrays = {n: ArrayMeta(s, "bfloat16", contiguous_strides(s), "cuda:0", 0) for n, s in shapes.items()}
        return Call(arrays, None, operation.defaults | params, None)

    trace = Trace()
    _, numbers = settle(operation, call(shapes).traced(trace, []))
    found = trace.function(numbers)(call(grown).sizes([]))
    assert repr(found) == repr(settle(operation, call(grown))[1])
