"""`python -m benchmarks scaling` on the CPU: NumPy in dualops' place, short sequences, and times that are made up."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import scaling_plot, scaling_run, workload
from benchmarks.__main__ import main
from benchmarks.contestant import Contestant
from benchmarks.scaling_run import NUMPY
from benchmarks.tree import spec

from .test_peers import referee

MEMORY = {"forward": 0, "backward": 3 << 20}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lengths of 8, 16 and 32, checked up to 16; a call takes 4 ms. Gives the names of those who were timed."""
    timed: list[str] = []

    def ours(operator: spec.Spec, case: spec.Case, rung: str | None = None) -> Contestant:
        made = referee(operator, case)
        return made._replace(name=f"dualops {rung}" if rung else "dualops")

    def seconds(call: Any) -> float:
        call()
        timed.append("burst")
        return 4e-3

    def memory(call: Any) -> int:
        return MEMORY["backward" if "do" in call.keywords else "forward"]

    monkeypatch.setattr(scaling_run, "LENGTHS", (8, 16, 32))
    monkeypatch.setattr(scaling_run, "NUMPY_UP_TO", 16)
    monkeypatch.setattr(scaling_run, "H", 2)
    monkeypatch.setattr(scaling_run, "D", 4)
    monkeypatch.setattr(scaling_run, "Workload", partial(workload.Workload, device="cpu"))
    monkeypatch.setattr(workload, "ROTATION_BYTES", 1)
    monkeypatch.setattr(scaling_run, "require_gpu", lambda: None)
    monkeypatch.setattr(scaling_run, "dualops_contestant", ours)
    monkeypatch.setattr(scaling_run, "burst", seconds)
    monkeypatch.setattr(scaling_run, "extra_memory", memory)
    monkeypatch.setattr(scaling_run, "seconds_of", lambda call: (call(), 0.5)[1])
    monkeypatch.setattr(
        scaling_run, "import_module", lambda name: SimpleNamespace(RUNGS={"flash_attention": ("naive", "simt")})
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a toy")
    return timed


def test_every_implementation_at_every_length_in_both_directions(toy: list[str]) -> None:
    shown: list[str] = []
    found = scaling_run.run(longest=32, show=shown.append)
    assert len(shown) == len(found)
    assert {(p.dtype, p.S) for p in found} == {(d, s) for d in ("float32", "bfloat16") for s in (8, 16, 32)}
    for dtype in ("float32", "bfloat16"):
        for S in (8, 16, 32):
            for direction in ("forward", "backward"):
                here = {p.who: p for p in found if (p.dtype, p.S, p.direction) == (dtype, S, direction)}
                assert list(here)[-3:] == ["dualops naive", "dualops simt", "SDPA efficient"]
                assert (NUMPY in here) == (S <= 16)
                for who in ("dualops naive", "dualops simt"):
                    assert (here[who].seconds, here[who].extra_memory) == (4e-3, MEMORY[direction])
                    assert here[who].flops == 2 * S * S * 2 * 4 * (2 if direction == "forward" else 5)
                if NUMPY in here:
                    assert (here[NUMPY].seconds, here[NUMPY].extra_memory) == (0.5, None)
                # torch has this backend on GPUs alone: what it says stands in its place
                assert here["SDPA efficient"].seconds is None
                assert "RuntimeError" in (here["SDPA efficient"].failure or "")


def test_a_wrong_dualops_stops_the_run_before_it_is_timed(toy: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(operator: spec.Spec, case: spec.Case, rung: str | None = None) -> Contestant:
        right = referee(operator, case)
        return Contestant(
            f"dualops {rung}", lambda **given: tuple(1.01 * x for x in right.forward(**given)), right.backward
        )

    monkeypatch.setattr(scaling_run, "dualops_contestant", wrong)
    with pytest.raises(workload.WrongResult, match="dualops naive forward s8-float32: "):
        scaling_run.run(longest=8, show=lambda text: None)
    assert not toy


def test_what_the_command_writes_is_drawn(toy: list[str], tmp_path: Path) -> None:
    source, target = tmp_path / "scaling" / "toy.json", tmp_path / "docs" / "scaling.png"
    assert main(["scaling", "--up-to", "16", "--json", str(source)]) == 0
    content = json.loads(source.read_text())
    assert (content["operator"], content["gpu"], content["heads"]) == ("flash_attention", "a toy", 2)
    assert len(content["points"]) == 2 * 2 * 2 * 4
    scaling_plot.picture(source, target)
    png = target.read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    assert width > 1200 and height > 900


def test_a_curve_for_each_contestant_and_dtype_that_has_a_value() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    points = [
        {"who": who, "dtype": dtype, "S": S, "flops": 10**12, "seconds": seconds, "extra_memory": memory}
        for who, dtype, S, seconds, memory in (
            ("NumPy reference", "float32", 512, 2.0, None),
            ("dualops simt", "bfloat16", 1024, 0.25, 0),
            ("dualops simt", "bfloat16", 512, 0.5, 0),
            ("dualops naive", "bfloat16", 512, 1.0, 2**20),
            ("dualops naive", "bfloat16", 1024, None, None),
        )
    ]

    def curves(value: Any) -> dict[str, list[tuple[float, float]]]:
        axes.clear()
        scaling_plot.draw(axes, points, value)
        lines: list[Any] = list(axes.get_lines())
        return {one.get_label(): list(zip(one.get_xdata(), one.get_ydata())) for one in lines}

    assert curves(scaling_plot.teraflops) == {
        "NumPy reference, float32": [(512, 0.5)],
        "dualops simt, bfloat16": [(512, 2.0), (1024, 4.0)],
        "dualops naive, bfloat16": [(512, 1.0)],
    }
    assert curves(scaling_plot.mebibytes) == {
        "dualops simt, bfloat16": [(512, 0.0), (1024, 0.0)],
        "dualops naive, bfloat16": [(512, 1.0)],
    }
