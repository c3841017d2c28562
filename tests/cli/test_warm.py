"""Compiling ahead: which problems it takes, its lines, and exit codes. What is compiled is not what is tested here."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from dualops.cuda.compiler import cache
from dualops.spec import OPERATORS
from tests.cli.test_command import python


class Named(NamedTuple):
    """In the place of a kernel."""

    arch: str
    name: str


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Puts a stand-in in the place of the compiler; has what it was asked."""
    asked = SimpleNamespace(problems=[], backward=None, jobs=None, arches=[], folder=tmp_path / "kept" / "cubins")
    monkeypatch.setenv("DUALOPS_CACHE_DIR", str(asked.folder))
    names = ("softmax.rows.build_forward(32)", "softmax.rows.build_backward(32)")

    def to_warm(problems: list[str], places: list[Any], *, backward: bool) -> list[Named]:
        if "wrong" in "".join(problems):
            raise ValueError("softmax: wrong=1, expected something else")
        asked.problems, asked.backward = problems, backward
        asked.arches += [device.arch for device in places]
        return [Named(arch, name) for arch in dict.fromkeys(device.arch for device in places) for name in names]

    def build_all(wanted: list[Named], jobs: int | None, *, must_keep: bool) -> Iterator[Named]:
        assert must_keep
        asked.jobs = jobs
        for number, each in enumerate(wanted):
            (asked.folder / f"{number}.cubin").touch()
            yield each

    def one(arch: str) -> SimpleNamespace:
        return SimpleNamespace(arch=arch)

    def every(arch: str) -> list[SimpleNamespace]:
        return [one(arch)] * (2 if arch == "sm_90a" else 1)

    stand_ins = {
        "": SimpleNamespace(),
        ".compiler.backend": SimpleNamespace(SIMULATED=False),
        ".compiler.cache": cache,
        ".launch.device": SimpleNamespace(ARCHITECTURES=("sm_80", "sm_90a"), every=every, current=lambda: one("sm_89")),
        ".compiler.offline": SimpleNamespace(to_warm=to_warm, build_all=build_all),
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, f"dualops.cuda{name}", module)  # type: ignore[misc]
    monkeypatch.setattr("dualops.cli.check.find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr("dualops.cli.warm.missing", lambda: ())
    return asked


def test_all_operators_for_the_gpu(run, warmed):
    code, out, err = run("warm")
    assert code == 0
    assert (warmed.problems, warmed.backward, warmed.jobs, warmed.arches) == (list(OPERATORS), True, None, ["sm_89"])
    assert err.splitlines() == [
        "[1/2] sm_89  softmax.rows.build_forward(32)",
        "[2/2] sm_89  softmax.rows.build_backward(32)",
    ]
    assert out.startswith(f"2 kernels in {warmed.folder}, 2 of them compiled now, in ")


def test_what_was_there_is_not_compiled_again(run, warmed):
    assert run("warm")[0] == 0
    assert "2 kernels in" in (out := run("warm")[1]) and "0 of them compiled now" in out


def test_operators_and_problems(run, warmed):
    assert run("warm", "softmax", "rope", "--jobs", 3, "--forward", "--arch", "all")[0] == 0
    assert (warmed.problems, warmed.backward, warmed.jobs) == (["softmax", "rope"], False, 3)
    assert warmed.arches == ["sm_80", "sm_90a", "sm_90a"]  # two GPUs, whose kernels are the same
    assert run("warm", "softmax", "--problem", "x=3x5", "--problem", "x=7 axis=0")[0] == 0
    assert warmed.problems == ["softmax x=3x5", "softmax x=7 axis=0"]
    assert run("warm", "--problem", "softmax x=3x5", "--problem", "rope q=1x2x3x4")[0] == 0
    assert warmed.problems == ["softmax x=3x5", "rope q=1x2x3x4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("softmin",), "no operator softmin, expected some of flash_attention, "),
        (("softmax", "rope", "--problem", "x=3"), "--problem is of one operator"),
        (("softmax", "--problem", "wrong=1"), "softmax: wrong=1, expected something else"),
        (("--arch", "sm_91"), "no architecture sm_91, expected all or some of sm_80, sm_90a"),
        (("--jobs", "0"), "--jobs is 0, expected at least 1"),
    ],
)
def test_one_line_for_what_is_wrong(run, warmed, arguments, message):
    code, out, err = run("warm", *arguments)
    assert code == 2 and not out
    assert err.startswith(f"dualops warm: {message}") and err.count("\n") == 1


def test_without_a_gpu_an_architecture_must_be_named(run, warmed, monkeypatch):
    monkeypatch.setattr("dualops.cli.warm.missing", lambda: ("there is no GPU.",))
    code, _, err = run("warm")
    assert code == 2 and "there is no GPU. Or name what to compile for: --arch" in err
    assert run("warm", "--arch", "sm_80")[0] == 0 and warmed.arches == ["sm_80"]


def test_without_a_compiler(run, warmed, monkeypatch):
    monkeypatch.setattr("dualops.cli.check.find_spec", lambda name: None)
    code, _, err = run("warm")
    assert code == 2 and "no compiler" in err and "pip install" in err


def test_a_folder_that_can_not_be_made(run, warmed, monkeypatch):
    monkeypatch.setenv("DUALOPS_CACHE_DIR", "/dev/null/below")
    code, _, err = run("warm")
    assert code == 2 and err.startswith("dualops warm: /dev/null/below: Not a directory; DUALOPS_CACHE_DIR")


def test_a_folder_that_others_may_write_to(run, warmed):
    warmed.folder.mkdir(parents=True)
    warmed.folder.chmod(0o777)
    code, _, err = run("warm")
    assert code == 2 and err.startswith(f"dualops warm: {warmed.folder}: other users may write to it (mode 0777)")
    assert err.count("\n") == 1


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
from dualops.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_disk_without_room(tmp_path, jobs):
    arguments = ("warm", *LION, "--arch", "sm_90a", "--jobs", jobs)
    done = python("-c", FULL, *arguments, DUALOPS_CACHE_DIR=str(tmp_path))
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    if find_spec("numba_cuda") is None:
        assert "no compiler" in line
        return
    assert line.startswith(f"dualops warm: {tmp_path}/") and ".cubin: File too large; DUALOPS_CACHE_DIR names" in line
    assert not list(tmp_path.iterdir())


LION = ("lion", "--problem", "params=64:float32 grads=64 momenta=64")


def test_real_kernels(tmp_path):
    """One that is soon built, as a command, by two processes; then found."""
    arguments = ("-m", "dualops", "warm", *LION)
    if find_spec("numba_cuda") is None:  # a system that NVIDIA publishes no compiler for
        assert python(*arguments).returncode == 2
        return
    for built in (3, 0):
        done = python(*arguments, "--arch", "sm_90a", "--jobs", 2, DUALOPS_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"3 kernels in {tmp_path}, {built} of them compiled now")
        assert len(list(tmp_path.glob("*.cubin"))) == 3
