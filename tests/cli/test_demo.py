"""The demo: exit codes, what its lines and its table say, what it refuses."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualops import reference
from dualops.cli import SUBCOMMANDS
from dualops.cli.afterwards import afterwards
from dualops.cli.problems import tasks
from dualops.cuda.compiler import cache
from dualops.spec import OPERATORS

LINE = r"(\w+) +(\d+) of \2 within tolerance, worst at \d+ % of allowed"


def test_a_line_an_operator_one_for_the_whole_and_what_to_try_next(run, simulator, monkeypatch):
    simulator()
    monkeypatch.setattr("dualops.cli.afterwards.sys.executable", str(Path.cwd() / ".venv/bin/python"))
    code, out, _ = run("demo")
    assert code == 0
    assert max(map(len, re.sub(r"\S+/python[\d.]*", "python", out).splitlines())) <= 80
    *lines, last, title, first, second, third = out.splitlines()
    assert title == "Try next:"
    assert first == "  .venv/bin/python -m dualops demo flash_attention -v     errors, time, memory"
    assert [line.split()[4] for line in (first, second, third)] == ["flash_attention", "softmax", "what"]
    found = [re.fullmatch(LINE, line) for line in lines]
    assert [match and match[1] for match in found] == list(OPERATORS)
    assert len({match.start(2) for match in found if match}) == 1  # one below another
    counts = {match[1]: int(match[2]) for match in found if match}
    assert counts["softmax"] == 2 * 2 * len(OPERATORS["softmax"].rungs)  # two dtypes, forward and gradient
    total = sum(counts.values())
    assert re.fullmatch(rf"{total} of {total} within tolerance, in the simulator, [\d.]+ s\. Details: --verbose", last)


def test_what_to_try_next_are_calls_that_there_are():
    for place in ("gpu", "simulator", "reference"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dualops.cli.afterwards.shutil.which", lambda name: sys.executable)
            commands = [line.plain.partition("python -m dualops ")[2] for line in afterwards(place)][1:]
        assert len(commands) == 3
        for line in commands:
            parser = argparse.ArgumentParser()
            command, *words = re.split(r" {2,}", line)[0].split()
            SUBCOMMANDS[command].add_arguments(parser)
            parser.parse_args(words)


def test_a_fall_back_to_the_simulator_is_reported_and_a_choice_is_not(run, simulator, monkeypatch):
    simulator()
    words = ("demo", "rope_tables", "--dtype", "float32")
    message = "dualops demo: kernels run in the simulator. There is no driver.\n"
    assert run(*words)[2].startswith(message)
    assert run(*words, "--where", "simulator")[2].startswith("[1/")
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert run(*words)[2].startswith("[1/")


def test_what_is_not_checked_is_reported_with_its_reason_unless_that_was_wanted(run, simulator, monkeypatch):
    simulator()
    words = ("demo", "softmax", "--kernel", "simt", "--dtype", "float32")
    code, out, _ = run(*words, "--no-check")
    assert code == 0
    assert re.fullmatch(r"softmax  1 not checked\n1 not checked, in the simulator, [\d.]+ s\. .*\n", out)
    monkeypatch.setattr("dualops.cli.demo.CHECK_LIMIT", 0)
    out = run(*words)[1]
    assert "\nsoftmax was not checked: the reference needs about 0.1 s; --check checks anyway\n" in out
    assert run(*words, "--check")[1].startswith("softmax  1 of 1 within tolerance, worst at ")


def test_a_gradient_alone_has_a_line_of_its_own(run, simulator):
    simulator()
    code, out, _ = run("demo", "softmax_backward", "--dtype", "float32")
    count = len(OPERATORS["softmax"].rungs)
    assert code == 0 and out.startswith(f"softmax_backward  {count} of {count} within tolerance, worst at ")


def test_verbose_shows_every_operator_with_its_errors(run):
    code, out, err = run("demo", "--where", "reference", "--verbose")
    assert code == 0
    for name, task in tasks().items():
        for dtype in ("float32",) if task.spec.parent else ("float32", "bfloat16"):
            below = rf"^{name}, reference, {dtype}: [^\n]*\n( [^\n]*\n)*?(rung [^\n]*\n)?  NumPy +\d\.\de[-+]\d\d"
            assert re.search(below, out, re.MULTILINE), (name, dtype)
    shown = re.findall(r"^(\w+), reference, ", out, re.MULTILINE)
    assert max(map(len, re.sub(r"\S+/python[\d.]*", "python", out).splitlines())) <= 80
    assert shown[0] == next(iter(OPERATORS)) == "flash_attention"
    assert f"[1/{len(shown)}]" in err and f"[{len(shown)}/{len(shown)}]" in err  # plain progress: this is no terminal


def test_attention_leads_in_both_directions_with_a_row_of_options_on_every_rung(run, simulator):
    simulator()
    code, out, _ = run("demo", "--verbose")
    assert code == 0
    shown = re.split(r"^(\w+), simulator, ", out, flags=re.MULTILINE)[1:]
    names, runs = shown[::2], shown[1::2]
    assert list(dict.fromkeys(names)) == list(tasks())
    rungs = OPERATORS["flash_attention"].rungs
    for name in ("flash_attention", "flash_attention_backward"):
        mine = [output for each, output in zip(names, runs, strict=True) if each == name]
        assert [re.findall(r"^  (\w+) +\d", output, re.MULTILINE) for output in mine] == [[*rungs]] * 2
    assert max(map(len, re.sub(r"\S+/python[\d.]*", "python", out).splitlines())) <= 80
    shapes = next(case.shapes for case in OPERATORS["flash_attention"].cases if case.name == "sim_options_1")
    arrays = [f"{name} {'×'.join(map(str, shapes[name]))}" for name in ("bias", "key_padding_mask")]
    for words in (*arrays, "softcap=1.5", "score_mod=bent"):
        assert out.count(words) == 2  # once a direction, however many rungs
    assert "3 KiB" in out  # the kernels' additional memory


def test_the_reference_runs_once_for_all_rungs(run, simulator, monkeypatch):
    simulator()
    calls = []
    right = reference.softmax
    monkeypatch.setattr(reference, "softmax", lambda *args, **given: calls.append(given) or right(*args, **given))
    assert run("demo", "softmax", "--dtype", "float32")[0] == 0
    assert len(calls) == 2 + len(OPERATORS["softmax"].rungs)  # truth, baseline, and the stand-in for each rung


def test_one_rung_can_be_forced(run, simulator):
    simulator()
    code, out, _ = run("demo", "softmax", "--kernel", "simt", "--verbose")
    assert code == 0 and "simt" in out and "naive" not in out


def test_error_over_its_tolerance_is_exit_code_1(run, simulator):
    def one_element_off(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x.reshape(-1)[7] += x.dtype.type(0.01)
        return x

    simulator(one_element_off)
    for verbose in ((), ("--verbose",)):
        code, out, _ = run("demo", "softmax", "--dtype", "float32", *verbose)
        assert code == 1
        first, *lines = out.splitlines()
        rungs = OPERATORS["softmax"].rungs
        count = len(rungs)
        assert first == f"softmax  {count} of {count} OVER TOLERANCE, worst at > 999 % of allowed"
        failures = [line for line in lines if line.startswith("over its tolerance: softmax, ")]
        for rung, line in zip(rungs, failures, strict=True):  # in full, whatever was asked for
            assert f", {rung}: y: max error " in line and "worst at (0, 7)" in line
        assert lines[-1].startswith(f"{count} of {count} OVER TOLERANCE, in the simulator, ")
        assert ("FAILS" in out) == bool(verbose)


def test_unwritten_result_is_exit_code_1(run, simulator):
    simulator(lambda x: np.full_like(x, np.nan))
    code, out, _ = run("demo", "flash_attention", "--dtype", "bfloat16")
    assert code == 1 and "nan at (0, 0, 0, 0)" in out


def test_lse_on_request_is_saved_and_checked(run, tmp_path):
    q = np.random.default_rng(0).standard_normal((1, 1, 5, 4)).astype(np.float32)
    np.savez(tmp_path / "in.npz", q=q, k=q, v=q)
    arguments = ("--where", "reference", "--input", tmp_path / "in.npz", "--output", tmp_path / "out")
    assert run("demo", "flash_attention", *arguments, "--param", "return_lse=True")[0] == 0
    saved = np.load(tmp_path / "out")  # under the very name that was given
    assert saved["o"].shape == (1, 1, 5, 4) and saved["lse"].shape == (1, 1, 5)


def refused(result: tuple[int, str, str], *messages: str) -> None:
    code, out, err = result
    assert code == 2
    lines = err.strip().splitlines()
    assert lines[-1].startswith("dualops demo: ")
    assert not any("Traceback" in line for line in lines) and not out
    for words in messages:
        assert words in lines[-1]


def test_too_slow_for_the_simulator(run, simulator, tmp_path):
    simulator()
    q = np.zeros((1, 8, 512, 64), np.float32)
    np.savez(tmp_path / "in.npz", q=q, k=q, v=q)
    arguments = ("--input", tmp_path / "in.npz", "--output", tmp_path / "out.npz")
    result = run("demo", "flash_attention", *arguments)
    refused(result, "the simulator would need about", " min; ", "--where reference", ", the check included")
    assert not (tmp_path / "out.npz").exists()
    refused(run("demo", "flash_attention", *arguments, "--no-check"), " as NumPy in about 0.1 s")
    assert run("demo", "flash_attention", *arguments, "--where", "reference")[0] == 0


def test_no_gpu(run, monkeypatch):
    monkeypatch.setattr("dualops.cli.place.missing", lambda: ("There is no driver.", "There is no numba-cuda."))
    message = "There is no driver. There is no numba-cuda. --where simulator and --where reference need no GPU."
    refused(run("demo", "--where", "gpu"), message)


def test_numba_switched_otherwise_before(run, simulator):
    simulator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dualops.cli.place.missing", tuple)
        refused(run("demo", "--where", "gpu"), "start a new process")


NUMPY = ("softmax", "--where", "reference")
# words -> parts of the line that refuses them; of files, tests/cli/test_npz.py has more
REFUSED: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "unknown operator": (("sotfmax",), ("no operator sotfmax", f"expected one of {', '.join(tasks())}")),
    "input without operator": (("--input", "x.npz"), ("--input needs an operator",)),
    "param without operator": (("--param", "axis=0"), ("--param needs an operator",)),
    "kernel without operator": (("--kernel", "simt"), ("--kernel needs an operator",)),
    "output without input": (("softmax", "--output", "o.npz"), ("--output needs --input",)),
    "missing file": ((*NUMPY, "--input", "no.npz"), ("No such file",)),
    "a folder": ((*NUMPY, "--input", "."), ("Is a directory",)),
    "no value": ((*NUMPY, "--param", "axis"), ("--param axis", "of axis")),
    "no parameter": ((*NUMPY, "--param", "axes=1"), ("--param axes=1", "of axis")),
    "no name": ((*NUMPY, "--param", "=1"), ("--param =1", "of axis")),
    "bad value": ((*NUMPY, "--param", "axis=9"), ("softmax: axis is 9",)),
    "no rung": ((*NUMPY, "--kernel", "sm0"), (f"sm0: softmax has {', '.join(OPERATORS['softmax'].rungs)}",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_reported_in_a_line(run, tmp_path, monkeypatch, name):
    words, messages = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    refused(run("demo", *words), *messages)


def test_output_that_cannot_be_written(run, tmp_path):
    np.savez(tmp_path / "in.npz", x=np.zeros((3, 4)))
    output = Path(tmp_path / "nowhere" / "out.npz")
    result = run("demo", "softmax", "--where", "reference", "--input", tmp_path / "in.npz", "--output", output)
    code, _, err = result
    assert code == 2 and "No such file or directory" in err.splitlines()[-1]


def test_info_tells_what_is_missing_to_the_last_bracket(run, simulator, monkeypatch, tmp_path):
    simulator()
    monkeypatch.setitem(sys.modules, "dualops.cuda.compiler.cache", cache)
    monkeypatch.setenv("DUALOPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("dualops.cli.place.missing", lambda: ("There is no driver.", "Do: pip install 'this[cu13]'."))
    code, out, _ = run("info")
    assert code == 0
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert [value.strip() for name, value in lines if name == "missing"] == [
        "There is no driver.",
        "Do: pip install 'this[cu13]'.",
    ]
    assert ["device", "the simulator: kernels can't run on a GPU here"] in [
        [name, value.strip()] for name, value in lines
    ]
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    _, out, _ = run("info")
    assert "the simulator: NUMBA_ENABLE_CUDASIM is set" in out and "missing" not in out
