"""Kernels that other processes build: what is sent, what comes back, and what happens when nothing does."""

import ast
import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dualops.cuda.compiler import binaries, helpers
from dualops.cuda.compiler.binaries import Wanted, ahead, binary, build_all
from dualops.cuda.compiler.helpers import HelperError, Helpers, most_helpers, packed
from dualops.cuda.launch.device_words import build_writer
from dualops.spec import OPERATORS
from dualops.spec.attention import UserFunction
from tests.cuda.compile.ptx import compile_list
from tests.cuda.compile.small import ARCH, build, run
from tests.processes import AS_A_USER

SENT, ALSO_SENT = build_writer(3), build_writer(4)  # dualops' own, and soon built
LONG = 60.0  # seconds that nothing here takes


@pytest.fixture
def some(monkeypatch) -> Iterator[Helpers]:
    """One helper for `ahead`."""
    with Helpers(1) as made:
        monkeypatch.setattr(binaries, "_helpers", lambda: made)
        yield made


@pytest.fixture
def built_here(monkeypatch) -> list[str]:
    """The kernels that this process builds from here on."""
    names, real = [], binaries.compile_kernel
    monkeypatch.setattr(binaries, "compile_kernel", lambda *args: names.append(args[0].identity) or real(*args))
    return names


def until(happened: Callable[[], object]) -> None:
    """Wait for something that is to come."""
    end = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def process_of(made: Helpers) -> Any:
    until(lambda: made._started)
    return next(iter(made._started))


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"


# --- what is sent --------------------------------------------------------------------------------------


def test_kernels_without_functions_of_a_user_are_sent():
    kernels = [step.kernel for operator in OPERATORS for step, _ in compile_list(operator, ARCH).values()]
    for kernel in kernels:
        assert kernel.made_by
        if "_mod=" in kernel.identity:
            with pytest.raises(pickle.PicklingError, match="is a user's function"):
                packed(kernel.made_by)
        else:
            assert pickle.loads(packed(kernel.made_by))() is kernel  # made once in a process
    assert sum("_mod=" in kernel.identity for kernel in kernels) < len(kernels) / 8


def test_what_a_user_wrote_is_not_sent():
    for users in (lambda x: x, build, UserFunction(lambda score: score, ("score",))):
        with pytest.raises(pickle.PicklingError):
            packed(users)
    with pytest.raises(pickle.PicklingError):
        packed(sys.stdout)


# --- helpers -------------------------------------------------------------------------------------------


def test_answers_and_errors():
    with Helpers(1) as made:
        first, wrong, last = made.submit(os.getpid), made.submit(int, "no number"), made.submit(os.getpid)
        assert first.result(LONG) == last.result(LONG) != os.getpid()
        with pytest.raises(HelperError, match="ValueError: invalid literal"):
            wrong.result(LONG)
        process = process_of(made)
    until(lambda: process.poll() is not None)
    with pytest.raises(HelperError, match="there are none"):
        made.submit(os.getpid).result(LONG)


def test_a_helper_collects_garbage_only_between_orders():
    """Not while it imports, either: that took a quarter of the time until it could build."""
    with Helpers(1, begin=binaries._prepare) as made:
        assert not made.submit(gc.isenabled).result(LONG)
        assert made.submit(gc.get_stats).result(LONG)[-1]["collections"] == 2  # of all generations, one an order


def test_several_work_side_by_side():
    with Helpers(2) as made:
        answers = [made.submit(time.sleep, 1) for _ in range(2)]
        until(lambda: all(answer.running() for answer in answers))
        assert len(made._started) == 2


def test_a_helper_that_dies():
    with Helpers(1) as made:
        answer, next_answer = made.submit(time.sleep, LONG), made.submit(os.getpid)
        process = process_of(made)
        until(answer.running)
        process.kill()
        with pytest.raises(HelperError, match="a helper died"):
            answer.result(LONG)
        with pytest.raises(HelperError, match="no helper"):
            next_answer.result(LONG)
        assert made.submit(os.getpid).result(LONG) != process.pid  # another one is started


