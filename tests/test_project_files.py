"""The files by which people and CI run the project agree: Makefile, hooks, workflows, versions."""

import re

from tests.processes import ROOT

MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
RULE = re.compile(r"^([a-z][\w-]*(?: [a-z][\w-]*)*):(?!=)", re.MULTILINE)
TARGETS = {target for targets in RULE.findall(MAKEFILE) for target in targets.split()}


def pinned(text: str) -> set[tuple[str, str]]:
    """(package, version) of each exact requirement; extras do not count."""
    return {(name, version) for name, version in re.findall(r"([\w-]+)(?:\[\w+\])?==([\w.]+)", text)}


def test_hooks_of_a_commit_have_the_linters_of_make_lint():
    hooks = pinned((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert {name for name, _ in hooks} == {"ruff", "pyright"}
    assert hooks <= pinned((ROOT / "constraints.txt").read_text("utf-8"))


def test_a_version_that_differs_is_found():
    assert pinned("ruff==1.2") == {("ruff", "1.2")} != pinned("ruff==1.3")
    assert pinned('["pyright[nodejs]==1.1.414"]') == {("pyright", "1.1.414")}


def helped() -> list[str]:
    """The targets that `make help` documents."""
    return re.findall(r"^\t@echo 'make ([\w-]+)", MAKEFILE, re.MULTILINE)


def test_make_help_is_short_and_names_targets():
    assert {"demo", "test", "lint", "check", "mutants", "docs", "kernels", "test-gpu", "sanitize"} <= {*helped()}
    assert {*helped()} <= TARGETS
    assert len(helped()) <= 12


def test_what_ci_makes_there_is():
    paths = (ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").glob("*.yml"))
    text = "\n".join(path.read_text("utf-8") for path in paths)
    commands = re.findall(r"^(?: *- run: )?make (?:--\S+ )*([a-z][a-z \-]*)", text, re.MULTILINE)
    matrix = re.findall(r"target: \[?([\w-]+)", text)
    made = {target for command in commands for target in command.split()} | {*matrix}
    assert {"install", "wheel", "test-newest", "mutants"} <= made <= TARGETS
