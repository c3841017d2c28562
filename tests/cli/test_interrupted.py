"""Ctrl-C, a reader who leaves, and what a command without a subcommand says."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dualops import __version__
from dualops.cli import SUBCOMMANDS
from tests.processes import python_path

KEPT = {"warm": "; what was compiled is kept", "tune": "; what was timed is kept"}


def interrupted(*_: Any) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_ctrl_c_is_a_line_and_130(run, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(SUBCOMMANDS[name], "run", interrupted)
    words = ["softmax"] if name in ("new", "estimate") else []
    assert run(name, *words) == (130, "", f"dualops {name}: interrupted{KEPT.get(name, '')}\n")


# in the place of what takes a while: it says so on stdout, and then waits forever
WAITS = """
import signal, sys, threading
from types import SimpleNamespace
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell did that started this

def wait(*_, **__):
    print("begun", flush=True)
    threading.Event().wait()

{change}
from dualops.__main__ import main
sys.argv = ["dualops", *{words}]
sys.exit(main())
"""
PLACES = {
    "demo": (["demo", "softmax", "--where", "reference"], "import dualops.reference as r; r.softmax = wait"),
    "demo, in the simulator": (
        ["demo", "softmax", "--where", "simulator"],
        "import os; os.environ['NUMBA_ENABLE_CUDASIM'] = '1'; import dualops.cuda as c; c.softmax = wait",
    ),
    "info": (["info"], "import dualops.cli.info as i; i.ask_driver = wait"),
    "check": (["check", "lion", "--arch", "sm_80"], "{compiler}; o.build_all = wait"),
    "check, compiling": (["check", "lion", "--arch", "sm_80"], "{compiler}; k.lto_ir = wait"),
    "check, in processes": (["check", "lion", "--arch", "sm_80", "--jobs", "2"], "{compiler}; b.as_completed = wait"),
    "warm": (["warm", "lion", "--arch", "sm_80"], "{compiler}; o.to_warm = wait"),
    "estimate": (["estimate", "softmax"], "import dualops.estimate as c; c.rankings = wait"),
    "tune": (["tune", "softmax", "--dry-run"], "import dualops.cuda.compiler.offline as o; o.absent_problem = wait"),
    "new": (["new", "l2_norm"], "import dualops.cli.new as n; n.drafts = wait"),
    "while it is imported": (["info"], "import numpy; wait_before = sys.meta_path.insert(0, SimpleNamespace("
                             "find_spec=lambda name, *_: wait() if name == 'dualops.cli' else None))"),
}  # fmt: skip
COMPILER = "import dualops.cuda; from dualops.cuda.compiler import offline as o, compile as k, binaries as b"


@pytest.mark.parametrize("name", PLACES)
def test_ctrl_c_wherever_it_comes(tmp_path: Path, name: str):
    """A process that is sent SIGINT while it works: no traceback, and nothing after the line."""
    words, change = PLACES[name]
    if "{compiler}" in change:
        pytest.importorskip("numba_cuda", reason="NVIDIA publishes no compiler for this system")
    script = WAITS.format(change=change.replace("{compiler}", COMPILER), words=words)
    environment = {**os.environ, "PYTHONPATH": python_path(), "DUALOPS_CACHE_DIR": str(tmp_path)}
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stdout and running.stderr
        for line in running.stdout:
            if line == "begun\n":
                break
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to all of its processes
        out, err = running.stdout.read(), running.stderr.read()
        code = running.wait()
    command_name = "" if name.startswith("while") else f" {words[0]}"
    lines = [line for line in err.splitlines() if not line.startswith("[")]  # but for the progress
    lines = [line for line in lines if "kernels run in the simulator" not in line]
    assert (code, lines) == (130, [f"dualops{command_name}: interrupted{KEPT.get(words[0], '')}"]), err
    assert "Traceback" not in out


READERS: dict[str, list[str]] = {
    "help": ["--help"],
    "info": ["info"],
    "demo, its table": ["demo", "softmax", "--where", "reference", "-v", "--dtype", "float32"],
    "a wrong call": ["demo", "sotfmax"],
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_reader_who_leaves_is_no_error(name: str, unbuffered: bool):
    """`| head`: the other end of the pipe is closed before anything is written."""
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    command = [sys.executable, "-m", "dualops", *READERS[name]]
    done = subprocess.run(command, env=environment, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    if name == "a wrong call":
        assert done.returncode == 2 and len(lines) == 1
    else:  # of help that can't be written argparse says nothing itself
        assert lines == [], done.stderr
        assert done.returncode == (0 if unbuffered and "--help" in command else 141)


def test_a_closed_stderr_is_no_error_either():
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "dualops", "demo", "sotfmax"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=write, check=False)
    os.close(write)
    assert (done.returncode, done.stdout) == (141, b"")


def test_no_subcommand_is_help(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out == run("--help")[1] and out.startswith("usage: python -m dualops [-h] [--version]")


def test_the_version(run):
    assert run("--version") == (0, f"dualops {__version__}\n", "")


@pytest.mark.parametrize("columns", [80, 132])
@pytest.mark.parametrize("name", ["", *SUBCOMMANDS])
def test_help_is_as_wide_as_the_terminal(run, monkeypatch: pytest.MonkeyPatch, name: str, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run(*filter(None, [name]), "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    if name:
        doc = " ".join((SUBCOMMANDS[name].__doc__ or "").split())
        assert doc == " ".join(out[out.index(doc[:20]) :].replace(" \\\n", " ").split())[: len(doc)]


def test_a_long_example_can_still_be_typed():
    from dualops.cli.formatter import example

    line = '    python -m dualops warm rope --problem "q=1x2x3x4 k=1x2x3x4"    what it does'
    assert example(line, 80) == [line]
    assert example(line, 70) == [line.rpartition("    ")[0], "        what it does"]
    assert (
        example(line, 50)
        == textwrap.dedent("""\
        .   python -m dualops warm rope --problem \\
        .       "q=1x2x3x4 k=1x2x3x4"
        .       what it does""")
        .replace(".", " ")
        .splitlines()
    )
