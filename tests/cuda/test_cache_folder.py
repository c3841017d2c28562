"""The cache folder: what is kept is found again, what another user may have put there is not read, and a folder that
can't be used is done without.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dualops.cuda.compiler import cache
from tests.processes import AS_A_USER, python

NAME = "0123456789abcdef" * 4
CONTENT = b"a line\nand more\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Not made yet; what this process remembers of folders is forgotten before and after."""
    monkeypatch.setenv("DUALOPS_CACHE_DIR", str(tmp_path / "above" / "cache"))
    cache._remove_old.cache_clear()
    cache._warn.cache_clear()
    yield tmp_path / "above" / "cache"
    cache._warn.cache_clear()


@pytest.fixture
def path(folder: Path) -> Path:
    """A file that is kept."""
    cache.write(folder / f"{NAME}.cubin", CONTENT)
    return folder / f"{NAME}.cubin"


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Says that files ("fstat") or folders ("stat") have another owner, as a user can't give them one."""

    def by(call: str, user: int) -> None:
        real = getattr(os, call)

        def stand_in(*given: Any, **named: Any) -> os.stat_result:
            found = list(real(*given, **named))
            found[4] = user
            return os.stat_result(found)

        monkeypatch.setattr(cache.os, call, stand_in)

    return by


def test_what_is_written_is_read(path):
    assert cache.read(path) == CONTENT and cache.holds(path)
    assert path.read_bytes().endswith(b"\n" + CONTENT) and [*path.parent.iterdir()] == [path]
    cache.write(path, b"other")
    assert cache.read(path) == b"other"


def test_what_is_missing_is_none(folder):
    assert cache.read(folder / "no.cubin") is None and not cache.holds(folder / "no.cubin")
    assert cache.kernels() == {} and not folder.exists()


def test_kernels_are_counted(path):
    (path.parent / "tuned.lock").touch()
    (path.parent / "gone.cubin").symlink_to("nowhere")  # counts as what it is
    assert cache.kernels() == {path.name: path.stat().st_size, "gone.cubin": len("nowhere")}


def test_folders_and_files_are_this_users_alone(folder):
    before = os.umask(0)
    try:
        cache.write(folder / "tuned" / "softmax" / "key.record", CONTENT)
        with cache.locked(folder / "tuned.lock"):
            pass
    finally:
        os.umask(before)
    folders = [folder.parent, folder, folder / "tuned", folder / "tuned" / "softmax"]
    assert [stat.S_IMODE(each.stat().st_mode) for each in folders] == [0o700] * 4
    files = [folder / "tuned" / "softmax" / "key.record", folder / "tuned.lock"]
    assert [stat.S_IMODE(each.stat().st_mode) for each in files] == [0o600] * 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:-1],
        lambda whole: whole + b"\0",
        lambda whole: whole.replace(b"line", b"lime"),
        lambda whole: whole.replace(b"dualops 1 ", b"dualops 2 "),
        lambda whole: CONTENT,
        lambda whole: b"\xff" * 300,
    ],
    ids=["empty", "truncated", "longer", "changed", "of another format", "without a header", "no text"],
)
def test_a_damaged_file_is_none(path, damage):
    path.write_bytes(damage(path.read_bytes()))
    assert cache.read(path) is None
    cache.write(path, CONTENT)
    assert cache.read(path) == CONTENT


def test_a_file_under_another_key_is_none(path):
    other = path.with_stem(NAME[::-1])
    other.write_bytes(path.read_bytes())
    assert cache.read(other) is None and cache.read(path) == CONTENT


