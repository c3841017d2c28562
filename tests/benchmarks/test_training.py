"""`python -m benchmarks training` on the CPU: a tiny Llama, a few steps, the figures, and a picture of such figures."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import training_plot, training_run
from benchmarks.__main__ import main
from benchmarks.training_run import TINY, PlainLion, Run, batches, entropy, make_model, table
from dualops.torch_bridge.optim import Lion


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "training" / "llama.json"
    assert main(["training", "--json", str(figures), "--tiny", "--steps", "4"]) == 0
    content = json.loads(figures.read_text())
    assert [run["who"] for run in content["runs"]] == list(training_run.WHO)
    ours, eager, exact = (run["losses"] for run in content["runs"])
    assert len(ours) == len(content["runs"][0]["seconds"]) == 4
    for losses in (ours, eager, exact):
        assert abs(losses[0] - math.log(TINY.config["vocab_size"])) < 0.2
    assert max(abs(x - y) for x, y in zip(ours, exact, strict=True)) < 5e-3
    assert content["parameters"] == sum(p.numel() for p in make_model(TINY, "cpu").parameters())
    *_, header, one, two, three, verdict = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["first", "loss"]
    assert [row[:16].strip() for row in (one, two, three)] == [who[:16] for who in training_run.WHO]
    assert "bfloat16's noise" in verdict


def test_the_large_one_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["training"]) == 1
    assert "needs a GPU; --tiny is for a CPU" in capsys.readouterr().err


def test_a_picture_of_what_was_recorded(tmp_path: Path) -> None:
    runs = [
        {"who": who, "losses": [10.0, 5.0], "seconds": [20.0, 0.2], "step": 0.2, "peak_memory": 20 << 30}
        for who in training_run.WHO
    ]
    content = {"runs": runs, "parameters": 1_100_000_000, "batch": 4, "length": 1024, "date": "2026-11-22"}
    content |= {"gpu": "NVIDIA H200", "commit": "0123456789", "floor": entropy()}
    (tmp_path / "h200.json").write_text(json.dumps(content))
    training_plot.picture(tmp_path / "h200.json", tmp_path / "docs" / "llama_training.png")
    png = (tmp_path / "docs" / "llama_training.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    assert 1400 < width < 2000
    assert height < 1000


def test_the_data_follow_their_rule_and_repeat() -> None:
    one, two = (list(batches(TINY, 40, "cpu")) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
    ids = torch.cat(one)
    assert len(ids.unique()) <= training_run.SYMBOLS
    after = torch.zeros(320, 320)
    after.index_put_((ids[:, :-1].flatten(), ids[:, 1:].flatten()), torch.ones(ids[:, 1:].numel()), accumulate=True)
    often = after.max(1).values.sum() / after.sum()
    assert 0.85 < often < 0.95
    assert 0.8 < entropy() < 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_lion_is_lion(dtype: torch.dtype) -> None:
    one, two = (torch.linspace(-1, 1, 12).to(dtype).requires_grad_() for _ in range(2))
    plain = PlainLion([one], 1e-2)
    lion = Lion([two], 1e-2, training_run.BETAS, training_run.WEIGHT_DECAY, master_weights=dtype is torch.bfloat16)
    for step in range(4):
        for param, optimizer in ((one, plain), (two, lion)):
            param.grad = torch.sin(torch.arange(12.0) + step).to(dtype)
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


def test_a_curve_that_is_too_far_off_is_said() -> None:
    ours, eager, exact = (
        Run(who, [5.0, last], [1.0, 1.0], None) for who, last in zip(training_run.WHO, (4.125, 4.25, 4.0))
    )
    assert table([ours, eager, exact]).splitlines()[-1].startswith("within bfloat16's noise: 0.1250")
    assert table([eager, ours, exact]).splitlines()[-1].startswith("within")
    far = Run(training_run.OURS, [5.0, 4.75], [1.0, 1.0], None)
    assert table([far, eager, exact]).splitlines()[-1].startswith("BEYOND bfloat16's noise: 0.7500")
