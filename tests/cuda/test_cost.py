"""The cost model: its data and parts against other sources, and its order against what was measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.plot import fill
from docs import draw_estimates as draw
from dualops.cuda.compiler.compile import Report
from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.launch.device import ARCHITECTURES as COMPILED, every, known
from dualops.cuda.launch.operation import OPERATIONS
from dualops.cuda.norm.staging import RingConfig
from dualops.cuda.retention.sm90.config import Sm90Config
from dualops.cuda.rows.cluster import ClusterRowsConfig
from dualops.cuda.rows.registers import RowsConfig
from dualops.estimate import (
    ARCHITECTURES,
    architecture,
    block_rows,
    build,
    candidates as candidates_module,
    cluster_rows,
    estimate,
    rankings,
    row_gradients,
)
from dualops.estimate.attention import pieces_of_keys, pieces_of_queries
from dualops.estimate.model import makespan
from dualops.estimate.problems import problem_of
from dualops.estimate.retention_passes import passes_of, walk_work
from dualops.estimate.steps import Product
from tests.pictures import hold_pictures

H200 = architecture("h200")


# --- its parts -----------------------------------------------------------------------------------


def test_rates_are_those_of_data_sheets():
    """TFLOP/s of bfloat16, and the clock that they are of where it is not the one that the record has."""
    sheets = {"a100": (312, 1.41e9), "rtx4090": (165.2, 2.52e9), "h100": (989.4, 1.83e9), "h200": (989.4, 1.83e9)}
    sheets |= {"b200": (2250, 1.85e9), "rtx5090": (209.5, 2.407e9)}
    assert sheets.keys() == ARCHITECTURES.keys()
    for name, (tflops, clock) in sheets.items():
        gpu = ARCHITECTURES[name]
        assert gpu.tensor["bfloat16"] * gpu.sms * clock / 1e12 == pytest.approx(tflops, rel=0.01)
        like = known(gpu.arch)
        assert gpu.shared_per_block == like.shared_memory_per_block and gpu.sms == like.sms
    for arch in COMPILED:
        bandwidths = {gpu.device.memory_bandwidth for gpu in ARCHITECTURES.values() if gpu.arch == arch}
        assert bandwidths in ({device.memory_bandwidth for device in every(arch)}, set())


def test_every_architecture_that_has_a_gpu_here_is_found_by_its_own_name():
    assert {gpu.arch for gpu in ARCHITECTURES.values()} == {*COMPILED} - {"sm_86"}
    assert architecture("sm_90a") is architecture("sm_90") is architecture("H200") is H200
    assert architecture("sm_100").name == "b200"
    with pytest.raises(ValueError, match=r"arch is 'sm_86', expected one of a100, .*, h200, .*, sm_80, .*, sm_90a, "):
        architecture("sm_86")


@pytest.mark.parametrize("operator", ["softmax", "rms_norm", "layer_norm"])
def test_the_usual_rows_have_estimates_on_every_gpu(operator: str):
    for name in ARCHITECTURES:
        for ranking in estimate(operator, arch=name):
            assert ranking.rows


@pytest.mark.parametrize(("columns", "left", "bytes_a_clock"), [(64, True, 128), (128, True, 96), (256, True, 80)])
def test_shared_memory_of_warpgroups(columns: int, left: bool, bytes_a_clock: int):
    """64 rows and 16 steps take columns / 2 clocks; from registers it is 64 bytes, whatever the columns."""
    assert Product(64, columns, 16, left).warpgroup_bytes / (columns / 2) == bytes_a_clock
    assert Product(64, columns, 16, False).warpgroup_bytes / (columns / 2) == 64


def test_makespan():
    assert makespan({2.0: 10}, 4) == 6.0
    rng = np.random.default_rng(0)
    for _ in range(20):
        times, slots = (
            {float(t): int(c) for t, c in zip(rng.random(9), rng.integers(1, 99, 9))},
            int(rng.integers(1, 40)),
        )
        even = sum(time * count for time, count in times.items()) / slots
        assert max(even, *times) <= makespan(times, slots) <= even + max(times)


MASKS = ("", "causal=True", "causal=top_left", "window=(100,0)", "window=(70,None)", "causal=True window=(300,300)")


@pytest.mark.parametrize(("mask", "Sq", "Sk"), [*product(MASKS, (500, 257), (500, 900))])
def test_pieces_are_the_tiles_that_see_something(mask: str, Sq: int, Sk: int):
    p = absent_problem(*problem_of(f"flash_attention B=2 H=4 Hkv=2 Sq={Sq} Sk={Sk} D=64 {mask}"))
    i, j = np.arange(Sq)[:, None] + (0 if p.causal == "top_left" else Sk - Sq), np.arange(Sk)
    left, right = p.window or (None, None)
    seen = np.ones((Sq, Sk), bool) if not p.causal else j <= i
    seen = seen & (left is None or j >= i - left) & (right is None or j <= i + right)
    for found, array, heads, group in (
        (pieces_of_queries(p, 128, 96), seen, 8, 1),
        (pieces_of_keys(p, 128, 96), seen.T, 4, 2),
    ):
        rows = [array[first : first + 128] for first in range(0, len(array), 128)]
        counts = Counter(
            sum(bool(row[:, c : c + 96].any()) for c in range(0, row.shape[1], 96)) * group for row in rows
        )
        assert found == Counter({steps: heads * count for steps, count in counts.items()})


def test_an_estimate_adds_up():
    found = rankings("flash_attention B=1 H=1 S=4096 D=128", H200, backward=False)[0].rows[0].candidate.estimate
    assert found.bound == "waves"  # 32 tiles of queries for 132 SMs
    busiest = max(found.busy[unit] for unit in ("tensor cores", "exponentials", "arithmetic", "shared memory"))
    assert busiest + sum(found.lost.values()) == pytest.approx(found.seconds)


# --- against what was measured --------------------------------------------------------------------


def test_the_order_is_that_of_measurements():
    """Of TFLOP/s, in which a problem's size does not show. The page has its table and picture of these pairs."""
    found = draw.pairs()
    assert len(found) >= 80
    for group in draw.GROUPS:
        mine = [pair for pair in found if pair.group == group]
        ratios = [pair.estimated / pair.measured for pair in mine]
        assert np.median(ratios) == pytest.approx(1, abs=0.1)
        if group == draw.AT_ROOF:
            assert min(ratios) > 0.9 and max(ratios) < 1.12
            continue
        assert draw.rank_correlation(mine) >= 0.8
        others = [pair for pair in mine if not pair.fitted]
        assert not others or draw.rank_correlation(others) >= 0.8
    assert fill(draw.PAGE.read_text("utf-8"), draw.table(found), *draw.MARKERS).count("\n|") > len(draw.listed(found))


