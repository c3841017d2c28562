"""The files of a new operator: all are there and say what to write; filled in, they are an operator as others are."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import ROOT, python

NAME = "copied"


def python_on(tree: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(*words, cwd=tree, PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1", **environment)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with the files of an operator."""
    root = tmp_path_factory.mktemp("clone")
    for part in ("dualops", "benchmarks", "tests", "skeleton", "README.md", "CHANGELOG.md", "pyproject.toml"):
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__", "env", "html"))
        else:
            shutil.copy(ROOT / part, root / part)
    done = python_on(root, "-m", "dualops", "new", NAME)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 13 and all(f"{NAME}" in (root / path).read_text("utf-8") for path in lines[:-1])
    return root


def left_to_write(tree: Path) -> set[Path]:
    """Of what `new` has written or changed, what says WRITE."""
    sources = [*tree.glob(f"*/**/*{NAME}.py"), tree / "README.md", tree / "CHANGELOG.md"]
    return {path for path in sources if re.search(r"\bWRITE\b", path.read_text("utf-8"))}


def fill(tree: Path) -> None:
    """Make it the operator that its kernels are: y is x."""
    reference = tree / "dualops" / "reference" / f"{NAME}.py"
    text = re.sub(r"raise NotImplementedError\(.*eps}\"\)", "return x.copy()", reference.read_text("utf-8"), count=1)
    reference.write_text(re.sub(r"raise NotImplementedError\(.*eps}\"\)", "return dy.copy()", text), "utf-8")
    test = tree / "tests" / "reference" / f"test_{NAME}.py"
    test.write_text(re.sub(r"raise NotImplementedError\(.*\)", "return row", test.read_text("utf-8")), "utf-8")
    for path in left_to_write(tree):
        path.write_text(path.read_text("utf-8").replace("WRITE", "written"), "utf-8")


def test_what_is_missing_is_reported_until_nothing_is(tree: Path) -> None:
    pytest_ = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    own, kernels = f"tests/reference/test_{NAME}.py", "tests/cuda/simulator/test_cases.py"
    parity = ("tests/test_parity.py", "-k", f"({NAME} and not tests_of_kernels) or written")
    assert len(left_to_write(tree)) == 8
    done = python_on(tree, *pytest_, own)
    assert done.returncode == 1 and f"NotImplementedError: {NAME}: write" in done.stdout, done.stdout
    done = python_on(tree, *pytest_, *parity)
    assert done.returncode == 1 and f"dualops/spec/{NAME}.py, line 1: " in done.stdout, done.stdout
    fill(tree)
    assert left_to_write(tree) == set()
    done = python_on(tree, *pytest_, own, *parity)
    assert done.returncode == 0, done.stdout
    done = python_on(tree, *pytest_, kernels, "-k", f"{NAME}-", NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 0 and re.search(r"\b[1-9]\d* passed", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("L2Norm", "the operator is 'L2Norm', expected a name in lower case, such as l2_norm"),
        ("../l2", "the operator is '../l2', expected a name in lower case, such as l2_norm"),
        ("class", "the operator is 'class', expected a name in lower case, such as l2_norm"),
        ("softmax", "there is an operator softmax already"),
        ("launch", "dualops/cuda/launch is there already, expected a name that nothing has"),
        ("norm", "dualops/cuda/norm is there already, expected a name that nothing has"),
    ],
)
def test_a_name_that_none_can_have(run, name: str, message: str) -> None:
    code, out, err = run("new", name)
    assert (code, out, err) == (2, "", f"dualops new: {message}\n")


def test_without_a_clone(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dualops.cli.new.ROOT", tmp_path)
    code, out, err = run("new", "l2_norm")
    assert code == 2 and not out and "is no clone of the repository" in err
    assert not [*tmp_path.iterdir()]
