"""`check --since REV`: the kernels whose machine code differs between a revision and the working tree."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .errors import CommandError
from .progress import progress

PACKAGE = Path(__file__).parent.parent
SCRIPT = Path(__file__).parent / "machine_code.py"


class Code(NamedTuple):
    """Machine code of a kernel."""

    digest: str
    registers: int
    stack_bytes: int


class Tree:
    """A process that runs a tree's dualops and reports on that tree's kernels."""

    def __init__(self, folder: str | Path, running: subprocess.Popen[str]):
        self.folder, self.running = folder, running
        self.keys: dict[str, str] = dict(json.loads(self._line()))

    def codes(self, names: Sequence[str]) -> Iterator[str | dict[str, Code]]:
        """Build these kernels: yield the name of each as it is built, then the code of all."""
        numbers = {name: number for number, name in enumerate(self.keys)}
        assert self.running.stdin
        print(json.dumps([numbers[name] for name in names]), file=self.running.stdin, flush=True)
        for _ in names:
            yield self._line().rstrip()
        yield dict(zip(names, (Code(*code) for code in json.loads(self._line())), strict=True))

    def _line(self) -> str:
        assert self.running.stdout
        if line := self.running.stdout.readline():
            return line
        raise CommandError(f"the kernels in {self.folder} could not be built")  # the process has printed why


def run(revision: str, operators: Sequence[str], architectures: Sequence[str], jobs: int) -> int:
    """Compare, print a line for each kernel that differs, and return 1 if there is one."""
    asked = json.dumps({"operators": [*operators], "architectures": [*architectures], "jobs": jobs})
    with tempfile.TemporaryDirectory() as folder:
        unpack(revision, Path(folder))
        with tree(folder, asked) as before, tree(PACKAGE.parent, asked) as after:
            lines = list(differences(before, after))
            count = len(after.keys)
    for line in lines:
        print(line)
    print(f"{count} kernels, {len(lines)} differ from {revision}")
    return 1 if lines else 0


def unpack(revision: str, folder: Path) -> None:
    """Write the sources of a revision into a folder."""
    command = ["git", "-C", str(PACKAGE.parent), "archive", "--format=tar", revision, "--", PACKAGE.name]
    try:
        done = subprocess.run(command, capture_output=True)
    except OSError as error:
        raise CommandError(f"--since needs git: {error.strerror}") from None
    if done.returncode:
        raise CommandError(f"--since {revision}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")


@contextmanager
def tree(folder: str | Path, asked: str) -> Iterator[Tree]:
    """Start a process for the kernels of the dualops in a folder."""
    command = [sys.executable, "-P", str(SCRIPT), asked]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as running:
        try:
            yield Tree(folder, running)
        finally:
            running.kill()


def differences(before: Tree, after: Tree) -> Iterator[str]:
    """Yield a line for each kernel that differs. A kernel with the same key in both trees is not built."""
    old, new = ({*one.keys.items()} - {*other.keys.items()} for one, other in ((before, after), (after, before)))
    codes = list[dict[str, Code]]()
    with progress(len(old) + len(new)) as advance:
        for one, changed in ((before, old), (after, new)):
            for item in one.codes([name for name in one.keys if (name, one.keys[name]) in changed]):
                if isinstance(item, str):
                    advance(item)
                else:
                    codes.append(item)
    was, now = codes
    gone = {name: code for name, code in was.items() if name not in now}
    for name, code in now.items():
        if name in was:
            if was[name] != code:
                yield f"{name}\n    {_change(was[name], code)}"
        elif renamed := [other for other, found in gone.items() if found == code]:
            del gone[renamed[0]]  # the same code under another name
        else:
            yield f"{name}\n    new: {code.registers} registers, {code.stack_bytes} bytes of stack"
    for name in gone:
        yield f"{name}\n    gone"


def _change(was: Code, now: Code) -> str:
    return (
        f"registers {was.registers} -> {now.registers}, stack {was.stack_bytes} -> {now.stack_bytes} bytes"
        if was[1:] != now[1:]
        else f"other code, {now.registers} registers and {now.stack_bytes} bytes of stack as before"
    )
