"""The site's pages that follow from the sources: no public name is missing. `make docs` says whether it builds."""

from __future__ import annotations

import ast
import re

import pytest

from tests.processes import ROOT


@pytest.mark.parametrize("package", ["reference", "cuda", "testing", "torch_bridge"])
def test_every_public_name_has_its_place(package):
    """Read, not imported: what the bridge and the kernels need may be absent."""
    tree = ast.parse((ROOT / "dualops" / package / "__init__.py").read_text("utf-8"))
    (named,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    page = (ROOT / "docs" / "pages" / "api" / f"{package}.md").read_text("utf-8")
    missing = set(ast.literal_eval(named)) - set(re.findall(r"\w+", page))
    assert not missing, f"::: lines for {missing}"
