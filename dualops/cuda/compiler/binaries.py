"""Compiled kernels: read from the disk, received from helpers, or compiled and kept.

The cache folder (`cache`) has a cubin under a key of everything that it depends on: the kernel's sources (`sources`),
its build with its arguments, the architecture, the versions of Numba, numba-cuda and the toolkit. So a cubin that one
machine built serves others, with any Python. If a cubin can't be kept, the process that built it holds it. Installed
kernels (`bundled`) come first.

Any thread may request a kernel. One thread builds at a time, under Numba's compiler lock. Threads that waited for the
same kernel get the built one; if the build failed, each tries itself and gets its own exception. Ctrl-C ends a wait at
once, and a build when its call of native code returns; nothing is left half done. A fork and the end of the program
wait for a running build: the child of a fork can build, and no thread is in native code when Python ends. A build may
request another build.

`ahead` lets other processes build kernels, see `helpers`; `build_all` builds many in parallel.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, as_completed
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple, get_origin, get_type_hints

from . import bundled, cache, sources
from .backend import SIMULATED, Kernel, compiler_lock
from .compile import Binary, Report, compile_kernel
from .helpers import HelperError, Helpers, cores, most_helpers


class Wanted(NamedTuple):
    """A kernel to build."""

    kernel: Kernel
    arch: str
    shared_bytes: int = 0


def binary(kernel: Kernel, arch: str, shared_bytes: int = 0) -> Binary:
    """Return the kernel for `arch`: installed, from the disk, from a helper that builds it, or compiled and kept."""
    if found := _found(kernel, arch, shared_bytes):
        return found
    path = _path(kernel, arch, shared_bytes)
    promised = _PROMISED.get(path)
    if promised and not promised.cancel():
        with suppress(HelperError, CancelledError):  # another thread cancelled it, to build it
            return promised.result()
    with compiler_lock:
        return _read(path) or _UNKEPT.get(path) or _keep(path, compile_kernel(kernel, arch, shared_bytes))


def ahead(wanted: Iterable[tuple[Kernel, str, int]]) -> None:
    """Let helpers build those of the kernels (kernel, arch, shared_bytes) that are not on the disk. Does not wait.

    `binary` then waits for kernels that a helper has begun, and builds the others itself. So a process without helpers
    works too, and a kernel that can't be sent to one.
    """
    if SIMULATED:
        return
    for kernel, arch, shared_bytes in wanted:
        path = _path(kernel, arch, shared_bytes)
        if (
            path in _PROMISED
            or path in _UNKEPT
            or cache.holds(path)
            or bundled.holds(arch, fingerprint(kernel, arch, shared_bytes))
        ):
            continue
        with suppress(pickle.PicklingError):
            promised = _PROMISED[path] = _submit(_helpers(), kernel, arch, shared_bytes)
            promised.add_done_callback(functools.partial(_arrived, path))


def build_all(
    wanted: Iterable[Wanted], jobs: int | None = None, *, rebuild: bool = False, must_keep: bool = False
) -> Iterator[Report]:
    """Build kernels in `jobs` processes, by default one a core, and keep them. Yields reports, first of kept kernels.

    `rebuild`: build also kernels that the disk has, and leave the disk unchanged. Raises the errors of builds; with
    must_keep also OSError if a kernel can't be written to the disk.
    """
    wanted = list(wanted)
    if not rebuild:
        there = {each: found for each in wanted if (found := _found(*each))}
        yield from (found.report for found in there.values())
        wanted = [each for each in wanted if each not in there]
    build: Callable[..., Binary] = compile_kernel if rebuild else _build_and_write if must_keep else binary
    jobs = min(jobs or cores(), len(wanted))
    if jobs < 2:
        yield from (build(*each).report for each in wanted)
        return
    here, sent = [], dict[Future[Binary], Wanted]()
    with Helpers(jobs, begin=_prepare) as helpers:
        for each in wanted:
            try:
                sent[_submit(helpers, *each)] = each
            except pickle.PicklingError:
                here.append(each)
        yield from (build(*each).report for each in here)
        for done in as_completed(sent):
            try:
                made = done.result()
            except HelperError:  # the same error here, with its cause; or a helper that died
                yield build(*sent[done]).report
                continue
            if not rebuild:
                (_write if must_keep else _keep)(_path(*sent[done]), made)
            yield made.report


def _build_and_write(kernel: Kernel, arch: str, shared_bytes: int) -> Binary:
    """Do the same as `binary`, but raise OSError if the kernel can't be written to the disk."""
    made, path = binary(kernel, arch, shared_bytes), _path(kernel, arch, shared_bytes)
    if not _found(kernel, arch, shared_bytes):  # this process alone has it, or a helper's thread has yet to write it
        _write(path, made)
    return made


# --- the disk --------------------------------------------------------------------------------------


