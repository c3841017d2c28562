"""Helpers: processes that build kernels while this one does something else, or builds another.

A helper is a new Python process with this one's `sys.path`, isolated if this one is. It imports dualops but none of the
program's modules. It receives functions of dualops with their arguments, and sends back their results. It ends when the
process that started it ends, or ends it. If the system has no thread or process for a helper, none starts.

A user's functions are not sent: they may depend on state of this process. Options of attention are sent by name.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Condition, Thread
from types import FunctionType
from typing import Any
from weakref import WeakSet

from ...spec.attention import OPTIONS, Option, UserFunction

MOST = 4  # helpers of a process if no number is given; each takes about 200 MB
IDLE = 10.0  # seconds that a helper waits for more to do
# flags of this Python that change what a new one imports or compiles, and their letters on the command line
FLAGS = {
    "isolated": "I",
    "ignore_environment": "E",
    "no_user_site": "s",
    "safe_path": "P",
    "no_site": "S",
    "dont_write_bytecode": "B",
    "optimize": "O",
}
PROGRAM = """
import gc, sys
gc.disable()  # a quarter of the time until it can build; `serve` collects
sys.path[:] = {path!r}
from dualops.cuda.compiler.helpers import serve
serve({pipe})
"""


class HelperError(RuntimeError):
    """A helper could not be started, died, or failed at its task."""


def most_helpers() -> int:
    """Helpers that this process may have: DUALOPS_HELPERS, else one for two cores, at most MOST.

    Raises ValueError if the variable is no number.
    """
    text = os.environ.get("DUALOPS_HELPERS", "")
    if text and not text.isdecimal():
        raise ValueError(f"DUALOPS_HELPERS is {text!r}, expected a number of processes, 0 for none")
    return int(text) if text else min(cores() // 2, MOST)


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Helpers:
    """At most `most` helpers, each with a thread of this process that waits for it.

    They start when there is work, and end after `idle` seconds without work. begin: each helper calls it first.
    """

    def __init__(self, most: int, *, begin: Callable[[], object] = int, idle: float = IDLE):
        self.most, self.idle, self.begin = most, idle, packed((begin, ()))
        self._forget()
        _ALL.add(self)

    def _forget(self) -> None:
        """Start without helpers, also in a fork's child, which has no threads and must not use its parent's helpers."""
        self._changed = Condition()
        self._orders: deque[tuple[Future[Any], bytes]] = deque()
        self._threads = self._waiting = 0
        self._started: dict[subprocess.Popen[bytes], Connection] = {}

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Let a helper call function(*args). Its future fails with a HelperError, and can be cancelled until a helper
        begins.

        Raises pickle.PicklingError for arguments that can't be sent.
        """
        order = packed((function, args))
        future: Future[Any] = Future()
        with self._changed:
            self._orders.append((future, order))
            if self._waiting < len(self._orders) and self._threads < self.most:
                self._begin_thread()
            self._changed.notify()
            if not self._threads:
                self._give_up("no thread could be started" if self.most else "there are none")
        return future

    def _begin_thread(self) -> None:
        """Start one more thread, unless the system has no more threads for this process."""
        self._threads += 1
        try:
            Thread(target=self._work, name="dualops helper", daemon=True).start()
        except (RuntimeError, MemoryError):
            self._threads -= 1

    def close(self) -> None:
        """End all helpers, even while they work, and start no more."""
        with self._changed:
            self.most = 0
            self._changed.notify_all()
            for process in self._started:
                process.kill()
        self._give_up("closed")

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        """Run a helper's thread."""
        try:
            process, pipe = self._start()
            try:
                pipe.send_bytes(self.begin)
                pipe.recv_bytes()
                while order := self._next():
                    self._pass_on(pipe, *order)
            finally:
                with self._changed:
                    self._started.pop(process, None)
                pipe.close()
                process.kill()
                process.wait()
        except Exception as error:  # the helper could not be started, or died; its orders must not wait forever
            with self._changed:
                self._threads -= 1
            if not self._threads:
                self._give_up(repr(error))

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """Start a helper. Return it and the pipe to it."""
        pipe, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable or "", *_flags(), "-c", PROGRAM.format(path=sys.path, pipe=theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "NUMBA_ENABLE_CUDASIM": "0"},
            )
        with self._changed:
            self._started[process] = pipe
            if not self.most:
                process.kill()
        return process, pipe

    def _next(self) -> tuple[Future[Any], bytes] | None:
        """Return the next order, or None after `idle` seconds without one: the thread then ends."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._orders or not self.most, self.idle)
            self._waiting -= 1
            if self._orders and self.most:
                return self._orders.popleft()
            self._threads -= 1
            return None

    def _pass_on(self, pipe: Connection, future: Future[Any], order: bytes) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            pipe.send_bytes(order)
            answer, error = pickle.loads(pipe.recv_bytes())
        except Exception as lost:
            future.set_exception(HelperError(f"a helper died: {lost!r}"))
            raise
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(HelperError(error))

    def _give_up(self, reason: str) -> None:
        """Fail all waiting orders: no helper will run them."""
        with self._changed:
            left, self._orders = self._orders, deque()
        for future, _ in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(HelperError(f"no helper: {reason}"))


def _flags() -> list[str]:
    return [f"-{letter * getattr(sys.flags, name)}" for name, letter in FLAGS.items() if getattr(sys.flags, name)]


_ALL: WeakSet[Helpers] = WeakSet()


@atexit.register
def _end_all() -> None:
    for helpers in list(_ALL):
        helpers.close()


def _forget_all() -> None:
    for helpers in list(_ALL):
        for pipe in helpers._started.values():
            pipe.close()  # else a helper would not see its process end while the fork's child lives
        helpers._forget()


os.register_at_fork(after_in_child=_forget_all)


# --- in a helper -------------------------------------------------------------------------------------


def serve(pipe: int) -> None:
    """Run a helper: call the functions that arrive, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
    with Connection(pipe) as asked:
        while True:
            try:
                order = asked.recv_bytes()
            except EOFError:
                return
            try:
                function, args = pickle.loads(order)
                answer = pickle.dumps((function(*args), None))
            except Exception as error:
                answer = pickle.dumps((None, f"{type(error).__name__}: {error}"))
            asked.send_bytes(answer)
            gc.collect()  # while no process waits


# --- pickling ----------------------------------------------------------------------------------------


def packed(value: Any) -> bytes:
    """Return an object pickled. Raises pickle.PicklingError for one that can't be sent."""
    target = io.BytesIO()
    try:
        _Pickler(target).dump(value)
    except (AttributeError, TypeError) as error:  # it has no name, or can't be pickled at all
        raise pickle.PicklingError(str(error)) from error
    return target.getvalue()


NAMED = (FunctionType, type, type(cache(int)))  # types of objects that are sent by name
KNOWN = {"dualops", "numba", "numpy", *sys.stdlib_module_names}  # packages of objects that are sent by name


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Option):
            return _option, (obj.name,)
        if isinstance(obj, UserFunction):
            raise pickle.PicklingError(f"{obj!r} is a user's function")
        if isinstance(obj, NAMED) and obj.__module__.partition(".")[0] not in KNOWN:
            raise pickle.PicklingError(f"{obj.__qualname__} of {obj.__module__} is not known everywhere")
        return NotImplemented


def _option(name: str) -> Option:
    return next(option for option in OPTIONS if option.name == name)
