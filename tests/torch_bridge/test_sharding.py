"""Operators on DTensors: who shards what, to the values of one process, forward and backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dualops import torch_bridge as ours
from dualops.spec import OPERATORS
from dualops.torch_bridge.sharding import RULES

from .conftest import values
from .sharded import S0, S1, S2, Case, Found, P, R, agrees, check_case, found_by, placements
from .sharded_attention import ATTENTION
from .sharded_modules import WAYS, alone

pytestmark = pytest.mark.xdist_group("sharding")  # the processes start once


def norm(call: Callable[..., Any], word: Any, shape: tuple[int, ...], *vectors: str, **params: Any) -> Case:
    tensors: dict[str, Any] = {"x": shape} | dict.fromkeys(vectors, shape[-1:])
    summed = {name: tuple(P if one != R else R for one in word) if isinstance(word, tuple) else P for name in vectors}
    return Case(call, tensors, {"x": word}, (word,), {"x": word, **summed}, params)


NORMS = {
    "rms_norm rows": norm(ours.rms_norm, S0, (5, 6), "w"),
    "rms_norm second axis": norm(ours.rms_norm, S1, (2, 3, 6), "w", offset=1.0),
    "rms_norm both": norm(ours.rms_norm, (S0, S1), (3, 4, 6), "w"),
    "layer_norm rows": norm(ours.layer_norm, S0, (3, 6), "w", "b"),
    "layer_norm b alone": norm(ours.layer_norm, S0, (3, 6), "b"),
    "layer_norm w alone": norm(ours.layer_norm, S0, (3, 6), "w"),
    "layer_norm both rows": norm(ours.layer_norm, (S0, S0), (5, 6), "w", "b"),
    # the normalised axis is made whole
    "rms_norm columns": Case(ours.rms_norm, {"x": (3, 6), "w": (6,)}, {"x": S1, "w": S0}, (R,), {"x": R, "w": R}),
    "rms_norm residual": Case(
        partial(ours.rms_norm, return_rstd=True),
        {"x": (4, 6), "w": (6,), "residual": (4, 6)},
        {"x": S0, "residual": S0},
        (S0, S0, S0),
        {"x": S0, "residual": S0, "w": P},
    ),
    "layer_norm residual": Case(
        partial(ours.layer_norm, return_stats=True),
        {"x": (4, 6), "residual": (4, 6)},
        {"x": S0, "residual": S0},
        (S0, S0, S0, S0),
        {"x": S0, "residual": S0},
    ),
    "rms_norm summed alone": Case(
        lambda **tensors: ours.rms_norm(**tensors)[1],
        {"x": (4, 6), "residual": (4, 6)},
        {"x": S0, "residual": S0},
        (S0,),
        {"x": S0, "residual": S0},
    ),
}


def softmax(word: Any, axis: int, result: Any = None) -> Case:
    return Case(ours.softmax, {"x": (3, 4, 5)}, {"x": word}, (result or word,), {"x": result or word}, {"axis": axis})


SOFTMAX = {
    "softmax first": softmax(S0, -1),
    "softmax last": softmax(S2, 1),
    "softmax negative axis": softmax(S2, -2),
    "softmax two axes": softmax((S2, S0), 1),
    "softmax the axis itself": softmax(S1, 1, R),
    "softmax the axis itself, negative": softmax(S0, -3, R),
}


def product(
    a: Any, b: Any, y: Any, da: Any, db: Any, shapes: Any = ((4, 6), (6, 4)), bias: Any = None, **params: Any
) -> Case:
    """bias: placements of it and of its gradient."""
    return Case(
        ours.matmul,
        {"a": shapes[0], "b": shapes[1]} | ({"bias": (4,)} if bias else {}),
        {"a": a, "b": b} | ({"bias": bias[0]} if bias else {}),
        (y,) * (2 if params.get("return_preactivation") else 1),
        {"a": da, "b": db} | ({"bias": bias[1]} if bias else {}),
        params,
    )


SQUARE = ((4, 4), (4, 4))
MATMUL = {
    "matmul rows": product(S0, R, S0, S0, P, bias=(R, P)),
    "matmul columns": product(R, S1, S1, P, S1, bias=(S0, S0)),
    "matmul summed axis": product(S1, S0, P, S1, S0),
    # square ones, one after another: what is remembered of one must not serve the next
    "matmul square": product(R, S1, S1, P, S1, SQUARE),
    "matmul square, transposed b": product(R, S0, S1, P, S0, SQUARE, transpose_b=True),
    "matmul square, transposed b, by its columns": product(R, S1, P, S1, S1, SQUARE, transpose_b=True),
    "matmul square, transposed a": product(S1, R, S0, S1, P, SQUARE, transpose_a=True),
    "matmul square, both": product(S1, R, S0, S1, P, SQUARE, transpose_a=True, transpose_b=True),
    "matmul rows and columns": product((S0, R), (R, S1), (S0, S1), (S0, P), (P, S1)),
    "matmul activation": product(R, S1, S1, P, S1, bias=(S0, S0), activation="gelu"),
    "matmul preactivation": product(R, S1, S1, P, S1, bias=(S0, S0), activation="silu", return_preactivation=True),
    "matmul batch": product(S0, S0, S0, S0, S0, ((3, 4, 6), (3, 6, 4))),
    "matmul batch of one": product(S0, R, S0, S0, P, ((3, 4, 6), (6, 4))),
    "matmul batch with an axis of one": product(S1, R, S1, S1, P, ((1, 3, 4, 6), (2, 1, 6, 4))),
}


def summed_with_an_activation(mesh: Any) -> bool:
    """Neither an activation nor a bias is for parts of a sum."""
    from torch.distributed.tensor import distribute_tensor

    mesh = mesh["tensor"]
    a, b, bias = (values(shape, torch.float32, "cpu", seed=i) for i, shape in enumerate(((4, 6), (6, 4), (4,))))
    shards = distribute_tensor(a, mesh, placements(S1)), distribute_tensor(b, mesh, placements(S0))
    whole = distribute_tensor(bias, mesh, placements(R))
    calls: Any = (({"activation": "relu"}, {"activation": "relu"}), ({"bias": whole}, {"bias": bias}))
    for options, plain in calls:
        found: Any = ours.matmul(*shards, **options)
        assert not any(each.is_partial() for each in found.placements)
        assert torch.equal(found.full_tensor(), ours.matmul(a, b, **plain))
    return True


def rope(q: Any, k: Any, table: tuple[int, ...], tables: Any = R, results: Any = None, **tensors: Any) -> Case:
    """tensors: (tensor, its placement)."""
    angles = (
        torch.arange(table[0] * table[-2] * table[-1] if len(table) == 3 else table[0] * table[1]).reshape(table) / 7
    )
    got = results or (q, k)
    return Case(
        ours.rope,
        {"q": (2, 4, 4, 6), "k": (2, 2, 4, 6), "cos": angles.cos(), "sin": angles.sin()}
        | {name: tensor for name, (tensor, _) in tensors.items()},
        {"q": q, "k": k, "cos": tables, "sin": tables} | {name: word for name, (_, word) in tensors.items()},
        got,
        {"q": got[0], "k": got[1]},
    )


PLACES = torch.tensor([[3, 1, 0, 5], [2, 2, 7, 1]])
ROPE = {
    "rope batch": rope(S0, S0, (9, 3)),
    "rope heads": rope(S1, S1, (9, 3)),
    "rope heads of q alone": rope(S1, R, (9, 3)),
    "rope heads of k alone": rope(R, S1, (9, 3)),
    "rope tokens": rope(S2, S2, (4, 3), S0),
    "rope tokens, longer tables": rope(S2, S2, (9, 3), R, (R, R)),
    "rope tokens and positions": rope(S2, S2, (9, 3), positions=(PLACES, S1)),
    "rope tokens and positions of all": rope(S2, S2, (9, 3), positions=(PLACES[0], S0)),
    "rope batch and positions": rope(S0, S0, (9, 3), positions=(PLACES, S0)),
    "rope tables a token": rope(S2, S2, (2, 4, 3), S1),
    "rope tables a token, batch": rope(S0, S0, (2, 4, 3), S0),
    "rope tables for all batches": rope(S0, S0, (1, 4, 3)),
    "rope batch and heads": rope((S0, S1), (S0, S1), (9, 3), (R, R)),
    "rope, q alone used": Case(
        lambda q, k, cos, sin: ours.rope(q, k, cos, sin)[0],
        {"q": (2, 4, 4, 6), "k": (2, 2, 4, 6), "cos": torch.ones(4, 3), "sin": torch.zeros(4, 3)},
        {"q": S1, "k": S1},
        (S1,),
        {"q": S1},
    ),
}


def tables(mesh: Any) -> bool:
    from torch.distributed.tensor import distribute_tensor

    found: Any = ours.rope_tables(distribute_tensor(PLACES, mesh["tensor"], placements(S1)), 6)
    for one, other in zip(found, ours.rope_tables(PLACES, 6), strict=True):
        agrees(one, other, S1, "table")
    return True


def compiled(mesh: Any) -> bool:
    """Rules hold in a compiled function, forward and backward, as they do without."""
    from torch.distributed.tensor import distribute_tensor

    def normal(x: Tensor, w: Tensor) -> Tensor:
        return ours.softmax(ours.rms_norm(x, w))

    x, w = values((4, 6), torch.float32, "cpu"), torch.ones(6)
    found = []
    for function in (normal, torch.compile(normal, backend="aot_eager", fullgraph=True)):
        shards: Any = distribute_tensor(x, mesh["tensor"], placements(S0)).requires_grad_()
        whole = distribute_tensor(w, mesh["tensor"], placements(R)).requires_grad_()
        y: Any = function(shards, whole)
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), [shards, whole])))
    for one, other, word in zip(*found, (S0, S0, P), strict=True):
        agrees(other, one.full_tensor(), word, "compiled")
    return True


CASES: dict[str, Case] = {**NORMS, **SOFTMAX, **MATMUL, **ROPE, **ATTENTION}


def check(name: str, mesh: Any) -> bool:
    return check_case(CASES[name], mesh)


CHECKS: dict[str, Any] = {
    **{name: partial(check, name) for name in CASES},
    "matmul summed axis, activation": summed_with_an_activation,
    "rope_tables": tables,
    "compiled": compiled,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return found_by((2, 2), CHECKS | WAYS, tmp_path_factory.mktemp("sharding"))


@pytest.mark.parametrize("name", CHECKS)
def test_sharded_is_as_one_process(name: str, found: list[Found]) -> None:
    assert all(each[name] for each in found)


ON_GPUS = (  # the rules are the same on all devices: a call of each operator, with each way to share it out
    "rms_norm rows",
    "layer_norm residual",
    "softmax last",
    "matmul columns",
    "matmul summed axis",
    "rope tokens and positions",
    "attention heads",
    "attention batch",
    "ulysses",
    "varlen heads, key ranges",
    "retention heads",
    "retention log_decay",
)


@pytest.fixture(scope="module")
def found_on_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return found_by((1, 2), {name: CHECKS[name] for name in ON_GPUS}, tmp_path_factory.mktemp("gpus"), "cuda")


@pytest.mark.cuda(2)
@pytest.mark.parametrize("name", ON_GPUS)
def test_sharded_on_two_gpus(name: str, found_on_gpus: list[Found]) -> None:
    assert all(each[name] for each in found_on_gpus)


@pytest.mark.parametrize("name", WAYS)
def test_modules_train_as_in_one_process(name: str, found: list[Found]) -> None:
    """In float64 the order of a sum is all that is left between them, which turns no sign of a momentum."""
    expected = alone()
    for each in found:
        assert each[name].keys() == expected.keys()
        for key, x in expected.items():
            torch.testing.assert_close(each[name][key], x, rtol=1e-10, atol=1e-12 * float(x.abs().max()))


def test_storages_can_be_freed_after_a_call() -> None:
    """FSDP does so with whole parameters. NumPy's arrays of them must not hold them."""
    x, w = torch.ones(2, 3), torch.ones(3)
    ours.rms_norm(x, w)
    ours.lion(w, torch.ones(3), torch.zeros(3), 0.1)
    assert x.untyped_storage().resizable() and w.untyped_storage().resizable()


def test_every_operator_has_rules() -> None:
    assert RULES.keys() == OPERATORS.keys() - {"lion"}  # which steps local shards
