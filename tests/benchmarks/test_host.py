"""The table of host costs: what counts as reached, and what a line says."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.host_run import Row, document, line, save
from benchmarks.host_table import table


@pytest.mark.parametrize(
    ("row", "reached"),
    [
        (Row("a", 12e-6, torch=10e-6, times=1.3), True),
        (Row("a", 14e-6, torch=10e-6, times=1.3), False),
        (Row("a", 14e-6, torch=10e-6), None),
        (Row("a", 24e-6, most=25e-6), True),
        (Row("a", 26e-6, most=25e-6), False),
        (Row("a", 1.0), None),
    ],
)
def test_reached(row, reached):
    assert row.reached is reached


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row("softmax", 14e-6, torch=10e-6, times=1.3), "softmax 14.0 µs torch 10.0 µs 1.40 x at most 1.3 x: MISSED"),
        (Row("start", 0.05, most=0.1), "start 0.050 s at most 0.100 s: reached"),
        (Row("rms_norm", 14e-6), "rms_norm 14.0 µs"),
    ],
)
def test_lines(row, expected):
    assert " ".join(line(row).split()) == expected


def test_what_is_kept(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    save(tmp_path / "folder" / "h200.json", [Row("a", 1e-6, torch=1e-6, times=1.3), Row("b", 2.0)])
    kept = json.loads((tmp_path / "folder" / "h200.json").read_text())
    assert kept["gpu"] == "a GPU"
    rows = [(row["name"], row["seconds"], row["reached"]) for row in kept["rows"]]
    assert rows == [("a", 1e-6, True), ("b", 2.0, None)]
    assert document([])["rows"] == []


def test_the_table_of_the_page(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    rows = [Row("a", 12e-6, torch=10e-6, times=1.3), Row("b", 2.0, most=1.0), Row("c", 3e-6)]
    save(tmp_path / "h200.json", rows)
    lines = table(tmp_path / "h200.json").splitlines()
    assert "one GPU" in lines[0]
    assert lines[-3:] == [
        "| a | 12.0 µs | 10.0 µs | 1.20 | at most 1.3 | yes |",
        "| b | 2.00 s | – | – | at most 1.00 s | **no** |",
        "| c | 3.0 µs | – | – | – | – |",
    ]