@pytest.mark.parametrize(("gpu", "least"), [("h100", 200), ("h200", 70)])
def test_what_a_call_takes_is_as_fast_as_the_best_that_was_found(gpu: str, least: int):
    """Within 5 %, of rows in blocks and gradients of norms, in each run in which it was timed."""
    known, compared = json.loads((draw.ROOT / f"benchmarks/configs/blocks_{gpu}.json").read_text()), 0
    for run in known["runs"]:
        p = absent_problem(*problem_of(run["problem"]), backward=run["backward"])
        operation = OPERATIONS[p.spec.name][run["backward"]]
        taken = operation.choose(p, p.outputs(operation.outputs), ARCHITECTURES[gpu].device).config
        kind = "rings" if isinstance(taken, RingConfig) else "rows"
        times = {tuple(shape): time for *shape, time in run.get(kind, ())}
        own = times.get(tuple(getattr(taken, field) for field in known[f"fields_of_{kind}"][:-1]))
        if own is not None:
            compared += 1
            assert own <= 1.05 * min(time for each in ("rows", "rings") for *_, time in run.get(each, ())), run[
                "problem"
            ]
    assert compared >= least


def test_the_picture_of_the_page(tmp_path: Path):
    hold_pictures([*map(str, draw.draw(tmp_path, draw.PICTURES))], draw.PICTURES, page=draw.PAGE)


