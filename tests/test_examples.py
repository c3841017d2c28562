"""The tutorials of the site: their scripts run as a reader would run them, on a CPU, and print what the pages show."""

from __future__ import annotations

import runpy

import pytest

from tests.processes import ROOT
from tests.readme import python

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
TUTORIALS = ROOT / "docs" / "pages" / "tutorials"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_prints_what_its_page_shows(script, tmp_path, capsys):
    if "import torch" in script.read_text("utf-8"):
        runpy.run_path(str(script))  # no new process: to import torch and transformers takes most of the time
        printed = capsys.readouterr().out
    else:
        printed = python(tmp_path, str(script), NUMBA_ENABLE_CUDASIM="1")
    shown = script.with_suffix(".txt")
    assert printed == shown.read_text("utf-8"), f"python {script.name} > {shown.name} renews it, in the simulator"
    page = (TUTORIALS / f"{script.stem}.md").read_text("utf-8")
    assert all(f'--8<-- "examples/{file.name}"' in page for file in (script, shown))
