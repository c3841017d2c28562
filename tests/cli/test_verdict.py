"""The demo's lines: what they say of runs that pass, fail or were not checked, how long they are; the bar."""

import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualops import reference
from dualops.cli.measure import Measurement
from dualops.cli.own import own_jobs
from dualops.cli.problems import tasks
from dualops.cli.report import Row, percent, print_table
from dualops.cli.verdict import last_line, operator_line, remarks
from dualops.spec import OPERATORS, Accuracy
from dualops.spec.accuracy import Errors
from tests.processes import python_path

LONGEST = max(OPERATORS, key=len)
JOBS = {name: own_jobs(tasks()[name], "gpu", {}, "bfloat16")[0] for name in ("softmax", "flash_attention")}


def row(ratio: float | None = 0.5, name: str = "softmax", roof: float | None = None, **run: Any) -> Row:
    """A run that came out at this share of what is allowed, or was not checked."""
    job = JOBS[name]
    own = Measurement({"y": np.zeros((2, 3), np.float32)}, "simt", 1e-3, 0, roof_seconds=roof and roof * 1e-3, **run)
    errors = Errors(ratio or 0, 0)
    found = None if ratio is None else Accuracy(ratio <= 1, errors, errors, Errors(1, 1), (), "")
    return Row(job, own, found, [] if ratio is None or ratio <= 1 else [f"y: off by {ratio}"])


def line(*rows: Row, name: str = "softmax", width: int = 0) -> str:
    return operator_line(name, width, rows).plain


def test_what_passes():
    assert line(row(0.1), row(0.5), row(0.02)) == "softmax  3 of 3 within tolerance, worst at 50 % of allowed"
    assert line(row(0), width=9) == "softmax    1 of 1 within tolerance, worst at 0 % of allowed"


def test_what_fails_is_counted_and_has_no_speed():
    assert line(row(0.1), row(8.3)) == "softmax  1 of 2 OVER TOLERANCE, worst at 830 % of allowed"
    assert line(row(np.inf, roof=0.9)) == "softmax  1 of 1 OVER TOLERANCE, worst at > 999 % of allowed"


def test_what_was_not_checked():
    assert line(row(None), row(None)) == "softmax  2 not checked"
    assert line(row(None), row(0.5)) == "softmax  1 of 1 within tolerance (worst 50 %), 1 not checked"


def test_the_best_speed():
    assert line(row(roof=0.5), row(roof=0.97)) == "softmax  2 of 2 within tolerance (worst 50 %), 97 % of roof"
    fast = [row(name="flash_attention", flops=flops) for flops in (10**9, 637 * 10**9)]
    assert all(each.job.compute_bound for each in fast)
    assert line(*fast) == "softmax  2 of 2 within tolerance (worst 50 %), 637 TFLOP/s"
    assert line(*fast, row(roof=0.97)) == "softmax  3 of 3 within tolerance (worst 50 %), 637 TFLOP/s"
    assert line(row(None, roof=1.05)) == "softmax  1 not checked, 105 % of roof"


@pytest.mark.parametrize("options", [{}, {"roof": 1.05}, {"name": "flash_attention", "flops": 1234 * 10**9}])
@pytest.mark.parametrize("ratio", [1.0, 1e9])
def test_no_line_has_more_than_80_columns(options, ratio):
    rows = [row(ratio, **options)] * 24
    assert len(line(*rows, name=LONGEST)) <= 80
    assert len(line(*rows[1:], row(None, **options), name=LONGEST)) <= 80
    for place in ("gpu", "simulator", "reference"):
        assert len(last_line(rows * 10, place, 7000, verbose=False).plain) <= 80


def test_the_last_line():
    rows = [row(0.5)] * 3
    assert last_line(rows, "gpu", 200, verbose=True).plain == "3 of 3 within tolerance, on the GPU, 3 min"
    expected = "3 of 3 within tolerance, 1 not checked, as NumPy, 2 s. Details: --verbose"
    assert last_line([*rows, row(None)], "reference", 2, verbose=False).plain == expected
    assert last_line([*rows, row(2.0)], "gpu", 2, verbose=True).plain == "1 of 4 OVER TOLERANCE, on the GPU, 2 s"
    assert last_line([row(None)], "gpu", 2, verbose=True).plain == "1 not checked, on the GPU, 2 s"


