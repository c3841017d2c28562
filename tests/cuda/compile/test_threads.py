"""Builds that several threads ask for: nothing crashes, nothing is built twice, no thread waits forever.

A process that crashes takes the tests along: what might crash runs in one of its own.
"""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dualops.cuda.compiler import binaries, compile as compiler
from dualops.cuda.compiler.backend import NumbaError
from dualops.cuda.compiler.binaries import binary
from dualops.cuda.compiler.compile import compile_kernel
from tests.cuda.compile.small import ARCH, build, build_wrong, run

THREADS = 4


@pytest.fixture
def slowed(monkeypatch) -> Any:
    """Builds that say that they have begun, and go on when a test lets them."""

    class Slowed:
        begun, go_on = threading.Event(), threading.Event()
        kernels: list[str] = []  # noqa: RUF012  a list of this class alone

    def compile_slowly(kernel, *args):
        Slowed.kernels.append(kernel.identity)
        Slowed.begun.set()
        assert Slowed.go_on.wait(60)
        return compile_kernel(kernel, *args)

    monkeypatch.setattr(binaries, "compile_kernel", compile_slowly)
    return Slowed


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler of Ctrl-C, also where a shell that started this in the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def in_thread(call: Callable[..., Any], *args: Any) -> Any:
    """A future."""
    return ThreadPoolExecutor(1).submit(call, *args)


MANY_BUILDS = """
import gc, sys, threading
from dualops.cuda.compiler import compile as compiler
from dualops.cuda.compiler.compile import compile_kernel
from tests.cuda.compile.small import ARCH, build

real = compiler.lto_ir

def with_an_error(*args):
    try:
        raise ValueError
    except ValueError as error:
        error.itself = error  # holds on to all frames below until the collector comes by, as errors in Numba do
    return real(*args)

def work():
    for k in range(int(sys.argv[1])):
        compile_kernel(build(k % 5), ARCH)

threads = [threading.Thread(target=work) for _ in range(int(sys.argv[2]))]
compiler.lto_ir = with_an_error
gc.freeze()  # what is there already need not be looked through
gc.disable()
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    threads[0].join(0.05)
    gc.collect()  # here, what the others left
print("survived")
"""


def test_100_builds_from_four_threads():
    """A linker that were left to the collector would kill this within ten builds."""
    done = run(MANY_BUILDS, 100 // THREADS, THREADS)
    assert done.stdout == "survived\n" and not done.returncode, done.stderr


def test_a_build_and_a_failed_link_leave_no_linker_behind():
    gc.disable()
    try:
        compile_kernel(build(1), ARCH)
        with pytest.raises(Exception, match=r"(?i)nvjitlink"):
            compiler.link(b"no code", ARCH)
        linkers = [thing for thing in gc.get_objects() if type(thing).__name__ == "Linker"]
    finally:
        gc.enable()
    assert all(linker.is_closed for linker in linkers)


@pytest.mark.parametrize("kept", [True, False])
def test_what_many_ask_for_at_once_is_built_once(folder, monkeypatch, kept):
    if not kept:
        monkeypatch.setenv("DUALOPS_CACHE_DIR", "/dev/null/below")
    made = []
    monkeypatch.setattr(binaries, "compile_kernel", lambda *args: made.append(args) or compile_kernel(*args))
    together = threading.Barrier(8)

    def ask() -> Any:
        together.wait()
        return binary(build(100 + kept), ARCH)

    with ThreadPoolExecutor(8) as pool:
        answers = [future.result() for future in [pool.submit(ask) for _ in range(8)]]
    assert len(made) == 1 and all(answer == answers[0] for answer in answers)


def test_a_wait_ends_in_the_kernel_that_another_thread_built(folder, slowed):
    first = in_thread(binary, build(110), ARCH)
    assert slowed.begun.wait(60)
    second = in_thread(binary, build(110), ARCH)
    assert not second.done()
    slowed.go_on.set()
    assert first.result(60) == second.result(60) and len(slowed.kernels) == 1


def test_an_exception_is_the_callers_own(folder):
    """Of several that ask for the same, each gets one, whose traceback begins where it asked."""

    def ask() -> BaseException:
        with pytest.raises(NumbaError) as caught:
            binary(build_wrong(1), ARCH)
        return caught.value

    with ThreadPoolExecutor(2) as pool:
        errors = [future.result() for future in [pool.submit(ask) for _ in range(2)]]
    assert errors[0] is not errors[1]
    for error in errors:
        trace, names = error.__traceback__, []
        while trace:
            names.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        assert names[0] == "ask" and "ltoir" in names
    assert binary(build(111), ARCH).cubin  # and the next build is none the worse


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_wait_and_not_the_build(folder, slowed):
    building = in_thread(binary, build(120), ARCH)
    assert slowed.begun.wait(60)
    interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        binary(build(120), ARCH)
    assert not building.done()
    slowed.go_on.set()
    assert binary(build(120), ARCH) == building.result(60) and len(slowed.kernels) == 1


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_build_and_the_next_one_works(folder, monkeypatch):
    def interrupted(*_):
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(compiler, "lto_ir", interrupted)
        with pytest.raises(KeyboardInterrupt):
            binary(build(121), ARCH)
    assert not list(folder.iterdir())
    assert in_thread(binary, build(121), ARCH).result(60).cubin  # nobody holds the lock


def test_a_build_may_ask_for_another(folder, monkeypatch):
    def compile_both(kernel, *args):
        if kernel is build(130):
            binary(build(131), ARCH)
        return compile_kernel(kernel, *args)

    monkeypatch.setattr(binaries, "compile_kernel", compile_both)
    assert in_thread(binary, build(130), ARCH).result(60).cubin
    assert len(list(folder.iterdir())) == 2


FORK = """
import os, threading
from dualops.cuda.compiler.binaries import binary
from dualops.cuda.compiler.compile import compile_kernel
from tests.cuda.compile.small import ARCH, build

begun = threading.Event()
def work():
    for k in range(20):
        begun.set()
        compile_kernel(build(k), ARCH)

thread = threading.Thread(target=work)
thread.start()
begun.wait()
for k in range(5):
    child = os.fork()
    if not child:
        assert binary(build(100 + k), ARCH).cubin
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
thread.join()
print("both can build")
"""


def test_a_fork_while_a_thread_builds(folder):
    """Its child finds no lock taken by a thread that it does not have."""
    done = run(FORK)
    assert done.stdout == "both can build\n" and not done.returncode, done.stderr


EXIT = """
import sys, threading, time
from dualops.cuda.compiler.compile import compile_kernel
from tests.cuda.compile.small import ARCH, build

begun = threading.Event()
def work():
    while True:
        compile_kernel(build(1), ARCH)
        begun.set()

threading.Thread(target=work, daemon=True).start()
begun.wait()
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("seconds", [0, 0.03, 0.06])
def test_the_program_ends_while_a_daemon_thread_builds(seconds):
    """Without a wait for the linker some one in ten programs abort."""
    done = run(EXIT, seconds)
    assert (done.returncode, done.stderr) == (0, "")
