"""The teaching pages next to the kernels: their Python runs, prints what they show, quotes what exists; links lead on.

A page's ```python blocks run one after the other, as a reader would run them, in the simulator. A ```text block right
after one is what it prints; a block that is followed by none prints nothing. A block whose first line is `# FILE` is a
quotation from that file.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import ROOT, printed

PAGES = sorted((ROOT / "dualops" / "cuda").glob("*/README.md"))
FENCED = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"# (\S+\.py)\n(.*)", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)")
HEADING_LINK = re.compile(r"\]\(#([^)\s]+)\)")
MARK = "--- end of block ---\n"


class Block(NamedTuple):
    code: str
    shown: str  # what the page says that it prints


def blocks(page: str) -> list[Block]:
    return [Block(code, shown) for code, shown in FENCED.findall(page)]


def run(page: str, folder: Path) -> list[str]:
    """What each block of a page prints. AssertionError with the traceback if one fails."""
    parts = [f"{block.code}\nprint({MARK!r}, end='')\n" for block in blocks(page) if not QUOTED.match(block.code)]
    script = folder / "page.py"  # a file: dualops reads the source of users' functions
    script.write_text("".join(parts))
    *shown, rest = printed(script, cwd=folder, NUMBA_ENABLE_CUDASIM="1").split(MARK)
    assert not rest
    return shown


def quotation(code: str) -> tuple[str, str] | None:
    """The file that a block says it is from, and the rest of the block."""
    found = QUOTED.match(code)
    return (found[1], found[2]) if found else None


def test_there_are_pages():
    assert ROOT / "dualops" / "cuda" / "flash_attention" / "README.md" in PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
class TestPage:
    def test_blocks_run_and_print_what_is_shown(self, page, tmp_path):
        text = page.read_text()
        shown = [block.shown for block in blocks(text) if not quotation(block.code)]
        assert shown
        assert run(text, tmp_path) == shown

    def test_every_block_is_one_that_runs_or_a_quotation(self, page):
        assert len(blocks(page.read_text())) == len(re.findall("^```python", page.read_text(), re.MULTILINE))

    def test_quotations_are_there(self, page):
        for block in blocks(page.read_text()):
            if found := quotation(block.code):
                file, quoted = found
                assert quoted in (ROOT / file).read_text(), f"{file} has no such lines:\n{quoted}"

    def test_links_lead_somewhere(self, page):
        targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
        assert [target for target in targets if not (page.parent / target).exists()] == []

    def test_links_within_the_page(self, page):
        text = page.read_text()
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert set(HEADING_LINK.findall(text)) <= anchors


class TestTheTest:
    """A page that is not true is found out."""

    def test_output_belongs_to_its_block(self, tmp_path):
        page = "```python\nx = 1\n```\n\n```python\nprint(x + 1)\n```\n```text\n3\n```\n"
        assert [block.shown for block in blocks(page)] == ["", "3\n"]
        assert run(page, tmp_path) == ["", "2\n"]

    def test_a_block_that_fails(self, tmp_path):
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            run("```python\n1 / 0\n```\n", tmp_path)

    def test_a_quotation_is_not_run(self, tmp_path):
        page = "```python\n# dualops/spec/meta.py\n1 / 0\n```\n"
        assert quotation(blocks(page)[0].code) == ("dualops/spec/meta.py", "1 / 0\n")
        assert run(page, tmp_path) == []
