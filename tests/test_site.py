"""The site's pages: no public name is missing, much-read pages are short. `make docs` says whether it builds."""

import re

import pytest

from dualops import testing
from tests.processes import ROOT

API = ROOT / "docs" / "pages" / "api"


@pytest.mark.parametrize("package", ["reference", "cuda", "torch_bridge"])
def test_every_public_function_has_its_place(package):
    assert f"::: dualops.{package}.*" in (API / f"{package}.md").read_text("utf-8").splitlines()


def test_every_name_of_the_oracle_has_its_place():
    missing = set(testing.__all__) - set(re.findall(r"\w+", (API / "testing.md").read_text("utf-8")))
    assert not missing, f"::: lines for {missing}"


@pytest.mark.parametrize(
    ("page", "lines", "words"),
    [("CONTRIBUTING.md", 60, 500), ("README.md", 180, 1800), ("dualops/cuda/flash_attention/README.md", 777, 4500)],
)
def test_pages_that_many_read_are_short(page, lines, words):
    text = (ROOT / page).read_text("utf-8")
    assert len(text.splitlines()) <= lines
    assert len(text.split()) <= words
