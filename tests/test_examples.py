"""The tutorials of the site: their scripts run as a reader would run them, on a CPU, and print what the pages show."""

import json
import runpy
from pathlib import Path

import pytest

from tests import processes
from tests.processes import ROOT


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("[!_]*.py")), ids=lambda script: script.stem)
def test_it_prints_what_its_page_shows(script, tmp_path, capsys, monkeypatch):
    if "import torch" in script.read_text("utf-8"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        runpy.run_path(str(script))  # no new process: to import torch and transformers takes most of the time
        printed = capsys.readouterr().out
    else:
        printed = processes.printed(script, cwd=tmp_path, NUMBA_ENABLE_CUDASIM="1")
    shown = script.with_suffix(".txt")
    assert printed == shown.read_text("utf-8"), f"python {script.name} > {shown.name} renews it, in the simulator"
    page = (ROOT / "docs" / "pages" / "tutorials" / f"{script.stem}.md").read_text("utf-8")
    assert all(f'--8<-- "examples/{file.name}"' in page for file in (script, shown))


# what a process runs: an example, whose losses go to a file
WITH_LOSSES = """
import json, os, runpy, sys
losses = runpy.run_path(sys.argv[1])["losses"]
if os.environ["RANK"] == "0":
    with open(sys.argv[2], "w") as file:
        json.dump(losses, file)
"""


def test_context_parallel_on_two_processes(tmp_path: Path):
    script, program = ROOT / "examples" / "context_parallel.py", tmp_path / "with_losses.py"
    program.write_text(WITH_LOSSES)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    found = tmp_path / "losses.json"
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    printed = processes.printed(*torchrun, program, script, found, cwd=tmp_path, **environment)
    assert printed == script.with_suffix(".txt").read_text("utf-8")
    losses = runpy.run_path(str(script))["losses"]
    assert json.loads(found.read_text()) == pytest.approx(losses, rel=1e-5)
