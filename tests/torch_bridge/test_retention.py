"""Retention in torch: gradients through states, memory, schema, compilation, what is kept for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from dualops.torch_bridge import retention
from dualops.torch_bridge.retention import _operator, _operator_varlen

from .conftest import values
from .operators import equal

B, H, S, D, DV = 2, 3, 5, 4, 3
STATES = ("initial_state", "initial_norm")
# parameters, and the optional arrays that a call is given
SETS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "chunk": ({"normalize": "signed", "return_state": True}, ("gamma", *STATES)),
    "mask": ({"form": "parallel", "normalize": "signed"}, ("mask",)),
}


def arguments(name: str, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a call: what is differentiable, leaves; and all else."""
    params, given = SETS[name]
    shapes = {"q": (B, H, S, D), "k": (B, H, S, D), "v": (B, H, S, DV)}
    shapes |= {"initial_state": (B, H, D, DV), "initial_norm": (B, H, D)} if "initial_state" in given else {}
    leaves = {
        key: values(shape, torch.float64, device, seed).requires_grad_()
        for seed, (key, shape) in enumerate(shapes.items())
    }
    more: dict[str, Any] = dict(params)
    if "gamma" in given:
        more["gamma"] = torch.tensor([1.0, 0.5, 0.95], dtype=torch.float64, device=device)
    if "mask" in given:
        more["mask"] = values((H, S, S), torch.float64, device, 7)
    return leaves, more


def results(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def gradients(function: Callable[..., Any], leaves: dict[str, torch.Tensor], more: dict[str, Any]) -> Any:
    """Of a sum that tells all elements of all results apart."""
    found = results(function(**leaves, **more))
    loss = sum((x * torch.arange(x.numel(), device=x.device).reshape(x.shape)).sum() for x in found)
    assert isinstance(loss, torch.Tensor)
    return torch.autograd.grad(loss, tuple(leaves.values()))


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# --- values and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["parallel", "chunk", "recurrent"])
@pytest.mark.parametrize("normalize", [None, "signed"])
def test_gradients_go_through_the_state_from_call_to_call(form: str, normalize: str | None, device: str) -> None:
    leaves, _ = arguments("plain", device)
    params: dict[str, Any] = {"form": form, "normalize": normalize, "return_state": True}

    def in_two(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        first, *states = retention(q[:, :, :2], k[:, :, :2], v[:, :, :2], **params)
        handed = dict(zip(STATES, states))
        rest, *states = retention(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], **params, **handed)
        return torch.cat([first, rest], dim=2), *states

    close(in_two(**leaves), retention(**leaves, **params))
    close(gradients(in_two, leaves, {}), gradients(retention, leaves, params))


def test_either_result_may_be_unused(device: str) -> None:
    leaves, more = arguments("chunk", device)
    whole = retention(**leaves, **more)
    tensors = tuple(leaves.values())
    together = torch.autograd.grad(sum((x.square().sum() for x in whole), torch.zeros((), device=device)), tensors)
    alone = [
        torch.autograd.grad(retention(**leaves, **more)[place].square().sum(), tensors, materialize_grads=True)
        for place in range(3)
    ]
    close(together, tuple(sum(parts) for parts in zip(*alone)))


@pytest.mark.parametrize(
    ("params", "kept"), [({}, 3), ({"normalize": "signed"}, 5), ({"form": "parallel", "normalize": "abs"}, 4)]
)
def test_results_are_kept_for_backward_where_it_reads_them(params: dict[str, Any], kept: int, device: str) -> None:
    leaves, _ = arguments("plain", device)
    saved: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o = retention(**leaves, **params)
    assert len(saved) == kept
    o.sum().backward()


def test_what_backward_needs_alone_has_no_gradient(device: str) -> None:
    leaves, _ = arguments("plain", device)
    given = {**leaves, "form": "chunk", "normalize": "signed", "return_state": True}
    o, state, norm, row_sum = _operator(*(given.get(key) for key in _operator.names))
    assert [x.requires_grad for x in (o, state, norm, row_sum)] == [True, True, True, False]
    assert row_sum.shape == (B, H, S)


def test_axes_in_memory_are_those_of_q_and_states_are_row_major(device: str) -> None:
    q, k, v = (values((B, S, H, width), torch.float32, device, width).transpose(1, 2) for width in (D, D, DV))
    o, state, norm = retention(q, k, v, normalize="signed", return_state=True)
    assert o.transpose(1, 2).is_contiguous() and state.is_contiguous() and norm.is_contiguous()
    torch.testing.assert_close(o, retention(q.contiguous(), k.contiguous(), v.contiguous(), normalize="signed"))


def test_without_tokens_the_state_goes_through(device: str) -> None:
    leaves, more = arguments("chunk", device)
    empty = {key: x[:, :, :0] if key in ("q", "k", "v") else x for key, x in leaves.items()}
    o, state, norm = retention(**empty, **more)
    assert o.shape == (B, H, 0, DV)
    equal((state, norm), (leaves["initial_state"], leaves["initial_norm"]))
    (found,) = torch.autograd.grad(state.sum(), leaves["initial_state"])
    equal(found, torch.ones_like(found))


# --- what torch demands of an operator -----------------------------------------------------------


def test_one_compilation_serves_every_length(device: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(retention, fullgraph=True, backend=counter, dynamic=True)
    for length in (5, 6, 9):
        q, k, v = (values((B, H, length, width), torch.float32, device, width) for width in (D, D, DV))
        found = compiled(q, k, v, normalize="signed", return_state=True)
        equal(results(found), results(retention(q, k, v, normalize="signed", return_state=True)))
    assert counter.frame_count == 1


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


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "what"), [("chunk", "gamma"), ("mask", "mask")])
def test_gradients_that_there_are_none_of_are_refused(name: str, what: str, device: str) -> None:
    """They must not be taken for zero."""
    leaves, more = arguments(name, device)
    more[what].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"retention_backward: {what} requires a gradient"):
        results(retention(**leaves, **more))[0].sum().backward()
