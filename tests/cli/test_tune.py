"""`dualops tune`: the ways that it lists without a GPU, the records that it deletes, and its errors."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops.cli import tune as command
from dualops.cuda.compiler import cache
from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.launch.operation import OPERATIONS
from dualops.cuda.tuning import records as tuned, tune as tuning
from dualops.spec import OPERATORS
from dualops.spec.text import case_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DUALOPS_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_what_would_be_timed(run):
    code, out, err = run("tune", "softmax", "--dry-run", "--problem", "x=300x4096:bfloat16", "--top", 2)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "softmax x=512x4096:bfloat16 axis=1 on NVIDIA H200"
    assert [line[:9] for line in lines[1:3]] == ["    simt ", "    sm90 "]
    assert lines[3].startswith("softmax_backward y=512x4096:bfloat16 dy=512x4096:bfloat16") and len(lines) == 6


def test_sizes_and_another_gpu(run):
    problem = "M=4096 N=4096 K=4096 transpose_b=True"
    code, out, _ = run("tune", "matmul", "--dry-run", "--arch", "sm_89", "--problem", problem, "--forward")
    assert code == 0
    assert out.startswith(
        "matmul a=4096x4096:bfloat16 b=4096x4096:bfloat16 transpose_b=True on NVIDIA GeForce RTX 4090"
    )
    assert "sm80  " in out and "sm90" not in out and "naive" not in out and len(out.splitlines()) == 9


def test_without_a_problem_it_is_what_the_operator_is_timed_at(run):
    _, out, _ = run("tune", "lion", "--dry-run", "--top", 1)
    assert out.count(" on NVIDIA H200") == len({case.id for case in OPERATORS["lion"].tagged(command.Tag.BENCH)})


def test_what_is_timed(run, monkeypatch: pytest.MonkeyPatch):
    """Forward, then the gradient, on the problem's arrays and with given results; their records are printed."""
    asked: list[Any] = []

    def stand_in(operator: str, *, begin: Any, **given: Any) -> str:
        asked.append((operator, given))
        begin("sm90  a Config")
        return f"the record of {operator}"

    def bench(job: Any, arrays: Any, kernel: Any) -> SimpleNamespace:
        results = {name: np.empty(meta.shape, np.float32) for name, meta in job.returned.items()}
        return SimpleNamespace(job=job, inputs=[arrays], outs=[results], results=lambda: results)

    monkeypatch.setattr(command, "missing", lambda: ())
    monkeypatch.setattr(command, "Bench", bench)
    monkeypatch.setattr(tuning, "tune", stand_in)
    code, out, err = run("tune", "softmax", "--problem", "x=3x8 axis=0", "--remeasure", "--top", 3)
    assert (code, out) == (0, "the record of softmax\n" * 2)
    assert err == "[1/6] sm90  a Config\n[2/6] sm90  a Config\n"
    (_, forward), (_, backward) = asked
    assert forward["x"].shape == (3, 8) and forward["axis"] == 0 and forward["out"][0].shape == (3, 8)
    assert {*backward} == {"y", "dy", "axis", "out", "backward", "top", "remeasure"}
    assert backward["backward"] and backward["remeasure"] and backward["top"] == 3


def test_what_was_measured_is_forgotten(run, folder):
    spec, case = case_of("softmax x=3x8", OPERATORS)
    device = dualops.cuda.launch.device.known("sm_90a")  # type: ignore[attr-defined]
    for backward in (False, True):
        operation = OPERATIONS["softmax"][backward]
        problem = absent_problem(spec, case, backward)
        tuned.keep(tuned.Timed(operation.op, problem, {}, device, ()), {tuned.Way("simt", "a Config"): 1e-3})
    (file,) = folder.glob("tuned/softmax/*.record")
    assert json.loads(cache.read(file) or b"")["problem"] == "softmax x=4x8:float32 axis=1"
    assert run("tune", "matmul", "--clear")[:2] == (0, "0 records forgotten\n")
    assert run("tune", "softmax", "--clear")[:2] == (0, "2 records forgotten\n")
    assert run("tune", "--clear")[:2] == (0, "0 records forgotten\n")


@pytest.mark.parametrize("arguments", [("--dry-run",), ("--problem", "x=3x8"), ("--forward",), ("--remeasure",)])
def test_only_all_of_an_operator_is_forgotten(run, folder, arguments):
    code, out, err = run("tune", "softmax", "--clear", *arguments)
    assert (code, out) == (2, "") and "expected no other option with it" in err and not list(folder.iterdir())


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("too many resources"), "too many resources"),
        (OSError("no space left"), "no space left"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_one_line_for_what_goes_wrong_meanwhile(run, monkeypatch: pytest.MonkeyPatch, error, message):
    def stand_in(*given: Any) -> int:
        raise error

    monkeypatch.setattr(command, "missing", lambda: ())
    monkeypatch.setattr(command, "_tune", stand_in)
    assert run("tune", "softmax", "--problem", "x=3x8") == (2, "", f"dualops tune: {message}\n")


def test_nothing_is_timed_before_all_of_it_can_be(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "missing", lambda: ())
    monkeypatch.setattr(command, "_tune", lambda *given: pytest.fail("something was timed"))
    code, _, err = run("tune", "softmax", "--problem", "x=3x8", "--problem", "x=3x8 axis=5")
    assert code == 2 and "softmax: axis is 5" in err
    monkeypatch.setenv("DUALOPS_CACHE_DIR", "/dev/null/below")
    code, _, err = run("tune", "softmax", "--problem", "x=3x8")
    assert code == 2 and "DUALOPS_CACHE_DIR names another place" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("softmin",), "no operator softmin, expected one of flash_attention, "),
        ((), "no operator, expected one of flash_attention, "),
        (("softmax",), "Or --dry-run, which needs no GPU."),
        (("softmax", "--top", "0", "--dry-run"), "--top is 0, expected at least 1"),
        (("softmax", "--arch", "a100"), "--arch a100: tune times this GPU; name another one only with --dry-run"),
        (("softmax", "--dry-run", "--arch", "h900"), "arch is 'h900', expected one of "),
        (("softmax", "--dry-run", "--problem", "x=3x"), "softmax: x=3x, expected a shape"),
        (("softmax", "--dry-run", "--problem", "x=3x4@10"), "arrays are made dense, expected none with @"),
        (("matmul", "--dry-run", "--problem", "M=4096"), "matmul: no "),
        (("softmax", "--dry-run", "--problem", "x=3x4 axis=5"), "softmax: axis is 5"),
    ],
)
def test_one_line_for_what_is_wrong(run, monkeypatch: pytest.MonkeyPatch, arguments, message):
    monkeypatch.setattr(command, "missing", lambda: ("There is no driver.",))
    code, out, err = run("tune", *arguments)
    assert code == 2 and not out
    assert err.startswith("dualops tune: ") and message in err and len(err.splitlines()) == 1