# --- candidates ------------------------------------------------------------------------------------


PROBLEMS = (
    "flash_attention S=2048 B=1 H=2 D=128 causal=True",
    "matmul M=512 N=512 K=512",
    "retention B=2 H=12 S=4096 D=128",
    "retention B=2 H=12 S=1024 D=64 return_state=True",
    "retention B=2 H=8 S=2048 D=192 Dv=320",
    "retention B=2 H=8 S=1024 D=64 Dv=128 dtype=float16",
)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", ["a100", "h200", "rtx5090"])
def test_every_candidate_has_launches_and_fits(problem: str, name: str):
    gradient = name != "rtx5090" or not problem.startswith("flash_attention")  # attention's takes another rung there
    for ranking in rankings(problem, ARCHITECTURES[name], backward=gradient):
        assert sum(row.taken for row in ranking.rows) == 1
        seconds = [row.candidate.estimate.seconds for row in ranking.rows]
        assert seconds == sorted(seconds)
        for row in ranking.rows:
            assert row.candidate.shared_bytes <= ARCHITECTURES[name].shared_per_block
            for step in row.candidate.steps():  # so many blocks as its registers are for
                assert step.kernel.min_blocks * step.shared_bytes <= ARCHITECTURES[name].shared_per_block


ROWS = [
    ("softmax", "M=8192 N=65536", 4),
    ("softmax", "M=300 N=10000 dtype=float32", 3),
    ("rms_norm", "x=8192x65536:bfloat16 w=65536:bfloat16 residual=8192x65536:bfloat16", 8),
    ("layer_norm", "M=8192 N=65536", 8),
    ("layer_norm", "M=4096 N=49152 dtype=float32", 3),
]


@pytest.mark.parametrize(("operator", "problem", "least"), ROWS)
@pytest.mark.parametrize("name", ["h100", "h200"])
def test_every_cluster_of_rows_has_a_launch_and_fits(operator: str, problem: str, least: int, name: str):
    gpu = ARCHITECTURES[name]
    for ranking in rankings(f"{operator} {problem}", gpu, backward=operator == "softmax"):
        assert sum(row.taken for row in ranking.rows) == 1 and len(ranking.rows) >= min(least, 3)
        assert ranking.title != "forward" or len(ranking.rows) >= least
        for row in ranking.rows:
            (step,) = row.candidate.steps()
            (config,) = row.candidate.configs
            assert step.kernel.cluster == config.cluster and step.shared_bytes == row.candidate.shared_bytes
            assert config.min_blocks * (row.candidate.shared_bytes + 2048) <= gpu.shared_per_sm
            assert {"memory", "waits", "waves", "launches"} == row.candidate.estimate.shares.keys()


def test_rows_wait_for_their_cluster_where_an_sm_has_few():
    """More blocks hide what a row waits, until memory is busy; an H200's memory is busy later."""
    p = absent_problem(*problem_of("layer_norm M=8192 N=65536"))
    times = {
        name: [
            cluster_rows.rows_estimate(ClusterRowsConfig(256, 4, 8, blocks), p, False, ARCHITECTURES[name]).seconds
            for blocks in (2, 3, 4)
        ]
        for name in ("h100", "h200")
    }
    for few, more, most in times.values():
        assert few > more > most
    assert times["h100"][2] > times["h200"][2] and times["h100"][0] < 1.05 * times["h200"][0]


SHORT_ROWS = ["softmax M=32768 N=4096", "softmax M=100 N=96 dtype=float32", "layer_norm M=32768 N=16384"]


