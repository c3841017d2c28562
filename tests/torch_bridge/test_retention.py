"""Retention in torch: what is kept for backward, schema."""

from typing import Any

import pytest
import torch

from dualops.torch_bridge import retention
from dualops.torch_bridge.retention import _operator, _operator_varlen

from .conftest import values

B, H, S, D, DV = 2, 3, 5, 4, 3


def made(device: str, *, states: bool = False) -> dict[str, torch.Tensor]:
    """Leaves by name, with those of a first state or without."""
    shapes = {"q": (B, H, S, D), "k": (B, H, S, D), "v": (B, H, S, DV)}
    shapes |= {"initial_state": (B, H, D, DV), "initial_norm": (B, H, D)} if states else {}
    tensors = {key: values(shape, torch.float64, device, seed) for seed, (key, shape) in enumerate(shapes.items())}
    return {key: x.requires_grad_() for key, x in tensors.items()}


@pytest.mark.parametrize(
    ("params", "kept"), [({}, 3), ({"normalize": "signed"}, 5), ({"form": "parallel", "normalize": "abs"}, 4)]
)
def test_results_are_kept_for_backward_where_it_reads_them(params: dict[str, Any], kept: int, device: str) -> None:
    leaves = made(device)
    saved: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o = retention(**leaves, **params)
    assert len(saved) == kept
    o.sum().backward()


def test_what_backward_needs_alone_has_no_gradient(device: str) -> None:
    leaves = made(device)
    given = {**leaves, "form": "chunk", "normalize": "signed", "return_state": True}
    o, state, norm, row_sum = _operator(*(given.get(key) for key in _operator.names))
    assert [x.requires_grad for x in (o, state, norm, row_sum)] == [True, True, True, False]
    assert row_sum.shape == (B, H, S)


def test_schema() -> None:
    """What an exported program depends on: a change here is one that CHANGELOG.md must tell."""
    tokens, states = "Tensor q, Tensor k, Tensor v, ", "Tensor? initial_state, Tensor? initial_norm"
    decay, saved = (
        "Tensor? gamma, Tensor? log_decay",
        "Tensor? o, Tensor? row_sum, Tensor? dstate, Tensor? dstate_norm, ",
    )
    options = 'float? scale=None, str form="chunk", str? normalize=None, bool return_state=False'
    expected = (
        f"dualops::retention({tokens}{decay}, Tensor? mask, {states}, {options}) "
        "-> (Tensor o, Tensor state, Tensor state_norm, Tensor row_sum)",
        f"dualops::retention_backward({tokens}Tensor do, {saved}{decay}, Tensor? mask, {states}, {options}) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dinitial_state, Tensor dinitial_norm, Tensor dlog_decay)",
    )
    backward = _operator.backward
    assert backward is not None
    assert (str(_operator.overload._schema), str(backward.overload._schema)) == expected
    assert f"Tensor cu_seqlens, {decay}" in str(_operator_varlen.overload._schema)
    assert "SymInt max_seqlen, float? scale=None, str? normalize=None" in str(_operator_varlen.overload._schema)
