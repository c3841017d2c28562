"""README's table shows rows of one GPU and one commit."""

from benchmarks import headlines
from benchmarks.headlines import HEADLINES, Source
from benchmarks.recorded import Key, PeerRun, Peers, peer_runs
from benchmarks.tree import ROOT

OLD, NEW = PeerRun("a" * 40, "2026-01-01", "NVIDIA H100"), PeerRun("b" * 40, "2026-01-02", "NVIDIA H200")
TITLES = {headline.title: headline for headline in HEADLINES}


def recorded(runs: dict[str, PeerRun]) -> dict[str, Peers]:
    """Runs in which dualops takes 1 ms and its peer 2, by the rows' titles."""
    peers: dict[str, Peers] = {}
    for title, run in runs.items():
        of_operator = peers.setdefault(TITLES[title].operator, Peers({}, {}))
        for key in TITLES[title].keys:
            ours = {"burst": 1e-3, "roof": 5e-4, "error": 1.0, "baseline_error": 1.0}
            of_operator.measurements[key] = {"dualops": ours, "QuACK": {"burst": 2e-3}}
            of_operator.runs[key] = run
    return peers


def shown(table: str) -> dict[str, list[str]]:
    """The cells of a table's rows, by title."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {title: cells for title, *cells in rows[2:]}


def test_the_source_of_most_rows_is_shown_alone() -> None:
    peers = recorded({"softmax, 32,768 x 4096": OLD, "rms_norm, 32,768 x 4096": NEW, "layer_norm, 32,768 x 4096": NEW})
    assert headlines.source_of(peers) == Source("NVIDIA H200", "b" * 40)
    table = headlines.table(peers)
    assert list(shown(table)) == ["rms_norm, 32,768 x 4096", "layer_norm, 32,768 x 4096"]
    assert table.splitlines()[-1] == "On one NVIDIA H200, 2026-01-02, commit `bbbbbbbb`."


def test_of_two_sources_with_as_many_rows_the_later_is_shown() -> None:
    peers = recorded({"softmax, 32,768 x 4096": NEW, "rms_norm, 32,768 x 4096": OLD})
    assert list(shown(headlines.table(peers))) == ["softmax, 32,768 x 4096"]


def test_a_direction_of_another_source_is_left_out() -> None:
    peers = recorded({"softmax, 32,768 x 4096": NEW, "rms_norm, 32,768 x 4096": NEW})
    peers["softmax"].runs[Key("softmax", "rows32768x4096-bfloat16", "backward")] = OLD
    # 2 x 256 MiB in 1 ms
    assert shown(headlines.table(peers))["softmax, 32,768 x 4096"] == ["0.537 TB/s, 50%", "2.00, QuACK", "–", "–"]


def test_nothing_recorded_is_an_empty_table() -> None:
    assert headlines.source_of({}) is None
    assert shown(headlines.table({})) == {}


def test_readmes_rows_are_of_one_gpu_and_one_commit() -> None:
    peers, readme = peer_runs(ROOT / "benchmarks" / "peer_results"), (ROOT / "README.md").read_text("utf-8")
    rows = shown(readme.split("<!-- table:begin -->")[1].split("<!-- table:end -->")[0])
    assert rows
    runs = [headlines.runs_of(TITLES[title], peers) for title in rows]
    sources = {
        Source(run.device, run.commit)
        for cells, of_row in zip(rows.values(), runs, strict=True)
        for key, run in of_row.items()
        if cells[0 if key.direction == "forward" else 2] != "–"
    }
    assert sources == {headlines.source_of(peers)}