@pytest.mark.parametrize("problem", [*SHORT_ROWS, "rms_norm x=64x1000:float16 w=1000:float32 residual=64x1000:float16"])
@pytest.mark.parametrize("name", ["a100", "h200", "rtx5090"])
def test_every_block_of_rows_has_a_launch_and_fits(problem: str, name: str):
    gpu = ARCHITECTURES[name]
    for ranking in rankings(problem, gpu, backward=problem.startswith("softmax")):
        assert sum(row.taken for row in ranking.rows) == 1 and len(ranking.rows) >= 3
        for row in ranking.rows:
            (step,), (config,) = row.candidate.steps(), row.candidate.configs
            p = absent_problem(*problem_of(problem), backward=ranking.title == "backward")
            assert step.kernel.threads == config.threads <= 1024 and config.columns(p.dtype) >= p.N
            assert row.candidate.rung == "simt" and step.grid[0] * config.rows >= p.M


GRADIENTS = [
    ("rms_norm M=32768 N=4096", {"h200": 12, "a100": 3}),
    ("layer_norm M=100 N=96", {"h200": 6, "a100": 3}),
    ("layer_norm M=8192 N=65536", {"h200": 5}),
    ("rms_norm x=512x8192:float32 w=8192:float32 residual=512x8192:float32", {"h200": 10}),
]


@pytest.mark.parametrize(("problem", "least"), GRADIENTS)
def test_every_gradient_of_norms_has_launches_and_fits(problem: str, least: dict[str, int]):
    p = absent_problem(*problem_of(problem), backward=True)
    for name, count in least.items():
        gpu = ARCHITECTURES[name]
        (ranking,) = [each for each in rankings(problem, gpu) if each.title == "backward"]
        assert sum(row.taken for row in ranking.rows) == 1 and len(ranking.rows) >= count
        assert any(isinstance(row.candidate.configs[0], RingConfig) for row in ranking.rows) == (name == "h200")
        for row in ranking.rows:
            (step, sums), (config,) = row.candidate.steps(), row.candidate.configs
            cluster = getattr(config, "cluster", 1)
            assert step.kernel.cluster == cluster and cluster * config.columns(p.dtype) >= p.N
            assert config.min_blocks * step.shared_bytes <= gpu.shared_per_sm and sums.grid[0] > 0
            assert step.grid[0] <= gpu.sms * config.min_blocks


def test_a_gradient_without_weights_keeps_nothing():
    """No dw and db, and no launch for them."""
    gpu, config = ARCHITECTURES["h100"], RingConfig(256, 2, 1, 6)
    rows = "rms_norm x=32768x4096:bfloat16"
    with_w, without = (absent_problem(*problem_of(text), backward=True) for text in (f"{rows} w=4096:bfloat16", rows))
    more = row_gradients.rows_estimate(config, with_w, gpu).seconds
    assert more > row_gradients.rows_estimate(config, without, gpu).seconds + 2e-6
    (ranking,) = [each for each in rankings(rows, gpu) if each.title == "backward"]
    assert {len(row.candidate.steps()) for row in ranking.rows} == {1}
    assert str(ranking.rows[0].candidate.parts[0]).startswith("dx: ")


def test_what_a_gradient_waits_for():
    """Where a row arrives by itself an SM wants more blocks; stages that fill an SM cost memory a part of its time."""
    p = absent_problem(*problem_of("layer_norm M=65536 N=4096"), backward=True)

    def seconds(config: RowsConfig | RingConfig) -> float:
        return row_gradients.rows_estimate(config, p, ARCHITECTURES["h100"]).seconds

    one, two, three = (seconds(RowsConfig(128, 4, 1, min_blocks=blocks)) for blocks in (1, 2, 3))
    assert one > 1.15 * two > 1.15 * three
    enough, many = (seconds(RingConfig(256, 2, 1, stages, w_shared=True)) for stages in (6, 12))
    assert 1.05 * enough > many > enough
    alone, together = (seconds(RingConfig(256, 1, 1, 6, cluster, w_shared=True)) for cluster in (2, 4))
    assert together > alone  # half as much of a row is on an SM, and more blocks meet


