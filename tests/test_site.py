"""The site's pages that follow from the sources: no public name is missing. `make docs` says whether it builds."""

from __future__ import annotations

import re

import pytest

from dualops import testing
from tests.processes import ROOT

API = ROOT / "docs" / "pages" / "api"


@pytest.mark.parametrize("package", ["reference", "cuda", "torch_bridge"])
def test_every_public_function_has_its_place(package):
    """docs/repository.py names them in the place of this line."""
    assert f"::: dualops.{package}.*" in (API / f"{package}.md").read_text("utf-8").splitlines()


def test_every_name_of_the_oracle_has_its_place():
    missing = set(testing.__all__) - set(re.findall(r"\w+", (API / "testing.md").read_text("utf-8")))
    assert not missing, f"::: lines for {missing}"
