"""The cost model: its data and parts against other sources, and its order against what was measured."""

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
from dualops.cuda.launch.device import ARCHITECTURES as COMPILED, every
from dualops.cuda.launch.operation import OPERATIONS
from dualops.cuda.norm.staging import RingConfig
from dualops.cuda.retention.sm90.config import Sm90Config
from dualops.estimate import ARCHITECTURES, architecture, build, candidates as candidates_module, estimate, rankings
from dualops.estimate.attention_work import pieces_of_keys, pieces_of_queries
from dualops.estimate.model import LAUNCH, REACHED, Product, makespan
from dualops.estimate.problems import problem_of
from dualops.estimate.retention import passes_of, walk_work
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
        assert gpu.tensor * gpu.device.sms * clock / 1e12 == pytest.approx(tflops, rel=0.01)
    for arch in COMPILED:
        found = {gpu.device for gpu in ARCHITECTURES.values() if gpu.device.arch == arch}
        assert found in ({*every(arch)}, set())


def test_every_architecture_that_has_a_gpu_here_is_found_by_its_own_name():
    assert {gpu.device.arch for gpu in ARCHITECTURES.values()} == {*COMPILED} - {"sm_86"}
    assert architecture("sm_90a") is architecture("sm_90") is architecture("H200") is H200
    assert architecture("sm_100").name == "b200"
    with pytest.raises(ValueError, match=r"arch is 'sm_86', expected one of a100, .*, h200, .*, sm_80, .*, sm_90a, "):
        architecture("sm_86")


@pytest.mark.parametrize(("columns", "left", "bytes_a_clock"), [(64, True, 128), (128, True, 96), (256, True, 80)])
def test_shared_memory_of_warpgroups(columns: int, left: bool, bytes_a_clock: int):
    """64 rows and 16 steps take columns / 2 clocks; from registers it is 64 bytes, whatever the columns."""
    assert Product(64, columns, 16, left).shared_bytes() / (columns / 2) == bytes_a_clock
    assert Product(64, columns, 16, False).shared_bytes() / (columns / 2) == 64


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
    assert max(found.shares, key=found.shares.__getitem__) == "waves"  # 32 tiles of queries for 132 SMs
    busiest = max(found.busy[unit] for unit in ("tensor cores", "exponentials", "arithmetic", "shared memory"))
    assert busiest + sum(found.lost.values()) == pytest.approx(found.seconds)


# --- against what was measured --------------------------------------------------------------------


def test_the_order_is_that_of_measurements():
    """Of TFLOP/s, in which a problem's size does not show, on each GPU. The page has its table and picture of these
    pairs. Of rows, which have no order, the medians.
    """
    found = draw.pairs()
    split = draw.groups(found)
    assert {group for group, _ in split} == {*draw.RANKED, *draw.ROWS} and len(found) >= 180
    for (group, _), mine in split.items():
        assert np.median([pair.ratio for pair in mine]) == pytest.approx(1, abs=0.1)
        if group in draw.RANKED:
            assert draw.rank_correlation(mine) >= 0.8
            others = [pair for pair in mine if not pair.fitted]
            assert draw.rank_correlation(others) >= 0.8
    assert fill(draw.PAGE.read_text("utf-8"), draw.table(found), *draw.MARKERS).count("\n|") > len(found)


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
    hold_pictures([*map(str, draw.draw(tmp_path, draw.PICTURES))], draw.PICTURES, draw.PAGE)


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
            for step in row.candidate.steps():  # as many blocks as its registers are for
                room = ARCHITECTURES[name].device.shared_memory_per_block
                assert step.kernel.min_blocks * step.shared_bytes <= room


ROWS = [
    ("softmax M=32768 N=4096", 2),
    ("softmax M=100 N=1001 dtype=float64", 1),
    ("softmax x=64x8192:float16 axis=0", 1),
    ("rms_norm x=64x1000:float16 w=1000:float32 residual=64x1000:float16", 2),
    ("layer_norm M=64 N=262144", 2),
    ("rope", 2),
    ("lion", 1),
]


@pytest.mark.parametrize(("problem", "directions"), ROWS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_take_the_time_of_their_bytes(problem: str, directions: int, name: str):
    """And of their launches; the Config of a call is not behind another one with as many."""
    gpu, found = ARCHITECTURES[name], rankings(problem, ARCHITECTURES[name])
    assert len(found) >= directions
    for ranking in found:
        for row in ranking.rows:
            launches = len(row.candidate.steps())
            seconds = ranking.nbytes / (REACHED * gpu.device.memory_bandwidth) + launches * LAUNCH
            assert row.candidate.estimate.seconds == pytest.approx(seconds)
            assert row.candidate.estimate.shares.keys() == {"memory", "launches"}
        assert sum(row.taken for row in ranking.rows) == 1
        (taken,) = [row for row in ranking.rows if row.taken]
        same = [row for row in ranking.rows if row.candidate.estimate == taken.candidate.estimate]
        assert same[0].taken


SEGMENTS = [
    ("B=1 H=8 S=131072 D=128", (16, 16)),  # of forward, and of its gradient
    ("B=2 H=16 S=8192 D=128", (4, 1)),
    ("B=8 H=16 S=2048 D=128", (1, 1)),
    ("B=32 H=32 S=4096 D=128", (1, 1)),
]


@pytest.mark.parametrize(("problem", "segments"), SEGMENTS)
def test_few_sequences_of_retention_are_walked_in_segments(problem: str, segments: tuple[int, int]):
    found = rankings(f"retention {problem}", H200)
    assert [ranking.title for ranking in found] == ["forward", "backward"]
    for ranking, wanted in zip(found, segments, strict=True):
        first = ranking.rows[0]
        assert first.taken and first.candidate.rung == "sm90" and first.candidate.configs[0].segments == wanted


def test_segments_of_retention_are_all_of_its_chunks():
    p = absent_problem(*problem_of("retention B=2 H=3 S=3000 D=128"))
    ((D, Dv),) = passes_of(p, backward=False)
    for segments, chunks in ((1, 24), (2, 24), (4, 24), (5, 25), (11, 33)):
        pieces = walk_work(Sm90Config(segments=segments), D, Dv, 1, p, H200).pieces
        assert sum(steps * count for steps, count in pieces.items()) == 6 * chunks


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
    ("retention B=2 H=8 S=512 D=64 dtype=float32", "where a call takes the rung simt"),
    ("retention q=2x8x0x64:bfloat16 k=2x8x0x64 v=2x8x0x64", "no estimates of an empty problem"),
    (
        "retention q=2x8x512x64:bfloat16 k=2x8x512x64 v=2x8x512x64 log_decay=2x8x512",
        "no estimates of the gradient with log_decay",
    ),
    ("layer_norm x=0x64:float32 w=64:float32", "no estimates of an empty problem"),
    ("matmul a=0x8:bfloat16 b=8x8", "no estimates of an empty problem"),
    ("matmul M=64 N=64 K=64 dtype=float32 precision=tf32", "no estimates for float32"),
    (
        "matmul M=4097 N=4097 K=4097",
        "no estimates where a factor is copied first: rows that are not a multiple of 16 bytes",
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