def test_a_block_of_rows_is_as_fast_as_memory_where_sms_have_enough_of_it():
    p = absent_problem(*problem_of("softmax M=32768 N=4096"))
    gpu, config = ARCHITECTURES["h100"], RowsConfig(256, 2, 1)
    found = block_rows.rows_estimate(config, p, False, gpu)
    assert found.bound == "memory" and found.seconds == pytest.approx(found.busy["memory"], rel=0.03)
    small = absent_problem(*problem_of("softmax M=132 N=4096"))
    assert 4e-6 < block_rows.rows_estimate(config, small, False, gpu).seconds < 6e-6  # a turn and a launch


SEGMENTS = [
    ("B=1 H=8 S=131072 D=128", (16, 16)),  # of forward, and of its gradient
    ("B=2 H=16 S=8192 D=128", (4, 1)),
    ("B=8 H=16 S=2048 D=128", (1, 1)),
    ("B=32 H=32 S=4096 D=128", (1, 1)),
]


@pytest.mark.parametrize(("problem", "segments"), SEGMENTS)
def test_few_sequences_of_retention_are_walked_in_segments(problem: str, segments: tuple[int, int]):
    """The first of each ranking, which is what was chosen by measuring, too."""
    found = rankings(f"retention {problem}", H200)
    assert [ranking.title for ranking in found] == ["forward", "backward"]
    for ranking, wanted in zip(found, segments, strict=True):
        first = ranking.rows[0]
        assert first.taken and first.candidate.rung == "sm90" and first.candidate.configs[0].segments == wanted


def test_segments_of_retention_are_all_of_its_chunks():
    """Of a pass and of what comes before it, be the last segment shorter or empty."""
    p = absent_problem(*problem_of("retention B=2 H=3 S=3000 D=128"))
    (one,) = passes_of(p, backward=False)
    for segments in (1, 2, 4, 5, 11):
        config = Sm90Config(segments=segments)
        assert sum(chunks * count for chunks, count in walk_work(config, [one], p, H200).pieces.items()) == 6 * 24
    first = walk_work(Sm90Config(segments=4), [one], p, H200, looks=False)
    assert first.pieces == {6: 6 * 3}  # nobody needs what the last one adds


