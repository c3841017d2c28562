"""The picture of attention beside its peers, from made-up runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import attention_plot
from benchmarks.attention_plot import OPERATOR, lengths, rates
from benchmarks.recorded import Key, PeerRun, Peers, work_of


def measured(causal: bool, times: dict[str, float | None]) -> Peers:
    """These times at each length, forward."""
    found = Peers({}, {})
    for case_id in lengths(causal).values():
        key = Key(OPERATOR, case_id, "forward")
        each: dict[str, dict[str, Any]] = {name: {"burst": seconds} for name, seconds in times.items()}
        found.measurements[key] = each
        found.runs[key] = PeerRun("abcdef0123", "2026-01-02", "NVIDIA H200")
    return found


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_are_those_of_as_many_tokens(causal: bool) -> None:
    found = lengths(causal)
    assert [*found] == [512, 2048, 4096, 8192, 16384]
    assert all(("causal" in case_id) == causal for case_id in found.values())


def test_rates_are_of_those_who_were_timed() -> None:
    found = rates("forward", False, measured(False, {"dualops": 2e-3, "SDPA cuDNN": None, "FlashAttention-4": 1e-3}))
    assert [*found] == [*lengths(False)]
    for length, case_id in lengths(False).items():
        ours = work_of(Key(OPERATOR, case_id, "forward")).rate(2e-3)
        assert found[length] == {"dualops": ours, "FlashAttention-4": 2 * ours}
    assert not rates("backward", False, measured(False, {"dualops": 2e-3}))
    assert not rates("forward", False, measured(False, {"SDPA cuDNN": 2e-3}))


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "docs" / "attention.png"
    assert not attention_plot.picture(Peers({}, {}), target) and not target.exists()
    assert attention_plot.picture(measured(True, {"dualops": 2e-3, "SDPA flash": 3e-3}), target)
    assert target.stat().st_size > 10_000
