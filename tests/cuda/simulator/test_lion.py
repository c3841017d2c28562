"""Lion's kernels by Configs and alignments that no case has, and its lists: groups, refusals."""

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda import simulator
from dualops.cuda.launch import operation
from dualops.cuda.lion import dense, forward
from dualops.cuda.lion.dense import DenseConfig
from dualops.cuda.lion.formula import Dtypes
from dualops.spec import OPERATORS, Case
from dualops.spec.meta import FLOATS, numpy_dtype
from tests.checks import Rejected, check
from tests.problems import Layout

SPEC = OPERATORS["lion"]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Lists = Any  # of params, grads and momenta, to be handed on as three arguments


pytestmark = pytest.mark.usefixtures("forgotten")


def numbers(shape: Any, dtype: Any = "float32", seed: int = 0) -> np.ndarray:
    return np.array(np.random.default_rng(seed).standard_normal(shape)).astype(numpy_dtype(str(np.dtype(dtype))))


def same(one: np.ndarray, two: np.ndarray) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


def all_same(one: Any, two: Any) -> bool:
    return all(same(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))


def mixture() -> Lists:
    """Lists of params, grads and momenta: dtypes, shapes, an empty one, one without axes, one of odd strides."""
    shapes: list[Any] = [(3, 5), (70, 9), (0, 4), (), (100,), (1,)]
    params = [numbers(shape, dtype, seed) for seed, shape in enumerate(shapes) for dtype in ("float32", "bfloat16")]
    params += [numbers((4, 4), "float64"), numbers((6, 4), "bfloat16").T]
    grads = [numbers(p.shape, p.dtype, 20 + i) for i, p in enumerate(params)]
    wide = {BFLOAT16: np.dtype(np.float32)}
    momenta = [numbers(p.shape, wide.get(p.dtype, p.dtype) if i % 8 > 3 else p.dtype) for i, p in enumerate(params)]
    return [params, grads, momenta]


@pytest.mark.parametrize("rung", ["simt", "table"])
@pytest.mark.parametrize("config", [DenseConfig(32, 1, 1), DenseConfig(64, 2, 2), DenseConfig(32, 4, 3)], ids=str)
def test_configs(config, rung, monkeypatch):
    """Sizes around a chunk, of groups of 8, 4 and 2 elements."""
    monkeypatch.setattr(dense, "config_of", lambda dtypes, device, table: config)
    for dtype, own in (("bfloat16", {"grads": "bfloat16"}), ("bfloat16", {}), ("float64", {})):
        unit = 2 if dtype == "float64" else 8 if own else 4
        chunk = config.threads * config.vectors * config.sweeps * unit
        for size in (chunk, chunk + unit + 1):
            shapes: dict[str, Any] = {**dict.fromkeys(("params", "grads", "momenta"), (size,)), "lr": ()}
            case = Case("config", dtype, shapes, {"weight_decay": 0.1}, dtypes=own)
            check(SPEC, case, direction(rung), ways=("given",), special=True)


def direction(rung: str) -> Callable[..., Any]:
    return lambda *arrays, **options: dualops.cuda.lion(*arrays, kernel=rung, **options)


@pytest.mark.parametrize("rung", ["simt", "table"])
@pytest.mark.parametrize("offsets", [(0, 0, 0), (1, 1, 1), (7, 7, 7), (1, 0, 0), (4, 4, 0)], ids=str)
def test_alignments(offsets, rung):
    """Arrays that are off a multiple of 16 bytes alike, and each in its own way; less than a group, more than one."""
    for dtypes in ({"grads": "bfloat16"}, {}):
        for size in (3, 300):
            names = ("params", "grads", "momenta")
            shapes: dict[str, Any] = {**dict.fromkeys(names, (size,)), "lr": ()}
            case = Case("odd", "bfloat16", shapes, {}, dtypes=dtypes)
            layouts = {name: Layout((0,), (0,), misalignment=off) for name, off in zip(names, offsets, strict=True)}
            check(SPEC, case, direction(rung), layouts=layouts, ways=("allocated",))