@pytest.mark.parametrize("executable", ["", None, "/nowhere/python", "/bin/false"])
def test_a_helper_that_can_not_be_started(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with Helpers(2) as made, pytest.raises(HelperError, match="no helper"):
        made.submit(os.getpid).result(LONG)


def refuses(error: Exception) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    return refuse


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_no_thread_for_a_helper(monkeypatch, error):
    with Helpers(2) as made:
        with monkeypatch.context() as patched:
            patched.setattr(helpers.Thread, "start", refuses(error))
            answers = [made.submit(os.getpid) for _ in range(2)]
            for answer in answers:
                with pytest.raises(HelperError, match="no helper: no thread could be started"):
                    answer.result(LONG)
        assert made.submit(os.getpid).result(LONG) != os.getpid()  # there is one again


def test_no_second_thread(monkeypatch):
    with Helpers(2) as made:
        pid = made.submit(os.getpid).result(LONG)
        monkeypatch.setattr(helpers.Thread, "start", refuses(RuntimeError("can't start new thread")))
        answers = [made.submit(os.getpid) for _ in range(3)]
        assert {answer.result(LONG) for answer in answers} == {pid}


@pytest.mark.parametrize(
    "error", [BlockingIOError(errno.EAGAIN, "try again"), OSError(errno.ENOMEM, "no memory"), MemoryError()]
)
def test_no_process_for_a_helper(monkeypatch, error):
    monkeypatch.setattr(helpers.subprocess, "Popen", refuses(error))
    with Helpers(2) as made:
        for answer in [made.submit(os.getpid) for _ in range(3)]:
            with pytest.raises(HelperError, match="no helper"):
                answer.result(LONG)


LIMITED = (
    """
import os, resource
from dualops.cuda.compiler import binaries
from dualops.cuda.compiler.compile import compile_kernel
from dualops.cuda.launch.device_words import build_writer
compile_kernel(build_writer(2), "sm_90a")
"""
    + AS_A_USER
    + """
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))  # of which this process is one
binaries.ahead([(build_writer(3), "sm_90a", 0)])
print(len(binaries.binary(build_writer(3), "sm_90a").cubin) > 0, binaries._PROMISED)
wanted = [binaries.Wanted(build_writer(number), "sm_90a") for number in (4, 5)]
print(len(list(binaries.build_all(wanted, 2, rebuild=True))))
"""
)


def test_a_limit_of_processes(folder):
    done = run(LIMITED, DUALOPS_HELPERS="2")
    assert done.stdout == "True {}\n2\n" and not done.stderr, done.stderr


ISOLATED = """
import sys
sys.path[:] = {path!r}
from dualops.cuda.compiler.helpers import Helpers, _flags
with Helpers(1) as made:
    print(made.submit(_flags).result(60))
"""


@pytest.mark.parametrize("flags", [["-I"], ["-E", "-OO"], ["-s", "-B"], []])
def test_a_helper_is_as_isolated_as_this_python(tmp_path, flags):
    """PYTHONPATH is nothing to an isolated one: what it names must not run in a helper either."""
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('once\\n')")
    command = [sys.executable, *flags, "-c", ISOLATED.format(path=sys.path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    letters = {letter for flag in ast.literal_eval(done.stdout) for letter in flag[1:]}
    assert letters == {"-I": set("IEsP"), "-E": set("EO"), "-s": set("sB")}.get((flags or [""])[0], set())
    ran = (tmp_path / "ran").read_text().count("once") if (tmp_path / "ran").exists() else 0
    assert ran == (0 if letters & {"I", "E"} else 2)  # here and in the helper


def test_helpers_end_when_there_is_nothing_to_do():
    with Helpers(1, idle=0.1) as made:
        process = made.submit(os.getpid).result(LONG)
        until(lambda: not made._started and not is_alive(process))
        assert made.submit(os.getpid).result(LONG) != process


def test_ctrl_c_is_not_for_helpers():
    with Helpers(1) as made:
        process = made.submit(os.getpid).result(LONG)
        os.kill(process, signal.SIGINT)
        assert made.submit(os.getpid).result(LONG) == process


@pytest.mark.parametrize(("value", "most"), [("", None), ("0", 0), ("7", 7)])
def test_how_many(monkeypatch, value, most):
    monkeypatch.setenv("DUALOPS_HELPERS", value)
    monkeypatch.setattr(helpers, "cores", lambda: 6)
    assert most_helpers() == (3 if most is None else most)


def test_how_many_is_no_number(monkeypatch):
    monkeypatch.setenv("DUALOPS_HELPERS", "-1")
    with pytest.raises(ValueError, match="DUALOPS_HELPERS is '-1', expected a number of processes"):
        most_helpers()


ENDS = """
import os, time
from dualops.cuda.compiler.helpers import Helpers
made = Helpers(1)
print(made.submit(os.getpid).result(60), flush=True)
made.submit(time.sleep, 60)
time.sleep(0.2)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_helpers_end_with_their_process(how):
    done = run(ENDS.replace("sleep, 60", "sleep, 1"), how)
    assert done.returncode == (0 if how == "ended" else -signal.SIGKILL), done.stderr
    until(lambda: not is_alive(int(done.stdout)))


FORKS = """
import os
from dualops.cuda.compiler.helpers import Helpers
made = Helpers(1)
mine = made.submit(os.getpid).result(60)
child = os.fork()
if not child:
    other = made.submit(os.getpid).result(60)
    sys.exit(7 if other != mine else 1)  # with all that happens at the end of a program
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7
assert made.submit(os.getpid).result(60) == mine
print("each has its own")
"""


def test_a_forks_child_has_helpers_of_its_own():
    done = run(FORKS)
    assert done.stdout == "each has its own\n" and not done.returncode, done.stderr


# --- builds --------------------------------------------------------------------------------------------


def test_ahead_has_it_built_elsewhere(folder, some, built_here):
    ahead([(SENT, ARCH, 0), (ALSO_SENT, ARCH, 0)])
    until(lambda: len(list(folder.glob("*.cubin"))) == 2)
    assert binary(SENT, ARCH).report.name.endswith("build_writer(3)")
    assert binary(ALSO_SENT, ARCH).cubin and not built_here
    assert not binaries._PROMISED


def test_what_a_helper_is_at_is_waited_for(folder, some, built_here):
    some.submit(os.getpid).result(LONG)  # it is ready
    ahead([(SENT, ARCH, 0)])
    until(lambda: not some._orders)
    assert binary(SENT, ARCH).cubin and not built_here


def test_what_no_helper_has_taken_up_is_built_here(folder, some, built_here):
    ahead([(SENT, ARCH, 0)])  # it has yet to start
    assert binary(SENT, ARCH).cubin and built_here == [SENT.identity]
    assert not binaries._PROMISED


def test_without_helpers(folder, monkeypatch, built_here):
    monkeypatch.setattr(binaries, "_helpers", lambda: Helpers(0))
    ahead([(SENT, ARCH, 0)])
    assert binary(SENT, ARCH).cubin and built_here == [SENT.identity]


def test_a_helper_that_dies_at_it(folder, some, built_here):
    blocked = some.submit(time.sleep, LONG)
    until(blocked.running)
    ahead([(SENT, ARCH, 0)])
    process_of(some).kill()
    assert binary(SENT, ARCH).cubin and built_here == [SENT.identity]


def test_ahead_does_nothing_twice_nor_what_is_there(folder, some):
    some.submit(time.sleep, 0.5)
    ahead([(SENT, ARCH, 0), (SENT, ARCH, 0)])
    ahead([(SENT, ARCH, 0)])
    assert len(binaries._PROMISED) == 1
    binary(ALSO_SENT, ARCH)
    ahead([(ALSO_SENT, ARCH, 0)])
    assert len(binaries._PROMISED) <= 1
    binary(SENT, ARCH)


def test_ahead_leaves_what_can_not_be_sent(folder, some, built_here):
    ahead([(build(200), ARCH, 0)])
    assert not binaries._PROMISED
    assert binary(build(200), ARCH).cubin and len(built_here) == 1


def test_a_folder_that_can_not_be_written(some, monkeypatch, built_here):
    monkeypatch.setenv("DUALOPS_CACHE_DIR", "/dev/null/below")
    some.submit(os.getpid).result(LONG)
    ahead([(build_writer(5), ARCH, 0)])
    until(lambda: not binaries._PROMISED)
    assert binary(build_writer(5), ARCH).cubin and not built_here


def test_a_helper_with_other_sources_builds_nothing():
    assert SENT.made_by
    with pytest.raises(RuntimeError, match="is another kernel in this process"):
        binaries._build_again(SENT.made_by, ARCH, 0, "a key of other sources")


@pytest.mark.parametrize("jobs", [1, 2])
def test_build_all(folder, built_here, jobs):
    wanted = [Wanted(kernel, ARCH) for kernel in (SENT, ALSO_SENT, build(201))]
    reports = list(build_all(wanted, jobs))
    assert sorted(report.name for report in reports) == sorted(
        each.kernel.identity.removeprefix("dualops.cuda.") for each in wanted
    )
    assert len(built_here) == (3 if jobs == 1 else 1) and len(list(folder.iterdir())) == 3
    assert sorted(built_here)[-1] == build(201).identity
    assert len(list(build_all(wanted, jobs))) == 3 and len(list(build_all(wanted, jobs, rebuild=True))) == 3
    assert len(built_here) == (6 if jobs == 1 else 2)
