"""rope in torch: tables as Hugging Face has them, in place, tables, errors."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.exc import Unsupported

from dualops import reference
from dualops.torch_bridge import rope, rope_tables

from .conftest import DTYPES, values
from .operators import compiled, equal, tensor

B, H, HKV, S, D, R, ROWS = 2, 3, 1, 5, 8, 6, 9
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": None}


class Arguments(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None

    def __call__(self, function: Callable[..., Any] = rope, *, dim: int | None = R, **options: Any) -> Any:
        return function(self.q, self.k, self.cos, self.sin, positions=self.positions, dim=dim, **options)


def arguments(form: str, dtype: torch.dtype = torch.float64, device: str = "cpu", *, S: int = S) -> Arguments:
    """q as projections leave it, tokens before heads in memory; k row-major."""
    q = values((B, S, H, D), dtype, device).transpose(1, 2)
    k = values((B, HKV, S, D), dtype, device, seed=1)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    cos, sin = rope_tables(torch.arange(2, 2 + ROWS, device=device), R, dtype=wide)
    positions = None
    if form == "batches":
        rows = torch.arange(B * S, device=device).reshape(B, S) % ROWS
        cos, sin = cos[rows], sin[rows]
    elif form == "positions":
        positions = torch.arange(S, device=device).flip(0)
    elif form == "own positions":
        positions = (torch.arange(B * S, device=device).reshape(B, S) * 5 % ROWS).to(torch.int32)
    return Arguments(q, k, cos, sin, positions)


def test_it_is_the_formula_of_hugging_face(device: str) -> None:
    """Tables as wide as the rotary dimensions, as they are; a part of the dimensions with them is not guessed."""
    given = arguments("rows", torch.float64, device)
    q, wide = given.q[..., :R], [torch.cat((x, x), -1)[None, :S] for x in (given.cos, given.sin)]
    other = torch.cat((-q[..., R // 2 :], q[..., : R // 2]), -1)
    theirs = q * wide[0][:, None] + other * wide[1][:, None]
    for ours, _ in (rope(q, q, wide[0], wide[1]), compiled(rope)(q, q, wide[0], wide[1])):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    thrice = torch.cat((q, q, q), -1)
    with pytest.raises(ValueError, match=f"rope: cos has {R} columns, q has D={3 * R}, .*for a part of D give dim"):
        rope(thrice, thrice, wide[0], wide[1])
    part, _ = rope(thrice, thrice, wide[0], wide[1], dim=R)
    torch.testing.assert_close(part, torch.cat((theirs, q, q), -1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("form", ["rows", "batches", "positions", "own positions"])
def test_in_place(form: str, device: str) -> None:
    given, interleaved = arguments(form, torch.bfloat16, device), form in ("rows", "positions")
    expected = given(interleaved=interleaved)
    for function in (rope, compiled(rope)):
        fresh = given._replace(q=given.q.clone(), k=given.k.clone())
        versions = [x._version for x in fresh[:2]]
        found = fresh(function, interleaved=interleaved, inplace=True)
        for one, two, own, before in zip(found, expected, fresh, versions):
            assert one is own and one._version > before
            equal(one, two)
    with torch.inference_mode():
        fresh = given._replace(q=given.q.clone(), k=given.k.clone())
        for one, two in zip(fresh(inplace=True, interleaved=interleaved), expected, strict=True):
            equal(one, two)


def test_in_place_where_a_gradient_is_wanted(device: str) -> None:
    given = arguments("rows", torch.float32, device)
    given = given._replace(q=given.q.requires_grad_(), k=given.k.requires_grad_())
    message = "rope: inplace is True and q requires a gradient, which is not implemented; leave inplace out"
    for function, error in ((rope, NotImplementedError), (compiled(rope), Unsupported)):
        with pytest.raises(error, match=message):
            given(function, inplace=True)
    expected = given._replace(q=given.q.detach(), k=given.k.detach())()
    with torch.no_grad():
        for one, two in zip(given(inplace=True), expected, strict=True):
            equal(one, two)


def test_what_was_saved_for_a_gradient_and_then_rotated_in_place(device: str) -> None:
    given = arguments("rows", torch.float32, device)
    weight = torch.ones((), device=device, requires_grad=True)
    product = weight * given.q  # keeps q
    given(inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7,), (2, 3)])
def test_tables_are_the_references(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    positions = (torch.arange(prod(shape)) * 1001).reshape(shape)
    name = str(dtype).removeprefix("torch.")
    expected = reference.rope_tables(positions.numpy(), 10, base=500000.0, scaling=LLAMA3, dtype=name)
    for given in (dtype, name):
        found = rope_tables(positions.to(device), 10, base=500000.0, scaling=LLAMA3, dtype=given)
        for one, two in zip(found, expected, strict=True):
            assert one.dtype is dtype
            torch.testing.assert_close(one.cpu(), tensor(two, "cpu"), rtol=0, atol=2.0**-24 if device == "cuda" else 0)


@pytest.mark.parametrize("scaling", [None, ("linear", 2.0), LLAMA3, YARN], ids=str)
def test_compiled_and_exported_tables_are_eager(scaling: Any, device: str) -> None:
    positions = torch.arange(6, device=device)

    class Module(torch.nn.Module):
        def forward(self, positions: torch.Tensor) -> Any:
            return rope_tables(positions + 1, 8, scaling=scaling, dtype=torch.bfloat16)

    expected, exported = Module()(positions), torch.export.export(Module(), (positions,))
    equal(compiled(Module())(positions), expected)
    equal(exported.module()(positions), expected)


def test_dtypes_that_tables_do_not_have(device: str) -> None:
    with pytest.raises(ValueError, match=r"rope_tables: dtype is .*expected one of 'float64'"):
        rope_tables(torch.arange(3, device=device), 8, dtype=torch.int8)