def test_where_groups_begin():
    halves = Dtypes("bfloat16", "bfloat16", "bfloat16", "bfloat16", False, "float32")
    mixed = Dtypes("bfloat16", "float32", "bfloat16", "float32", True, "float32")
    assert (dense.unit(halves), dense.unit(mixed)) == (8, 4)
    rows = [[64] * 5, [66] * 5, [78] * 5, [64, 64, 64, 66, 64], [65] * 5]
    assert dense.heads(halves, rows).tolist() == [0, 7, 1, -1, -1]
    # params, momenta, master, master, grads, momenta: 8 bytes of the halves and 16 of the others
    rows = [[64] * 6, [72, 64, 80, 80, 72, 64], [66, 68, 68, 68, 66, 68], [66, 64, 64, 64, 66, 64]]
    assert dense.heads(mixed, rows).tolist() == [0, 0, 3, -1]


def test_one_bit_is_one_too_many():
    case = Case("bit", "float32", {**dict.fromkeys(("params", "grads", "momenta"), (50,)), "lr": ()})

    def nearly(*arrays: Any, out: Any, **options: Any) -> Any:
        dualops.cuda.lion(*arrays, out=out, **options)
        out[1][17] = np.nextafter(out[1][17], np.float32(9))
        return out

    with pytest.raises(Rejected, match="new_momenta differs from the reference in the bits of 1 elements"):
        check(SPEC, case, nearly, ways=("given",))


def test_lr_on_the_host_and_on_the_device():
    arrays: Lists = numbers(40), numbers(40, seed=1), numbers(40, seed=2)
    for dtype in (np.float32, np.float64):
        found = []
        for lr in (0.1, np.array(0.1, dtype), np.float32(0.1)):
            own: Lists = [x.copy() for x in arrays]
            dualops.cuda.lion(*own, lr=lr, weight_decay=0.3)
            found.append(own[0])
        assert same(found[0], found[1]) and same(found[0], found[2])
    assert len(forward.plans) == 3  # numbers of any kind are one


def test_a_list_is_its_tensors_step_after_step(order, launched):
    lists = mixture()
    for turn in range(3):
        expected = reference.lion(*lists, lr=0.01, weight_decay=0.1)
        found = dualops.cuda.lion(*lists, lr=0.01, weight_decay=0.1)
        assert found[0] is lists[0] and found[1] is lists[2]
        assert all_same(found, expected)
        kernels = [name for name in launched if name != "write_words"]
        assert kernels == (["lion_table"] * 4 + ["lion_strided"]) * (turn + 1)  # four combinations of dtypes
    assert launched.count("write_words") == 4  # in the first step alone


def test_a_list_with_masters():
    params, grads, _ = ([x for x in each if x.dtype == BFLOAT16] for each in mixture())
    momenta, master = ([numbers(p.shape, seed=i) for p in params] for i in range(2))
    expected = reference.lion(params, grads, momenta, 0.1, master=master)
    found = dualops.cuda.lion(params, grads, momenta, 0.1, master=master)
    assert found[2] is master and all_same(found, expected)


@pytest.mark.parametrize("kernel", ["naive", "simt", "table"])
def test_a_list_on_each_rung_and_into_arrays_of_the_callers(kernel):
    lists: Lists = [each[:-1] for each in mixture()]
    before = [[x.copy() for x in each] for each in lists]
    out = [np.full_like(x, 7) for x in lists[0]], [np.full_like(x, 7) for x in lists[2]]
    lr = np.array(0.1, np.float32)
    betas: Any = [0.5, 0.25]  # lists, as in JSON
    found = dualops.cuda.lion(*lists, lr=lr, betas=betas, out=out, kernel=kernel)
    assert found[0] is out[0] and found[1] is out[1]
    assert all_same(out, reference.lion(*lists, lr=lr, betas=(0.5, 0.25)))
    assert all_same(lists, before)
    dualops.cuda.lion(*lists, lr=lr, betas=betas, out=(lists[0], lists[2]), kernel=kernel)
    assert all_same((lists[0], lists[2]), out)


def test_lists_of_nothing(launched):
    assert dualops.cuda.lion([], [], [], 0.1) == ([], [])
    empty = [np.zeros((0, 3), np.float32)]
    dualops.cuda.lion(empty, [empty[0].copy()], [empty[0].copy()], 0.1)
    assert launched == []


def test_a_table_that_names_no_array_is_noticed():
    """What a kernel would do with an address of another launch."""
    step = (
        operation.OPERATIONS["lion"][0]
        .plan((numbers(8), numbers(8), numbers(8), 0.1, None), ((0.9, 0.99), 0.0))
        .steps[0]
    )
    assert step.kernel.name == "lion_one"
    table = np.array([0, *range(4096, 4102), 8, 0], np.int64)
    dtypes = Dtypes("float32", "float32", "float32", "float32", False, "float32")
    kernel = dense.build_table(DenseConfig(32, 1, 1), dtypes)
    with pytest.raises(IndexError, match="0x1000 is the address of no array of this launch"):
        kernel[1, 32](simulator.Pointer(table, "table"), 1, *step.args[1:3])


