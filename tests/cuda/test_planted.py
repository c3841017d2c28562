"""Planted bugs: that each can be planted, and that a copy of the tree shows which test catches it."""

import ast
from pathlib import Path

import pytest

from tests.cuda.gpu import planted, stages
from tests.cuda.gpu.planted import BUGS, Bug, main, plant

KERNEL, RIGHT, WRONG = "kernel.py", "RESULT = 2", "RESULT = 3"
TESTS = """
from pathlib import Path
from dualops.cuda import kernel
from tests.checks import Rejected
def test_square():
    assert Path(kernel.__file__) != Path(ORIGINAL)
    if kernel.RESULT != 2:
        raise Rejected(f"square: {kernel.RESULT} instead of 2")
def test_broken(): raise OSError("no result")
"""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_one_edit(bug, tmp_path):
    file = tmp_path / "dualops/cuda" / bug.file
    file.parent.mkdir(parents=True)
    text = (stages.ROOT / "dualops/cuda" / bug.file).read_text()
    file.write_text(text)
    plant(bug, tmp_path)
    assert ast.dump(ast.parse(file.read_text())) != ast.dump(ast.parse(text))
    with pytest.raises(ValueError, match=r"expected once"):
        plant(bug, tmp_path)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one kernel and its tests, in place of this one; and an empty cache."""
    root = tmp_path / "tree"
    texts = {f"dualops/cuda/{KERNEL}": RIGHT, "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.']"}
    texts |= {f"{package}/__init__.py": "" for package in ("dualops", "dualops/cuda", "tests")}
    texts |= {"tests/checks.py": "class Rejected(AssertionError): pass"}
    texts |= {planted.CASES: TESTS.replace("ORIGINAL", repr(str(root / "dualops/cuda" / KERNEL)))}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(planted, "ROOT", root)
    monkeypatch.setattr(planted, "PROCESSES", 1)
    monkeypatch.setenv("DUALOPS_CACHE_DIR", str(tmp_path / "cache"))
    return root


def test_which_bugs_are_caught(tree, tmp_path, capsys):
    bugs = (
        Bug("caught", "square", KERNEL, RIGHT, WRONG),
        Bug("harmless", "square", KERNEL, RIGHT, f"{RIGHT}.0"),
        Bug("unseen", "broken", KERNEL, RIGHT, WRONG),
    )
    assert main(["--logs", str(tmp_path / "logs"), "--jobs", "2"], bugs) == 1
    caught, harmless, unseen, last = capsys.readouterr().out.splitlines()[-4:]
    assert f"caught by {planted.CASES}::test_square" in caught
    assert "SURVIVES: 1 passed" in harmless and "SURVIVES: 1 failed" in unseen
    assert last.startswith("1 of 3 bugs caught") and (tree / "dualops/cuda" / KERNEL).read_text() == RIGHT
