"""Every file and module that a comment, a docstring or a page names is there."""

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "docs", "dualops", "examples", "release", "tests")
FILE = re.compile(r"(?<![\w/.{\\-])((?:[\w-]+/)*[\w-]+\.(?:py|md|toml|yml|svg|png|json))\b")
MODULE = re.compile(rf"\b((?:{'|'.join(FOLDERS)})(?:\.\w+)+)\b")
# made by commands; names of torch's operators; what tests of the import table plant
MADE = {"index.json", "dualops.bundle", "dualops.git"}
OPERATORS = {"dualops.softmax", "dualops.softmax_backward", "dualops.SECONDS"}


@cache
def files() -> list[str]:
    """Sources and pages, as paths from the root."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = [path.relative_to(ROOT) for path in (*ROOT.glob("*.*"), *(ROOT / ".github").rglob("*.yml"), *inside)]
    return [str(path) for path in found if not {"__pycache__", "env", "html"} & {*path.parts}]


@cache
def modules() -> dict[str, str]:
    sources = [Path(name) for name in files() if name.endswith(".py")]
    return {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__"): (ROOT / path).read_text() for path in sources
    }


def prose(name: str) -> str:
    """A page; of a source its comments and docstrings."""
    text = (ROOT / name).read_text()
    if not name.endswith(".py"):
        return text
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(
        token.string
        for token in tokens
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""'))
    )


def missing(text: str) -> Iterator[str]:
    """The names in a text that nothing has."""
    endings = {"/".join(name.split("/")[place:]) for name in files() for place in range(name.count("/") + 1)}
    yield from (name for name in FILE.findall(text) if name not in endings | MADE)
    for name in MODULE.findall(text):
        if not (name in OPERATORS | MADE or FILE.fullmatch(name) or exists(name)):
            yield name


def exists(name: str) -> bool:
    """Whether a module has this name, or a module has a name like that in it."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        text = modules().get(".".join(words[:count]))
        if text is not None:
            return count == len(words) or re.search(rf"\b{words[count]}\b", text) is not None
    return False


PAGES = [name for name in files() if name.endswith((".py", ".md")) and name != "CHANGELOG.md"]


@pytest.mark.parametrize("folder", sorted({name.partition("/")[0] for name in PAGES}))
def test_what_is_named_is_there(folder):
    found = {name: {*missing(prose(name))} for name in PAGES if name.partition("/")[0] == folder}
    assert not {name: gone for name, gone in found.items() if gone}


def test_what_is_not_there_is_found():
    text = "see softmax/naive.py, softmax/gone.py, `dualops.cuda.rows.registers.build` and dualops.cuda.gone.build"
    assert [*missing(text)] == ["softmax/gone.py", "dualops.cuda.gone.build"]