P, G, M = ([numbers(4, seed=i), numbers(5, seed=i)] for i in range(3))
GAPS = numbers((3,) * 6)[:, ::2, ::2, ::2, ::2, ::2]
HALF = [x.astype(np.float16) for x in M]
ERRORS: dict[type[Exception], list[tuple[tuple[Any, ...], dict[str, Any], str]]] = {
    ValueError: [
        ((P, G[:1], M, 0.1), {}, "lion: grads has 1 tensors, params has 2, expected the same"),
        ((P, G, M, 0.1), {"out": (P, M[:1])}, "lion: out new_momenta has 1 tensors, params has 2, expected the same"),
        ((P, G[::-1], M, 0.1), {}, "lion: grads[0] has shape (5,), params[0] has shape (4,), expected the same"),
        (([P[0], P[0]], [G[0], G[0]], [M[0], M[0].copy()], 0.1), {},
         "lion: params[0] overlaps params[1] in memory, expected memory of its own"),
        ((P, [G[0], P[1]], M, 0.1), {}, "lion: params[1] overlaps grads[1] in memory, expected memory of its own"),
        ((P[0], P[0], M[0], 0.1), {}, "lion: params overlaps grads in memory"),
        ((P[0], G[0], M[0], 0.1), {"master": M[0]}, "lion: momenta overlaps master in memory"),
        ((P, G, M, 0.1), {"out": ([np.zeros(4, np.float32), G[1]], M)},
         "lion: out new_params[1] overlaps grads[1] in memory, expected memory of its own"),
        (([np.broadcast_to(P[0][:1], 4)], G[:1], M[:1], 0.1), {},
         "lion: params[0] has strides (0,): its elements overlap one another"),
        ((P, G, M, 0.1), {"out": (P,)}, "expected 2 lists: out new_params, out new_momenta"),
        ((P, G, M, 0.1), {"kernel": "sm90"}, "lion: kernel is 'sm90', expected one of naive, simt"),
    ],
    TypeError: [
        ((P, [G[0], G[1].astype(np.float16)], M, 0.1), {},
         "lion: grads[1] has dtype float16, params[1] has dtype float32, expected float32"),
        ((P, G, M, 0.1), {"out": (P, HALF)}, "lion: out new_momenta[0] has dtype float16, expected float32"),
        ((P, [G[0], [1.0]], M, 0.1), {},
         "lion: grads[1] is a builtins.list, expected a NumPy array: kernels run in the simulator"),
        ((P, G, M[0], 0.1), {}, "lion: momenta is a ndarray, params is a list, expected a list"),
        ((P, G, M, None), {}, "lion: lr is a builtins.NoneType, expected a NumPy array"),
    ],
    NotImplementedError: [
        (([GAPS, *P], [numbers(GAPS.shape), *G], [numbers(GAPS.shape), *M], 0.1), {}, "lion: no kernel does"),
        ((GAPS, numbers(GAPS.shape), numbers(GAPS.shape), 0.1), {}, "lion: no kernel does"),
        (([P[0].reshape(2, 2).T], [G[0].reshape(2, 2)], [M[0].reshape(2, 2)], 0.1), {"kernel": "table"},
         "lion: rung table does not do"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "args", "options", "message"), [(error, *row) for error in ERRORS for row in ERRORS[error]]
)
def test_wrong_lists_are_refused_before_anything_is_launched(error, args, options, message, launched):
    for _ in range(2):  # not only the first time
        with pytest.raises(error, match=re.escape(message)):
            dualops.cuda.lion(*args, **options)
    assert launched == []


@pytest.mark.parametrize("dtype", FLOATS)
def test_plan_says_how(dtype, launched):
    p = numbers(600, dtype)
    plans = {
        kernel: str(dualops.cuda.plan("lion", p, p, p, 0.1, kernel=kernel, out=(p.copy(), p.copy())))
        for kernel in SPEC.rungs
    }
    assert "formula by formula" in plans["naive"] and plans["naive"].count("lion_strided") == 2
    assert "groups of 16 bytes" in plans["simt"]
    assert "write_words" in plans["table"] and "72 bytes of workspace" in plans["table"]
    assert launched == []
