"""The cache folder: compiled kernels and measured times, kept on the disk between processes.

It is DUALOPS_CACHE_DIR, else the user's cache directory for dualops. What lies there runs in this process, so no other
user may put it there. A folder is used if this user or root owns it and nobody else may write to it. A file is used if
it is a regular file, no link, of the same owners. Its first line names its key and the digest of the rest: a damaged
file, or one copied under another name, is read as a missing one.

Files are written under a temporary name and renamed: a reader sees all of a file or none. A call does without the cache
where it can't be entered, read or written. A folder that is refused is a RuntimeWarning, once in a process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

import platformdirs

TEMPORARY = re.compile(r"[0-9a-f]{64}\w{8}\.tmp")  # the names that `write` gives
OLD = 3600.0  # seconds after which a temporary file belongs to a process that was killed
# what reading the content of a file may raise, whatever that content is
DAMAGED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class RefusedFolder(PermissionError):
    """A cache folder that another user owns or may write to."""


def folder() -> Path:
    """Return DUALOPS_CACHE_DIR, else the user's cache directory for dualops."""
    given = os.environ.get("DUALOPS_CACHE_DIR")
    return Path(os.path.expanduser(given or platformdirs.user_cache_dir("dualops")))


def prepare() -> Path:
    """Make the cache folder if it is missing, and return it. Raises OSError where files can't be written there."""
    found = folder()
    _make(found)
    if not os.access(found, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "it can't be written", str(found))
    return found


def kernels() -> dict[str, int]:
    """The sizes in bytes of the kernels in the cache folder, by file name; empty where there is no folder.

    Raises OSError for a folder that can't be read or is refused.
    """
    sizes = {}
    try:
        _check(folder())
        with os.scandir(folder()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # removed since it was listed
                    if entry.name.endswith(".cubin"):
                        sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return {}
    return sizes


def holds(path: Path) -> bool:
    """Whether `read` would look into a file."""
    try:
        with _open(path):
            return True
    except OSError:
        return False


def read(path: Path) -> bytes | None:
    """The content of a file; None where it is missing, can't be read, is refused or is damaged."""
    try:
        with _open(path) as file:
            header, _, content = file.read().partition(b"\n")
    except RefusedFolder as error:
        _warn(f"dualops does not use the cache {error.filename}: {error.strerror}")
        return None
    except OSError:
        return None
    return content if header == _header(path, content) else None


def write(path: Path, content: bytes) -> None:
    """Write a file and its folder, both for this user alone. Raises OSError where that fails; nothing is left then."""
    _make(path.parent)
    _remove_old(path.parent)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with open(handle, "wb") as file:
                file.write(_header(path, content) + b"\n" + content)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        error.filename = str(path)  # a full disk is of no file
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`: one process at a time is inside. Raises OSError where it can't be opened."""
    _make(path.parent)
    with _open(path, os.O_RDWR | os.O_CREAT) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing it would not, where a child has the file too


def _header(path: Path, content: bytes) -> bytes:
    return f"dualops 1 {path.stem} {hashlib.sha256(content).hexdigest()}".encode()


def _open(path: Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a regular file of this user or root; raises OSError for anything else, and never waits."""
    _check(path.parent)
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        found = os.fstat(handle)
        refused = _refused(found) if stat.S_ISREG(found.st_mode) else "it is no regular file"
        if refused:
            raise PermissionError(errno.EACCES, refused, str(path))
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _check(place: Path) -> None:
    """Raise OSError for a folder that is missing or can't be entered, RefusedFolder for one that others may change."""
    if refused := _refused(os.stat(_known(place))):
        raise RefusedFolder(errno.EACCES, refused, str(place))


def _refused(found: os.stat_result) -> str:
    """Why a file or folder is not trusted; empty if it is."""
    user = os.geteuid()
    if found.st_uid not in (user, 0):
        return f"user {found.st_uid} owns it, expected user {user} or root"
    if found.st_mode & 0o022:
        return f"other users may write to it (mode {stat.S_IMODE(found.st_mode):04o}): run chmod go-w"
    return ""


def _make(place: Path) -> None:
    """Make a folder and those above it, for this user alone. Raises OSError where that fails or `_check` does."""
    for each in reversed([_known(place), *place.parents]):
        if not os.path.lexists(each):
            each.mkdir(mode=0o700, exist_ok=True)
    _check(place)


def _known(place: Path) -> Path:
    """Return the path; raise NotADirectoryError where it begins with a home directory that the system does not know."""
    if str(place).startswith("~"):
        raise NotADirectoryError(errno.ENOTDIR, "the home directory is unknown", str(place))
    return place


@cache
def _remove_old(place: Path) -> None:
    """Remove temporary files of processes that were killed; once in a process."""
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            with suppress(OSError):  # another process did
                if TEMPORARY.fullmatch(entry.name) and entry.stat().st_mtime < time.time() - OLD:
                    os.unlink(entry)


@cache
def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)
