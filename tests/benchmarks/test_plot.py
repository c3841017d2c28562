"""README's table and pictures, from a made-up tree of results."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import headlines, ladder_table, plot, scaling_plot, work
from benchmarks.__main__ import main
from benchmarks.cases import class_name
from benchmarks.recorded import Key, keys, peer_runs, recordings, work_of
from benchmarks.tree import ROOT, spec
from benchmarks.work import directions

COLUMNS = ["result", "params", "version", "started_at", "duration", "stats_ci_99_a"]
DAY = 86_400_000
BENCH = {name: [case.id for case in operator.tagged(spec.Tag.BENCH)] for name, operator in spec.OPERATORS.items()}
NARROW = Key("softmax", "rows32768x1024-bfloat16", "forward")
BY_ASV = [key for key in keys() if key.case in BENCH[key.operator]]


def record(results: Path, commit: str, day: int, seconds: float | None, *, dropped: int = 0) -> None:
    """A file as asv writes it: every case takes `seconds`; the last `dropped` cases failed or were skipped."""

    def row(operator: str) -> list[Any]:
        values: list[float | None] = [seconds] * len(BENCH[operator])
        for i in range(min(dropped, len(values))):
            values[-1 - i] = None if i % 2 else float("nan")
        return [values, [[f"'{case}'" for case in BENCH[operator]]], "1", day * DAY + 1000, 2.5]

    content = {
        "commit_hash": commit * 5,
        "date": day * DAY,
        "result_columns": COLUMNS,
        "results": {
            f"{operator.parent or name}.{class_name(name)}.time_{direction}": row(name)
            for name, operator in spec.OPERATORS.items()
            for direction in (*directions(operator), "a_way_that_is_gone")
        },
        "version": 2,
    }
    folder = results / "h200"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine.json").write_text(json.dumps({"cpu": "NVIDIA H200", "machine": "h200", "version": 1}))
    (folder / f"{commit}-checkout-py3.12.json").write_text(json.dumps(content))


def record_peers(folder: Path, times: dict[str, float | None], roof: float) -> None:
    """A run of softmax and its peers: the same times for each case and direction; None is a peer that failed."""
    measurements = [
        {"case": case, "direction": direction, "name": name, "roof": roof, "burst": seconds, "single": seconds}
        | {"error": 3e-3 if case == NARROW.case else 2e-3, "baseline_error": 2e-3}
        for case in BENCH["softmax"]
        for direction in ("forward", "backward")
        for name, seconds in times.items()
    ]
    folder.mkdir(parents=True)
    run = {"date": "1970-01-09", "gpu": "NVIDIA H200", "torch": "2.11", "commit": "f" * 40}
    runs = [{**run, "measurements": measurements}]
    (folder / "softmax.json").write_text(json.dumps({"operator": "softmax", "runs": runs}))


LENGTHS = work._lengths  # as they are, without the next fixture


@pytest.fixture(autouse=True)
def lengths_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some: which a case has is known once its arrays are drawn, which are half a gigabyte. See test_comparison.py."""
    monkeypatch.setattr(work, "_lengths", lambda operator, case: [(1024, 1024)])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    results = tmp_path / "results"
    record(results, "bbbbbbbb", 7, 1e-4)
    record(results, "aaaaaaaa", 6, 2e-4, dropped=3)  # the older commit, though its name sorts first
    return tmp_path


