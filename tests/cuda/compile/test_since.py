"""`check --since REV`: kernels are compared by their machine code, and built only where their keys differ."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dualops.cli import since
from dualops.cli.machine_code import digest
from dualops.cli.since import Code, differences
from dualops.cuda.compiler.compile import compile_kernel
from tests.cuda.compile.small import ARCH, build
from tests.processes import ROOT, python


class Tree:
    """Stands in for `since.Tree`."""

    def __init__(self, keys: dict[str, str], codes: dict[str, Code]):
        self.keys, self.of = keys, codes
        self.built: list[str] = []

    def codes(self, names):
        self.built += names
        yield from names
        yield {name: self.of[name] for name in names}


def test_what_differs_is_listed(capsys):
    same, fast, slow = Code("same", 40, 0), Code("fast", 40, 0), Code("slow", 50, 8)
    before: Any = Tree(
        {name: f"{name} 1" for name in ("kept", "edited", "slower", "moved", "removed")} | {"key": "one key"},
        {"kept": same, "edited": same, "slower": same, "moved": fast, "removed": slow},
    )
    after: Any = Tree(
        {name: f"{name} 2" for name in ("kept", "edited", "slower", "moved to", "made")} | {"key": "one key"},
        {"kept": same, "edited": fast, "slower": slow, "moved to": fast, "made": same},
    )
    assert list(differences(before, after)) == [
        "edited\n    other code, 40 registers and 0 bytes of stack as before",
        "slower\n    registers 40 -> 50, stack 0 -> 8 bytes",
        "made\n    new: 40 registers, 0 bytes of stack",
        "removed\n    gone",
    ]
    assert "key" not in [*before.built, *after.built]
    assert len(capsys.readouterr().err.splitlines()) == 10


def test_the_digest_is_of_the_code_and_not_of_its_names():
    first, again, other = (compile_kernel(build(factor), ARCH).cubin for factor in (3, 3, 4))
    assert first != again  # Numba counts up
    assert digest(first) == digest(again) != digest(other)


@pytest.fixture
def checkout(tmp_path):
    """A repository with one commit of these sources."""
    shutil.copytree(ROOT / "dualops", tmp_path / "dualops", ignore=shutil.ignore_patterns("__pycache__"))
    who = {f"GIT_{role}_{what}": "test" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for words in (["init", "--quiet"], ["add", "dualops"], ["commit", "--quiet", "--message", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, env={**os.environ, **who})
    return tmp_path


def check(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(checkout), "DUALOPS_CACHE_DIR": str(checkout / "cache")}
    return python("-m", "dualops", "check", "matmul", *words, cwd=checkout, **environment)


def test_a_working_tree_compared_with_its_commit(checkout):
    done = check(checkout, "--since", "HEAD")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(" kernels, 0 differ from HEAD\n") and not done.stdout.startswith("0")
    with (checkout / "dualops" / "cuda" / "matmul" / "sm90" / "split.py").open("a") as file:
        file.write("\n\nUNUSED = 1\n")
    done = check(checkout, "--since", "HEAD")
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.endswith(" kernels, 0 differ from HEAD\n") and "matmul.sm90.split." in done.stderr
    )  # built, and equal


def test_a_revision_that_is_none(checkout):
    done = check(checkout, "--since", "nonesuch")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "dualops check: --since nonesuch: fatal: not a valid object name: nonesuch\n"


def test_no_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(since, "PACKAGE", tmp_path / "dualops")
    with pytest.raises(since.CommandError, match="--since HEAD: fatal: not a git repository"):
        since.unpack("HEAD", tmp_path)
