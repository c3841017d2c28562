"""Whole training steps of a small Llama: checkpointing, CUDA graphs."""

import gc

import pytest
import torch

from tests.torch_bridge.llama import MODES, Mode, Training, batches, gradients
from tests.torch_bridge.operators import same_bits


def test_checkpointing_changes_no_bit(device: str) -> None:
    for dropout in (0.0, 0.25):
        kept = gradients(Mode(dropout=dropout), device)
        again = gradients(Mode(dropout=dropout, checkpointed=True), device)
        assert same_bits(tuple(kept.values()), tuple(again.values()))


def test_checkpointing_draws_the_same_seeds_again(device: str) -> None:
    """Where none are given they come from torch's generator."""
    found = []
    for checkpointed in (False, True):
        model = Mode(dropout=0.25, checkpointed=checkpointed).model(device)
        torch.manual_seed(5)
        model(*batches(1, device)).backward()
        found.append(tuple(p.grad for p in model.parameters() if p.grad is not None))
    assert same_bits(*found)
    other = Mode(dropout=0.25).model(device)
    torch.manual_seed(6)
    other(*batches(1, device)).backward()
    assert not same_bits(found[0], tuple(p.grad for p in other.parameters() if p.grad is not None))


@pytest.mark.cuda
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_captured_step_replayed(mode: Mode) -> None:
    """The bits of as many steps that are not captured, although nothing that the capture used is kept but the graph."""
    from tests.cuda.forget import forget

    plain, captured = (Training(mode, "cuda") for _ in range(2))
    first, later = batches(3, "cuda", seed=1), batches(100, "cuda", seed=2)
    side = torch.cuda.Stream()
    for training in (plain, captured):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            training.steps(first)
        torch.cuda.current_stream().wait_stream(side)
    assert same_bits(plain.state(), captured.state())
    captured.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    forget()
    junk = [torch.full((1 << 16,), -1, dtype=torch.int64, device="cuda") for _ in range(20)]
    gc.collect()
    for number, batch in enumerate(later):
        (expected,) = plain.steps([batch])
        captured.tokens.copy_(batch)
        graph.replay()
        assert torch.equal(captured.loss, expected), number
    assert same_bits(plain.state(), captured.state())
    del junk


@pytest.mark.cuda
def test_graphs_of_torch_compile() -> None:
    """The mode reduce-overhead captures what it can by itself."""
    mode, given = MODES["compiled"], batches(20, "cuda")
    plain = Training(mode, "cuda")
    losses = plain.steps(given)
    graphed = Training(mode, "cuda", graphs=True)
    assert same_bits(tuple(graphed.steps(given)), tuple(losses))
    assert same_bits(graphed.state(), plain.state())
