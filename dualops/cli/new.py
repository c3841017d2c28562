"""Write the files of a new operator, in a clone of the repository, in the places that CONTRIBUTING describes.

    python -m dualops new l2_norm

writes its spec, reference, kernels, bridge, benchmark and test from `skeleton`, and adds its name to the packages,
README and CHANGELOG. The skeleton is an operator along rows, y [..., N] of x, with one gradient; its kernels copy.
Tests fail until the reference is written, then until the kernels compute the same. Parity tests fail as long as a line
says WRITE.

Exit code 2: the name is invalid or taken, or this is no clone. Nothing is written then.
"""

from __future__ import annotations

import argparse
import keyword
import re
from collections.abc import Callable
from pathlib import Path

from ..spec import OPERATORS
from .errors import CommandError

HELP = "write the files of a new operator, to be filled in"

ROOT = Path(__file__).parents[2]
SKELETON = {
    "spec": "dualops/spec/{}.py",
    "reference": "dualops/reference/{}.py",
    "cuda": "dualops/cuda/{}.py",
    "torch_bridge": "dualops/torch_bridge/{}.py",
    "benchmarks": "benchmarks/{}.py",
    "test": "tests/reference/test_{}.py",
}
ROW = "| `{0}` | WRITE: what it can do | yes: x | the same | `naive` |\n"
CHANGE = "- {0} (`naive`): WRITE what it is, with its reference, gradient, bridge and benchmark.\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operator", metavar="OPERATOR", help="its name, one word: l2_norm")


def run(arguments: argparse.Namespace) -> int:
    op = arguments.operator
    files = drafts(op)
    files |= {ROOT / path: edit((ROOT / path).read_text("utf-8"), op) for path, edit in PLACES.items()}
    for path, text in files.items():
        path.write_text(text, "utf-8")
        print(path.relative_to(ROOT))
    print(f"Next: each line that says WRITE; then python -m pytest tests/reference/test_{op}.py tests/test_parity.py")
    return 0


def drafts(op: str) -> dict[Path, str]:
    """Return the operator's new files. Raises CommandError for an invalid name, and outside a clone."""
    if not (ROOT / "skeleton").is_dir():
        raise CommandError(f"{ROOT} is no clone of the repository, expected one: CONTRIBUTING.md there says more")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", op) or keyword.iskeyword(op):
        raise CommandError(f"the operator is {op!r}, expected a name in lower case, such as l2_norm")
    if op in OPERATORS:
        raise CommandError(f"there is an operator {op} already")
    class_name = "".join(word.capitalize() for word in op.split("_"))
    found = {}
    for part, path in SKELETON.items():
        target = ROOT / path.format(op)
        for taken in (target, target.with_suffix("")):
            if taken.exists():
                raise CommandError(f"{taken.relative_to(ROOT)} is there already, expected a name that nothing has")
        text = (ROOT / "skeleton" / f"{part}.py.txt").read_text("utf-8")
        found[target] = text.replace("OPERATOR", op).replace("CLASS", class_name)
    return found


def _imported(line: str, names: tuple[str, ...]) -> Callable[[str, str], str]:
    """Return an edit that adds an import to a package's `__init__` and names to its `__all__`, both sorted."""

    def edit(text: str, op: str) -> str:
        module = re.compile(r"^from \.(\w+) import ", re.MULTILINE)
        later = next((found.start() for found in module.finditer(text) if found[1] > op), None)
        last = [found.end() for found in re.finditer(r"^from \..*?(?:\(.*?^\))?$", text, re.MULTILINE | re.DOTALL)][-1]
        place = last + 1 if later is None else later
        text = text[:place] + line.format(op) + "\n" + text[place:]
        head, begin, rest = text.partition("__all__ = [\n")
        listed, end, tail = rest.partition("]\n")
        entries = listed.splitlines()
        for name in names:
            entry = f'    "{name.format(op)}",'
            entries.insert(sum(old[5].isupper() or old < entry for old in entries), entry)  # constants come first
        return head + begin + "\n".join(entries) + "\n" + end + tail

    return edit


def _operators(text: str, op: str) -> str:
    text = _imported("from .{0} import SPEC as {0}", ("{0}",))(text, op)
    head, begin, rest = text.partition("OPERATORS: dict")
    listed, end, tail = rest.partition("    )\n}")
    return f"{head}{begin}{listed}        {op},\n{end}{tail}"


def _table(text: str, op: str) -> str:
    """Add a row below README's last operator."""
    last = [found.end() for found in re.finditer(r"^\| `\w+`.*\n", text, re.MULTILINE)][-1]
    return text[:last] + ROW.format(op) + text[last:]


def _change(text: str, op: str) -> str:
    """Add an entry at the end of the changelog's "Added"."""
    head, begin, rest = text.partition("### Added\n\n")
    entries, end, tail = rest.partition("\n#")
    return f"{head}{begin}{entries.rstrip()}\n{CHANGE.format(op)}{end}{tail}"


# files that name all operators, and the edit that adds a name to each
PLACES: dict[str, Callable[[str, str], str]] = {
    "dualops/spec/__init__.py": _operators,
    "dualops/reference/__init__.py": _imported("from .{0} import {0}, {0}_backward", ("{0}", "{0}_backward")),
    "dualops/cuda/__init__.py": _imported("from .{0} import {0}, {0}_backward", ("{0}", "{0}_backward")),
    "dualops/torch_bridge/__init__.py": _imported("from .{0} import {0}", ("{0}",)),
    "README.md": _table,
    "CHANGELOG.md": _change,
}