@functools.cache
def _versions() -> str:
    names = ("numba", "llvmlite", "numba-cuda", "nvidia-nvjitlink", "nvidia-nvvm", "nvidia-cuda-nvcc")
    found = []
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return "\n".join(found)


def built_of() -> str:
    """Return the digest of all sources, and the versions of the compiler's packages."""
    return f"{sources.everything()}\n{_versions()}"


def fingerprint(kernel: Kernel, arch: str, shared_bytes: int) -> str:
    """Return the digest of a kernel's sources, arguments, architecture and shared memory, without the compiler's."""
    if not kernel.identity:
        raise ValueError(f"{kernel.name} was made outside a function under @builds: it has no identity")
    parts = "\n".join([sources.digest(kernel.modules), kernel.identity, arch, str(shared_bytes)])
    return hashlib.sha256(parts.encode()).hexdigest()


def _key(kernel: Kernel, arch: str, shared_bytes: int) -> str:
    return hashlib.sha256(f"{fingerprint(kernel, arch, shared_bytes)}\n{_versions()}".encode()).hexdigest()


def _path(kernel: Kernel, arch: str, shared_bytes: int) -> Path:
    return cache.folder() / f"{_key(kernel, arch, shared_bytes)}.cubin"


_REPORTED = {name: get_origin(kind) or kind for name, kind in get_type_hints(Report).items()}  # types of its fields


def _found(kernel: Kernel, arch: str, shared_bytes: int) -> Binary | None:
    """Return a kernel that is installed or on the disk, else None."""
    if installed := bundled.read(arch, fingerprint(kernel, arch, shared_bytes)):
        return unpacked(installed)
    return _read(_path(kernel, arch, shared_bytes))


def _read(path: Path) -> Binary | None:
    """Return a file's kernel, None if the file is missing, damaged or not trusted."""
    content = cache.read(path)
    return None if content is None else unpacked(content)


def packed(made: Binary) -> bytes:
    """Return the content of a kernel's file."""
    header = json.dumps({"entry": made.entry, "report": asdict(made.report)}).encode()
    return header + b"\n" + made.cubin


def unpacked(content: bytes) -> Binary | None:
    """Return the kernel in a file's content, None if `packed` did not make it."""
    header, _, cubin = content.partition(b"\n")
    try:
        fields: dict[str, Any] = json.loads(header)
        report = Report(**{**fields["report"], "complaints": tuple(fields["report"]["complaints"])})
        for text in (fields["entry"], report.name, report.arch, *report.complaints):
            text.encode()
    except cache.DAMAGED:
        return None
    typed = all(type(getattr(report, name)) is kind for name, kind in _REPORTED.items())
    return Binary(fields["entry"], cubin, report) if typed else None


def _write(path: Path, made: Binary) -> None:
    """Write a kernel's file. Raises OSError if `path` can't be written."""
    cache.write(path, packed(made))


def _keep(path: Path, made: Binary) -> Binary:
    """Write `made` to the disk, or hold it in this process if that fails."""
    try:
        _write(path, made)
    except OSError:
        _UNKEPT[path] = made
    return made


# --- other processes ---------------------------------------------------------------------------------

_PROMISED: dict[Path, Future[Binary]] = {}  # kernels that helpers build
_UNKEPT: dict[Path, Binary] = {}  # kernels that could not be written


@functools.cache
def _helpers() -> Helpers:
    return Helpers(most_helpers(), begin=_prepare)


def _prepare() -> None:
    """Prepare what every build needs, in a helper, before its first kernel."""
    import_module("cuda.core")
    import_module(f"{__package__}.frontend").prepare()


def _submit(helpers: Helpers, kernel: Kernel, arch: str, shared_bytes: int) -> Future[Binary]:
    """Send a kernel to a helper. Raises pickle.PicklingError for one that can't be sent."""
    return helpers.submit(_build_again, kernel.made_by, arch, shared_bytes, _key(kernel, arch, shared_bytes))


def _build_again(made_by: Callable[[], Kernel], arch: str, shared_bytes: int, key: str) -> Binary:
    """Build, in a helper, the kernel that has this key in the process that requested it."""
    kernel = made_by()
    if _key(kernel, arch, shared_bytes) != key:
        raise RuntimeError(f"{kernel.identity} is another kernel in this process")
    return compile_kernel(kernel, arch, shared_bytes)


def _arrived(path: Path, promised: Future[Binary]) -> None:
    with suppress(HelperError, CancelledError):
        _keep(path, promised.result())
    _PROMISED.pop(path, None)


# the holder of Numba's lock is building: a fork's child would never get it, and Python must not exit in native code
os.register_at_fork(
    before=compiler_lock.acquire,
    after_in_parent=compiler_lock.release,
    after_in_child=lambda: (_PROMISED.clear(), compiler_lock.release()),
)
atexit.register(compiler_lock.acquire)