def link(path: Path) -> None:
    path.rename(path.with_suffix(".target"))
    path.symlink_to(path.with_suffix(".target"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("turn", [link, pipe, lambda path: path.chmod(0o620), lambda path: path.chmod(0o602)])
def test_a_file_that_is_not_this_users_alone_is_none_and_replaced(path, turn):
    turn(path)
    assert cache.read(path) is None and not cache.holds(path)
    cache.write(path, CONTENT)
    assert cache.read(path) == CONTENT and stat.S_ISREG(path.lstat().st_mode)


def test_a_folder_under_the_name_of_a_file(path):
    path.unlink()
    path.mkdir()
    assert cache.read(path) is None and not cache.holds(path)
    with pytest.raises(IsADirectoryError):
        cache.write(path, CONTENT)
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize(("user", "trusted"), [(0, True), (os.geteuid(), True), (os.geteuid() + 1, False)])
def test_files_of_this_user_and_root_are_read(path, owned, user, trusted):
    owned("fstat", user)
    assert cache.read(path) == (CONTENT if trusted else None) and cache.holds(path) == trusted


def refused(path: Path, reason: str) -> None:
    """One warning, and neither read nor written."""
    with pytest.warns(RuntimeWarning, match=f"dualops does not use the cache {path.parent}: {reason}") as caught:
        assert [cache.read(path), cache.read(path)] == [None, None]
    assert len(caught) == 1 and not cache.holds(path)
    for call in (lambda: cache.write(path, b""), cache.kernels, cache.prepare, lock):
        with pytest.raises(cache.RefusedFolder, match=reason):
            call()


def lock() -> None:
    with cache.locked(cache.folder() / "tuned.lock"):
        pass


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_to(path, mode):
    path.parent.chmod(mode)
    refused(path, rf"other users may write to it \(mode {mode:04o}\): run chmod go-w")
    path.parent.chmod(0o755)
    assert cache.read(path) == CONTENT


def test_a_folder_of_another_user(path, owned):
    other = os.geteuid() + 1
    owned("stat", other)
    refused(path, f"user {other} owns it, expected user {os.geteuid()} or root")


def test_a_folder_of_root_is_read(path, owned):
    owned("stat", 0)
    assert cache.read(path) == CONTENT


CLOSED = (
    """
import sys
from pathlib import Path
from dualops.cuda.compiler import cache
"""
    + AS_A_USER
    + """
path = Path(sys.argv[1]) / "key.cubin"
assert cache.read(path) is None and not cache.holds(path)
for call in (cache.kernels, cache.prepare, lambda: cache.write(path, b""), cache.locked(path).__enter__):
    try:
        call()
    except PermissionError as error:
        assert not isinstance(error, cache.RefusedFolder), error
        print(error.strerror)
"""
)


@pytest.mark.parametrize("below", ["", "below"])
def test_a_folder_that_can_not_be_entered(tmp_path, below):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    if not below and os.geteuid() == 0:
        os.chown(closed, 65534, 65534)
    tmp_path.chmod(0o711)
    folder = str(closed / below)
    done = python("-c", CLOSED, folder, DUALOPS_CACHE_DIR=folder, NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 0 and not done.stderr, done.stderr
    words = done.stdout.splitlines()
    assert len(words) == 4 and set(words) <= {"Permission denied", "it can't be written"}, words


def test_an_unknown_home(tmp_path, monkeypatch):
    monkeypatch.delenv("DUALOPS_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache.platformdirs, "user_cache_dir", lambda name: f"~nobody-of-that-name/{name}")
    monkeypatch.chdir(tmp_path)
    path = cache.folder() / "key.cubin"
    assert cache.read(path) is None and not cache.holds(path)
    for call in (lambda: cache.write(path, b""), cache.kernels, cache.prepare, lock):
        with pytest.raises(NotADirectoryError, match="the home directory is unknown"):
            call()
    assert not [*tmp_path.iterdir()]


def test_a_tilde_is_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DUALOPS_CACHE_DIR", "~/kept")
    assert cache.folder() == tmp_path / "kept"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_nothing(path, monkeypatch, error):
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(cache.os, "replace", fails)
    with pytest.raises(type(error)) as caught:
        cache.write(path, b"other")
    assert cache.read(path) == CONTENT and [*path.parent.iterdir()] == [path]
    if isinstance(caught.value, OSError):
        assert caught.value.filename == str(path)


def test_what_a_killed_process_left_is_removed(path):
    """When it is old; a file of other code stays."""
    names = {f"{NAME}abcd_123.tmp": 7200, f"{NAME}wxyz_456.tmp": 0, "notes.tmp": 7200, f"{NAME}.tmp": 7200}
    for name, age in names.items():
        (path.parent / name).touch()
        os.utime(path.parent / name, (time.time() - age, time.time() - age))
    cache._remove_old.cache_clear()
    cache.write(path, CONTENT)
    there = {each.name for each in path.parent.iterdir()}
    assert there == {path.name, *names} - {f"{NAME}abcd_123.tmp"}


KILLED = """
import os, signal, sys
from pathlib import Path
from dualops.cuda.compiler import cache
cache.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
cache.write(Path(sys.argv[1]), b"content")
"""


def test_what_a_killed_process_leaves_has_a_name_that_is_known(path):
    python("-c", KILLED, path, NUMBA_ENABLE_CUDASIM="1")
    (left,) = {*path.parent.iterdir()} - {path}
    assert cache.TEMPORARY.fullmatch(left.name)


def test_the_lock_file_is_not_written_to(folder):
    cache.prepare()
    (folder / "tuned.lock").write_text("something")
    lock()
    assert (folder / "tuned.lock").read_text() == "something"


@pytest.mark.parametrize("turn", [link, pipe])
def test_a_lock_that_is_no_file_is_refused(folder, turn):
    cache.prepare()
    path = folder / "tuned.lock"
    path.write_text("something")
    turn(path)
    with pytest.raises(OSError, match=r"tuned.lock"):
        lock()
    if turn is link:
        assert path.read_text() == "something"