def test_what_spills_goes_to_the_end(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def built(wanted: Sequence[Any], jobs: int) -> list[Report]:
        asked.append([*wanted])
        spills = 8 if len(asked) == 1 else 0
        return [Report("kernel", "sm_90a", 168, 0, spills, 0, 0, 1, (), not spills, 1.0)]

    monkeypatch.setattr(candidates_module, "build_all", built)
    (ranking,) = rankings("matmul M=4096 N=4096 K=4096", H200, backward=False)
    made = build(ranking, H200, 2)
    first, second, *others = [row.candidate for row in ranking.rows]
    assert [row.candidate for row in made.rows] == [second, *others, first]
    assert made.rows[0].built and made.rows[0].built.registers == 168 and made.rows[1].built is None
    assert made.rows[-1].built and made.rows[-1].built.spill_bytes == 8


# --- problems ----------------------------------------------------------------------------------------


def test_problems_by_their_sizes():
    spec, case = problem_of("flash_attention B=2 H=8 Hkv=2 Sq=128 S=512 D=192 Dv=128 causal=True dtype=float16")
    assert spec.name == "flash_attention" and case.dtype == "float16" and case.params == {"causal": True}
    assert case.shapes == {"q": (2, 8, 128, 192), "k": (2, 2, 512, 192), "v": (2, 2, 512, 128)}
    assert problem_of("matmul M=2 N=3 K=4 transpose_b=True")[1].shapes == {"a": (2, 4), "b": (3, 4)}
    assert problem_of("matmul B=5 M=2 N=3 K=4 transpose_a=True")[1].shapes == {"a": (5, 4, 2), "b": (5, 4, 3)}
    assert problem_of("retention B=2 H=3 S=70 D=8 Dv=4")[1].shapes == {
        "q": (2, 3, 70, 8),
        "k": (2, 3, 70, 8),
        "v": (2, 3, 70, 4),
    }
    assert problem_of("matmul a=2x4:float16 b=4x3")[1].shapes == {"a": (2, 4), "b": (4, 3)}


WRONG = [
    ("softmax M=3", "softmax: no N, which x needs"),
    ("matmul M=3 K=4", "matmul: no N, which b needs"),
    ("matmul M=x", "matmul: M=x, expected a size of at least 1"),
    ("matmul M=0 N=1 K=1", "matmul: M=0, expected a size of at least 1"),
    ("matmul M=1 M=2", "matmul: M=2, expected name=..., each once"),
    ("flash_attention B=1 H=1 D=64", "flash_attention: no Sq or S, which q needs"),
    ("flash_attention B=1 H=1 S=64 Sq=64 Sk=64 D=64", "flash_attention: S given with the sizes that it stands for"),
    ("flash_attention B=1 H=3 Hkv=2 S=256 D=64", "flash_attention: "),
    ("retention B=1 H=2 D=64", "retention: no S, which q needs"),
    ("retention B=1 H=2 Sq=64 D=64", "retention: Sq=64, expected name=..., each once, of B, D, Dv, H, S, dtype"),
]


@pytest.mark.parametrize(("problem", "message"), WRONG)
def test_wrong_problems(problem: str, message: str):
    with pytest.raises(ValueError, match="^" + message.replace("(", "\\(")):
        estimate(problem)


UNKNOWN = [
    ("flash_attention B=1 H=1 S=256 D=64 softcap=3.0", "no estimates with softcap"),
    ("flash_attention B=1 H=1 S=256 D=64 dtype=float32", "no estimates for float32"),
    ("flash_attention B=1 H=1 Sq=1 Sk=256 D=64", "no estimates for Sq=1"),
    ("retention B=2 H=8 S=512 D=64 form=recurrent", "no estimates for form='recurrent', expected 'chunk'"),
    ("retention B=2 H=8 S=512 D=64 normalize=signed", "no estimates with normalize='signed', expected None"),
    ("retention B=2 H=8 S=512 D=64 dtype=float32", "where a call takes the rung simt, not one of sm90, sm80"),
    ("retention q=2x8x0x64:bfloat16 k=2x8x0x64 v=2x8x0x64", "no estimates of an empty problem"),
    (
        "retention q=2x8x512x64:bfloat16 k=2x8x512x64 v=2x8x512x64 log_decay=2x8x512",
        "no estimates of the gradient with log_decay",
    ),
    (
        "layer_norm M=64 N=262144",
        "no estimates where a call takes RingConfig",
    ),
    ("softmax M=64 N=64 dtype=float64", "no estimates for float64"),
    ("layer_norm x=0x64:float32 w=64:float32", "no estimates of an empty problem"),
    ("softmax M=64 N=1001", "no estimates where rows are no multiple of 16 bytes"),
    ("softmax x=64x8192:float16 axis=0", "no estimates where a call takes StridedConfig"),
    (
        "matmul M=4097 N=4097 K=4097",
        "no estimates where a factor is copied first: rows that are no multiple of 16 bytes",
    ),
    ("matmul M=2147483648 N=4096 K=4096", "first: rows .*, or sizes past what boxes reach"),
    ("retention B=2 H=16 S=32 D=128", "no estimates for S=32, expected more than 32 tokens"),
]


@pytest.mark.parametrize(("problem", "message"), UNKNOWN)
def test_what_the_model_does_not_know_is_refused(problem: str, message: str):
    with pytest.raises(NotImplementedError, match=message):
        estimate(problem)


def test_an_unknown_gpu():
    with pytest.raises(ValueError, match="arch is 'h900', expected one of a100, rtx4090, h100, h200, b200, rtx5090"):
        estimate("matmul", "h900")
