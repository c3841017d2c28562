"""`python -m benchmarks context` on the CPU: two processes, a few tokens, the table and the figures."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.context_run import LARGE, TINY, Point, Row, line


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "context.json"
    assert main(["context", "--tiny", "--json", str(figures)]) == 0
    content = json.loads(figures.read_text())
    expected = [(row, heads) for row in TINY.rows for heads in TINY.gather_heads]
    assert [(point["row"], point["gather_heads"]) for point in content["points"]] == expected
    for point in content["points"]:
        times = [each for name in ("one", "all") for each in point[name]]
        assert min(times) > 0
        assert point["efficiency"] == pytest.approx([one / 2 / many for one, many in zip(point["one"], point["all"])])
    header, *lines = capsys.readouterr().out.splitlines()
    assert "efficiency" in header and len(lines) == len(expected)


def test_a_line_says_whether_the_target_is_reached() -> None:
    found = Point("causal", 4, 2, (0.1, 0.4), (0.05, 0.25), (1 << 30, 3 << 29))
    words = line(found, Row((8,), {}, (0.95, 0.9))).split()
    assert words[:2] == ["causal", "4"]
    assert words[2:8] == ["100.00", "ms", "50.00", "ms", "1.000", "0.95"] and words[8] == "ok"
    assert words[13:16] == ["0.800", "0.90", "no"] and words[16:] == ["1.00", "/", "1.50"]


def test_rows_are_of_65536_tokens() -> None:
    assert {row.ends[-1] for row in LARGE.rows.values()} == {65536}