def rows_of(table: str) -> dict[tuple[str, ...], list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {tuple(cells[:3]): cells[3:] for cells in lines[2:]}


class TestRecorded:
    def test_commits_come_oldest_first_with_what_was_measured(self, tree: Path) -> None:
        older, newer = recordings(tree / "results", "h200")
        assert (older.commit[:8], newer.commit[:8]) == ("aaaaaaaa", "bbbbbbbb")
        assert set(newer.seconds) == set(BY_ASV)
        assert set(newer.seconds.values()) == {1e-4}
        assert f"{newer.measured:%Y-%m-%d}" == "1970-01-08"

    def test_failed_and_skipped_cases_have_no_time(self, tree: Path) -> None:
        older, _ = recordings(tree / "results", "h200")
        missing = {key.case for key in set(BY_ASV) - set(older.seconds) if key.operator == "softmax"}
        assert missing == set(BENCH["softmax"][-3:])

    def test_no_peers_were_recorded(self, tree: Path) -> None:
        assert peer_runs(tree / "peer_results") == {}


class TestTable:
    def test_rates_follow_from_the_specs_cost(self, tree: Path) -> None:
        table = plot.table(recordings(tree / "results", "h200"), {})
        source = "asv, median over bursts of 20 calls: `bbbbbbbb` on 1970-01-08, one NVIDIA H200."
        assert table.startswith(f"All but asv's, one process each:\n{source}\n\n|")
        found = rows_of(table)
        assert len(found) == len(BY_ASV)
        # 32768 x 1024 bfloat16: 2 x 64 MiB forward, 3 x 64 MiB backward, in 0.1 ms
        cells = ["0.1 ms", "1.34 TB/s", "–", "–", "–", "`bbbbbbbb`", "–"]
        assert found[NARROW.operator, NARROW.case, "forward"] == cells
        assert found[NARROW.operator, NARROW.case, "backward"][:2] == ["0.1 ms", "2.01 TB/s"]
        # 4 x 2 x 16 x 2048 x 2048 x 128 flops
        assert found["flash_attention", "s2048d128-bfloat16", "forward"][1] == "687.19 TFLOP/s"

    def test_peers_and_roof_are_of_the_same_run(self, tree: Path) -> None:
        times = {"dualops": 2e-4, "dualops naive": 1e-4, "Liger": 3e-4, "QuACK": 1.5e-4, "torch eager": None}
        record_peers(tree / "peers", times, 1e-4)
        table = plot.table(recordings(tree / "results", "h200"), peer_runs(tree / "peers"))
        row = rows_of(table)[NARROW.operator, NARROW.case, "forward"]
        assert row == ["0.2 ms", "0.67 TB/s", "50%", "QuACK", "0.75", "`ffffffff`", "0.1 ms, `bbbbbbbb`"]
        assert "softmax: 1970-01-09, one NVIDIA H200, commit `ffffffff`." in table.splitlines()

    def test_a_case_counts_at_the_newest_commit_that_timed_it(self, tree: Path) -> None:
        newest = json.loads((tree / "results" / "h200" / "bbbbbbbb-checkout-py3.12.json").read_text())
        only = {name: row for name, row in newest["results"].items() if not name.startswith("softmax")}
        (tree / "results" / "h200" / "bbbbbbbb-checkout-py3.12.json").write_text(json.dumps(newest | {"results": only}))
        rows = rows_of(plot.table(recordings(tree / "results", "h200"), {}))
        assert rows[NARROW.operator, NARROW.case, "forward"][-2] == "`aaaaaaaa`"
        assert rows["flash_attention", "s2048d128-bfloat16", "forward"][-2] == "`bbbbbbbb`"

    def test_the_summary_has_the_worst_and_the_best_of_a_dtype(self, tree: Path) -> None:
        record_peers(tree / "peers", {"dualops": 2e-4, "dualops naive": 1e-4, "QuACK": 1.5e-4}, 1e-4)
        path = tree / "peers" / "softmax.json"
        content = json.loads(path.read_text())
        content["runs"][0]["measurements"][0]["burst"] = 1e-4  # the first case, forward, bfloat16
        path.write_text(json.dumps(content))
        summary = plot.summary(peer_runs(tree / "peers")).splitlines()
        assert summary[2] == "| softmax | bfloat16 | 50% to 100% | 50% | 1.50 | 0.75 to 1.50 | 0.75 |"
        assert summary[3] == "| softmax | float32 | 50% | 50% | 1.00 | 0.75 | 0.75 |"
        assert summary[-1] == "softmax: 1970-01-09, one NVIDIA H200, commit `ffffffff`."

    def test_where_cases_are_of_two_runs_both_are_named(self, tree: Path) -> None:
        record_peers(tree / "peers", {"dualops": 2e-4}, 1e-4)
        path = tree / "peers" / "softmax.json"
        content = json.loads(path.read_text())
        (old,) = content["runs"]
        new = {**old, "commit": "e" * 40, "measurements": [m for m in old["measurements"] if m["case"] == NARROW.case]}
        old["measurements"] = [m for m in old["measurements"] if m["case"] != NARROW.case]
        path.write_text(json.dumps({**content, "runs": [old, new]}))
        lines = plot.summary(peer_runs(tree / "peers")).splitlines()[-2:]
        every = len(BENCH["softmax"])
        assert f"softmax (1 of {every} cases): 1970-01-09, one NVIDIA H200, commit `eeeeeeee`." in lines
        assert f"softmax ({every - 1} of {every} cases): 1970-01-09, one NVIDIA H200, commit `ffffffff`." in lines

    def test_it_lands_between_the_markers_and_nowhere_else(self) -> None:
        readme = f"before\n{plot.BEGIN}\nold\n{plot.END}\nafter"
        once = plot.fill(readme, "new")
        assert once == f"before\n{plot.BEGIN}\nnew\n{plot.END}\nafter"
        assert plot.fill(once, "new") == once

    @pytest.mark.parametrize("readme", ["", plot.BEGIN, plot.END + plot.BEGIN, plot.BEGIN + plot.END + plot.END])
    def test_markers_must_be_there(self, readme: str) -> None:
        with pytest.raises(ValueError, match="once each"):
            plot.fill(readme, "new")


def test_the_pages_have_what_plot_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_lengths", LENGTHS)
    peers = peer_runs(ROOT / "benchmarks" / "peer_results")
    for place, content in (("README.md", headlines.table(peers)), ("docs/pages/numbers.md", plot.summary(peers))):
        page = (ROOT / place).read_text("utf-8")
        assert plot.fill(page, content) == page, f"{place}: `python -m benchmarks plot` writes another table"
    lengths = scaling_plot.table(ROOT / "benchmarks" / "scaling" / "h200.json")
    assert lengths in (ROOT / "docs" / "measurements" / "flash_attention.md").read_text("utf-8")


def test_what_is_committed_can_be_read() -> None:
    """Whether it tells a spread or not, which runs before the contestants took turns do not."""
    peers = peer_runs(ROOT / "benchmarks" / "peer_results")
    assert {"softmax", "matmul", "flash_attention"} <= peers.keys()
    summary = plot.summary(peers).splitlines()
    assert {"| softmax | bfloat16", "| matmul | float32"} <= {" |".join(row.split(" |")[:2]) for row in summary}
    rows = rows_of(plot.table(recordings(ROOT / "benchmarks" / "results", "h200"), peers))
    assert rows[NARROW][4] != "–"  # of the roof


class TestPicture:
    def curves(self, axes: Any) -> dict[str, list[tuple[float, float]]]:
        return {line.get_label(): list(zip(line.get_xdata(), line.get_ydata())) for line in axes.get_lines()}

    def test_rate_against_length_with_peers_that_win_and_the_roof(self, tree: Path) -> None:
        from matplotlib.figure import Figure

        record_peers(tree / "peers", {"dualops": 2e-4, "QuACK": 5e-5, "torch eager": None}, 4e-5)
        axes = Figure().subplots()
        newest, peers = recordings(tree / "results", "h200")[-1], peer_runs(tree / "peers")["softmax"]
        plot.against_length(axes, "softmax", "forward", [newest], peers)
        curves = self.curves(axes)
        assert set(curves) == {"dualops bfloat16", "dualops float32", "dualops float16", "QuACK", "roof"}
        assert [x for x, _ in curves["QuACK"]] == [1024, 4096, 16384, 65536, 262144]
        nbytes = 2 * 32768 * 1024 * 2 / 1e12
        for label, seconds in (("dualops bfloat16", 1e-4), ("QuACK", 5e-5), ("roof", 4e-5)):
            assert curves[label][0] == (1024, pytest.approx(nbytes / seconds))

    def test_a_curve_has_one_point_a_length(self) -> None:
        from matplotlib.figure import Figure

        history = recordings(ROOT / "benchmarks" / "results", "h100")
        every = peer_runs(ROOT / "benchmarks" / "peer_results")
        for operator, direction in product(("rms_norm", "layer_norm"), ("forward", "backward")):
            axes = Figure().subplots()
            plot.against_length(axes, operator, direction, history, every[operator])
            curves = self.curves(axes)
            assert len(curves["dualops bfloat16"]) >= 4
            assert all(len(points) == len({x for x, _ in points}) for points in curves.values())

    def test_an_operator_without_times_has_no_picture(self, tree: Path) -> None:
        only = recordings(tree / "results", "h200")[-1]
        nothing = only._replace(seconds={key: 1.0 for key in only.seconds if key.operator != "softmax"})
        with pytest.raises(ValueError, match="no commit has a time of softmax"):
            plot.picture("softmax", [nothing], None, tree / "softmax.png")


class TestCommand:
    def words(self, tree: Path, machine: str = "h200") -> list[str]:
        places = {name: name for name in ("results", "scaling", "training", "ladder", "host", "docs")}
        places |= {"peer-results": "peers", "readme": "README.md", "numbers": "numbers.md", "every-case": "all.md"}
        places |= {"page": "page.md", "pages": "pages", "index": "index.md"}
        return ["plot", "--machine", machine, *(f"--{name}={tree / place}" for name, place in places.items())]

    def pages(self, tree: Path) -> None:
        for name in ("README.md", "numbers.md", "all.md"):
            (tree / name).write_text(f"# dualops\n{plot.BEGIN}\n{plot.END}\n")
        for operator in ladder_table.PAGES:
            (tree / "pages" / operator).mkdir(parents=True)
            (tree / "pages" / operator / "README.md").write_text("# Page\n<!-- ladder:begin -->\n<!-- ladder:end -->\n")

    def test_plot_fills_the_pages_and_draws(self, tree: Path) -> None:
        record_peers(tree / "peers", {"dualops": 2e-4, "QuACK": 5e-5}, 4e-5)
        self.pages(tree)
        assert main(self.words(tree)) == 0
        assert len(rows_of((tree / "all.md").read_text())) == len(BY_ASV)
        assert len(rows_of((tree / "numbers.md").read_text())) == 3  # softmax in three dtypes
        assert "softmax, 32,768 x 4096" in (tree / "README.md").read_text()
        png = (tree / "docs" / "softmax.png").read_bytes()
        assert png.startswith(b"\x89PNG")
        width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
        assert width > 1000
        assert height > 800  # two lines of axes: lengths, commits
        drawn = {path.name for path in (tree / "docs").iterdir()}
        assert "softmax.png" in drawn
        assert "peers.png" not in drawn  # nobody timed attention or matmul
        assert "flash_attention_scaling.png" not in drawn  # nothing was recorded
        for operator in ladder_table.PAGES:
            assert "Nothing has been recorded yet" in (tree / "pages" / operator / "README.md").read_text()
            assert ladder_table.picture_name(operator) not in drawn

    def test_nothing_recorded_is_said(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(self.words(tmp_path)) == 1
        assert "asv recorded no times in " in capsys.readouterr().err


@pytest.mark.parametrize(("operator", "unit"), [("softmax", "TB/s"), ("flash_attention", "TFLOP/s")])
def test_attention_is_quoted_in_flops_and_rows_in_bytes(operator: str, unit: str) -> None:
    """But for a case with one query, which has nothing to do but to read keys and values."""
    units = {key.case: work_of(key).unit for key in keys() if key.operator == operator}
    one_query = {case for case in units if case.startswith("sq1")}
    assert {units.pop(case) for case in one_query} <= {"TB/s"} and {*units.values()} == {unit}
