"""The picture of attention and matmul next to their peers, from made-up runs."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers_plot
from benchmarks.peers_plot import Panel, lengths, measured_runs, panels
from benchmarks.plot import fill
from benchmarks.recorded import Key, PeerRun, Peers, peer_runs, work_of
from benchmarks.tree import ROOT

FULL, CAUSAL, MATMUL = panels()[:3]


def measured(panel: Panel, times: dict[str, float | None]) -> dict[str, Peers]:
    """These times of each case."""
    found = Peers({}, {})
    for case_id in panel.cases.values():
        key = Key(panel.operator, case_id, panel.direction)
        each: dict[str, dict[str, Any]] = {name: {"burst": seconds} for name, seconds in times.items()}
        found.measurements[key] = each
        found.runs[key] = PeerRun("abcdef0123", "2026-01-02", "NVIDIA H200")
    return {panel.operator: found}


def test_rates_are_of_those_who_were_timed() -> None:
    found = FULL.rates(measured(FULL, {"dualops": 2e-3, "SDPA cuDNN": None, "FlashAttention-4": 1e-3}))
    assert [*found] == [*lengths(False)]
    for length, case_id in lengths(False).items():
        ours = work_of(Key("flash_attention", case_id, "forward")).rate(2e-3)
        assert found[length] == {"dualops": ours, "FlashAttention-4": 2 * ours}
    assert not CAUSAL.rates(measured(FULL, {"dualops": 2e-3})) and not MATMUL.rates(measured(FULL, {"dualops": 2e-3}))
    assert not FULL.rates(measured(FULL, {"SDPA cuDNN": 2e-3}))


@pytest.mark.parametrize("panel", [CAUSAL, MATMUL], ids=lambda panel: panel.operator)
def test_the_picture(panel: Panel, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "docs" / "peers.png"
    assert not peers_plot.picture({}, target) and not target.exists()
    times: dict[str, float | None] = {"dualops": 2e-3, "SDPA flash": 3e-3, "torch eager": 1e-3}
    assert peers_plot.picture(measured(panel, times), target)
    assert target.stat().st_size > 10_000
    said = measured_runs([(panel, panel.rates(measured(panel, times)))], measured(panel, times))
    assert said.endswith(f"\n{panel.operator}: one NVIDIA H200, 2026-01-02, commit abcdef01")


def test_the_caption_names_the_gpus_of_the_runs_that_are_drawn() -> None:
    both = measured(FULL, {"dualops": 2e-3}) | measured(MATMUL, {"dualops": 2e-3})
    assert peers_plot.caption(both) == "Attention on one NVIDIA H200, matmul on one NVIDIA H200."
    runs = both["flash_attention"].runs
    last = [*runs][-1]
    runs[last] = runs[last]._replace(device="NVIDIA H100")
    assert peers_plot.caption(both) == "Attention on one NVIDIA H200 or one NVIDIA H100, matmul on one NVIDIA H200."
    assert peers_plot.caption(measured(MATMUL, {"dualops": 2e-3})) == "Matmul on one NVIDIA H200."


def test_the_site_says_what_the_committed_runs_say() -> None:
    """The first page names no GPU but that of its picture: `python -m benchmarks plot` fills it in."""
    page = (ROOT / "docs" / "pages" / "index.md").read_text("utf-8")
    caption = peers_plot.caption(peer_runs(ROOT / "benchmarks" / "peer_results"))
    assert page == fill(page, caption, *peers_plot.MARKERS)
    assert "../peers.png" in page and not re.search(r"\b[ABH]\d00\b", page.replace(caption, ""))