def test_remarks():
    lines = [text.plain for text in remarks([row(0.5), row(2.0), row(None), row(None)], None, said=True)]
    failure, unchecked = lines
    assert failure == f"over its tolerance: softmax, {JOBS['softmax'].title}, simt: y: off by 2.0"
    assert unchecked == "softmax was not checked: the reference needs about 3 s; --check checks anyway"
    assert [*remarks([row(None)], None, said=False)] == []
    (written,) = remarks([row(0.5)], Path("o.npz"), said=True)
    assert written.plain == "wrote o.npz: y 2×3 float32"


def test_percent():
    assert [percent(share) for share in (0, 0.004, 0.5, 1.05, 9.99, 10, np.inf)] == [
        *("0 %", "0 %", "50 %", "105 %", "999 %"),
        *("> 999 %", "> 999 %"),
    ]


def on_terminal(*words: str) -> tuple[int, str]:
    """Exit code of the command line, and all that it writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NUMBA_ENABLE_CUDASIM", "NO_COLOR")}
    environment = {**kept, "PYTHONPATH": python_path(), "TERM": "xterm", "COLUMNS": "80"}
    command = [sys.executable, "-m", "dualops", *words]
    with subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 4096) if select.select([ours], [], [], 60)[0] else b""
            except OSError:  # nobody writes there any more
                part = b""
            if not part:
                break
            written += part
    os.close(ours)
    return process.returncode, re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", written.decode())


def test_a_bar_on_a_terminal_and_lines_that_stay():
    code, output = on_terminal("demo", "softmax", "--where", "reference")
    assert code == 0
    assert re.search(r"1/2 .* left softmax", output) and re.search(r"2/2 .* left softmax", output)
    stays = [line.lstrip("\r") for line in output.replace("\r\n", "\n").split("\n") if " left " not in line]
    assert "softmax  2 of 2 within tolerance, worst at 50 % of allowed" in stays
    assert stays[-2].startswith("2 of 2 within tolerance, as NumPy, ") and stays[-1] == ""


def test_long_lines_are_broken_between_words_on_a_terminal():
    code, output = on_terminal("demo", "sotfmax")
    assert code == 2
    found = output.replace("\r\n", "\n").strip().split("\n")
    assert found[0].startswith("dualops demo: no operator sotfmax, expected one of ")
    assert len(found) > 1 and max(map(len, found)) <= 80
    assert re.split(r",\s+", " ".join(found))[1:] == ["expected one of flash_attention", *list(tasks())[1:]]


def test_the_table_of_a_gpu_has_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Also where nothing is short: a failure, a name of all arguments, a rung that was not checked."""
    monkeypatch.setenv("COLUMNS", "80")
    rows = [
        row(np.inf, roof=0.97),
        row(0.5, flops=10**12),
        row(None, "flash_attention", flops=637 * 10**9),
        row(0.5, "flash_attention", flops=1),
    ]
    print_table(rows, "gpu")
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    for text in ("> 999 %", "FAILS", "97 %", "637 TFLOP/s", "not", "checked", "1 ms", "0 B"):
        assert text in words
    assert "softmax, gpu, bfloat16: x " in out and "flash_attention, gpu, bfloat16: q " in out


def test_what_nothing_was_held_against_is_over_its_tolerance(run, tmp_path):
    """Rows near 1e30 overflow in float32: NumPy's own result is 0, and no tolerance follows from that."""
    np.savez(tmp_path / "in.npz", x=np.full((2, 8), 1e30, np.float32))
    code, out, _ = run("demo", "rms_norm", "--where", "reference", "--input", tmp_path / "in.npz")
    assert code == 1
    assert out.startswith("rms_norm  1 of 1 OVER TOLERANCE, worst at > 999 % of allowed\n")
    assert "y: nothing is checked: the baseline, float32 arithmetic rounded to float32, is off by 1.00e+00" in out


def test_a_gradient_that_cancels_to_nothing_is_measured_by_its_terms(run, tmp_path):
    """A query with a single key has no gradient: what float32 leaves of it is far above the truth, and right."""
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 1, 2, 1, 64)).astype(np.float32)
    o, lse = reference.flash_attention(q, k, v, return_lse=True)
    np.savez(tmp_path / "in.npz", q=q, k=k, v=v, o=o, lse=lse, do=do)
    words = ("--where", "reference", "--input", tmp_path / "in.npz")
    code, out, _ = run("demo", "flash_attention_backward", *words)
    assert code == 0 and "1 of 1 within tolerance" in out
