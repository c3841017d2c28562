"""Lion's spec: lists bound tensor by tensor, memory that must not be shared, costs by hand."""

import re

import pytest

from dualops.spec import ArrayMeta, lion
from dualops.spec.lion import bind_list, check_apart
from dualops.spec.meta import number_meta
from tests.spec.calls import meta, rows_of

LR = number_meta(0.1, "lion", "lr", ("float64",))


def floats(address: int, count: int) -> ArrayMeta:
    return ArrayMeta((count,), "float32", (1,), "cpu", address)


def apart(written: dict[str, ArrayMeta], read: dict[str, ArrayMeta], over: dict[str, str] | None = None) -> None:
    """`check_apart` of these arrays; over: results and what they may overwrite."""
    names = [*read, *written]
    metas = [*read.values(), *written.values()]
    source = [names.index((over or {}).get(name, name)) for name in names]
    check_apart(
        "lion",
        names,
        [int(each.pointer) for each in metas],
        [each.nbytes for each in metas],
        [name in written for name in names],
        source,
    )


def test_memory_of_their_own():
    apart({"a": floats(0, 4), "b": floats(16, 4)}, {"x": floats(32, 4), "y": floats(40, 4)})  # reads may share
    apart({"a": floats(0, 0), "b": floats(0, 4)}, {"x": floats(8, 0)})  # an empty array lies nowhere
    apart({"new": floats(0, 4)}, {"old": floats(0, 4), "x": floats(16, 1)}, over={"new": "old"})


@pytest.mark.parametrize(
    ("written", "read", "message"),
    [
        ({"a": floats(0, 4), "b": floats(12, 4)}, {}, "a overlaps b"),
        ({"a": floats(100, 1)}, {"x": floats(0, 100), "y": floats(900, 1)}, "a overlaps x"),
        ({"a": floats(0, 100), "b": floats(800, 1)}, {"x": floats(396, 1)}, "a overlaps x"),
        ({"b": floats(200, 1)}, {"x": floats(0, 100), "y": floats(4, 1), "z": floats(8, 2)}, "b overlaps x"),
        ({"a": floats(0, 4), "b": floats(0, 4)}, {}, "a overlaps b"),
        ({"a": floats(0, 4)}, {"x": floats(0, 4)}, "a overlaps x"),
    ],
)
def test_shared_memory(written, read, message):
    with pytest.raises(ValueError, match=f"^lion: {message} in memory, expected memory of its own$"):
        apart(written, read)


def test_a_result_may_overwrite_its_own_input_and_no_other():
    read = {"old": floats(0, 4), "other": floats(16, 4)}
    for address, message in ((16, "new overlaps other"), (4, "new overlaps old")):
        with pytest.raises(ValueError, match=message):
            apart({"new": floats(address, 4)}, read, over={"new": "old"})


def test_each_tensor_of_a_list_is_a_problem():
    lists = {name: [meta(3), meta(2, 0), meta(dtype="bfloat16")] for name in ("params", "momenta")}
    problems = bind_list("lion", lists | {"grads": [meta(3), meta(2, 0), meta()]}, LR, {})
    assert [problem.N for problem in problems] == [3, 0, 1]
    assert [problem.dtype for problem in problems] == ["float32", "float32", "bfloat16"]
    assert problems[2].dtype_of("grads") == "float32"
    assert bind_list("lion", {"params": [], "grads": [], "momenta": []}, LR, {}) == []


ERRORS = {
    ValueError: [
        ({"grads": meta(2)}, "lion: grads[1] has shape (2,), params[1] has shape (3,), expected the same"),
        ({"grads": meta(3, device="cuda:1")}, "lion: grads[1] is on cuda:1, params[1] on cpu, expected one device"),
        (dict.fromkeys(("params", "grads", "momenta"), meta(3, device="cuda:1")),
         "lion: params[1] is on cuda:1, params[0] on cpu, expected one device"),
    ],
    TypeError: [
        ({"momenta": meta(3, dtype="float64")},
         "lion: momenta[1] has dtype float64, params[1] has dtype float32, expected float32 or float16 or bfloat16"),
        ({"params": None}, "lion: params[1] is missing, expected an array of float64, float32, float16, bfloat16"),
    ],
    NotImplementedError: [
        ({"params": meta(3, strides=(-1,))}, "lion: params[1] has a negative stride in (-1,)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("error", "changed", "message"), rows_of(ERRORS))
def test_errors_say_which_tensor(error, changed, message):
    lists = {name: [meta(3), changed.get(name, meta(3))] for name in ("params", "grads", "momenta")}
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        bind_list("lion", lists, LR, {})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_momenta_have_a_dtype_of_their_own(dtype):
    for params in ("float16", "bfloat16", "float32"):
        arrays = {"params": meta(3, dtype=params), "grads": meta(3), "momenta": meta(3, dtype=dtype), "lr": LR}
        problem = lion.bind(arrays)
        assert problem.outputs()["new_momenta"].dtype == dtype
        assert list(problem.outputs()) == ["new_params", "new_momenta"]
    assert list(lion.bind(arrays | {"master": meta(3)}).outputs()) == ["new_params", "new_momenta", "new_master"]


def test_costs_by_hand():
    """Each array once; params are not read where a master is."""
    arrays = {name: meta(5, dtype="bfloat16") for name in ("params", "grads", "momenta")} | {"lr": LR}
    cost = lion.forward_cost
    for more, read, written in (({}, 5 * 6, 5 * 4), ({"master": meta(5)}, 5 * (4 + 2 + 2), 5 * (2 + 2 + 4))):
        problem = lion.bind(arrays | more)
        assert (cost.bytes_read(problem), cost.bytes_written(problem)) == (read, written)
        assert cost.flops(problem) == 50
        assert cost.extra_memory(problem) == 0
