"""Bugs planted in twelve kernels, which the tests that `make test-gpu` chooses must catch.

    python -m tests.cuda.gpu.planted [--jobs N] [--minutes M] [--logs FOLDER]

Tests are chosen in the unchanged tree, and their kernels compiled, as `make test-gpu` does. Then each bug gets a copy
of the tree and of the kernels on the disk. There, the chosen cases of its operator and rung run until one fails. A bug
is caught if a case rejects a result. Exit code 1 if a bug survives. Needs no git.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from dualops.cuda.compiler import cache
from tests.cuda.gpu.__main__ import stages
from tests.cuda.gpu.stages import GPU, ROOT, Outcome, Stage, picked, run, spread

CASES = f"{GPU}/test_cases.py"
COPIED = ("dualops", "tests", "pyproject.toml")
PROCESSES = 3  # for each bug
WIDE = "400"  # columns of pytest's summary: a test's name and why it failed


class Bug(NamedTuple):
    """An edit of a kernel that makes it wrong. It neither hangs nor writes outside of arrays."""

    name: str
    cases: str  # of the operator and rung, as pytest's -k
    file: str  # in dualops/cuda
    old: str  # occurs once in the file
    new: str


BUGS = (
    Bug(
        "forward shows one key before a window's left edge",
        "flash_attention-sm90",
        "flash_attention/fragment_scores.py",
        "~_before(i32(first - mine))",
        "~_before(i32(first - mine - 1))",
    ),
    Bug(
        "dq reads lse and delta of the key head, not of the query head",
        "flash_attention_backward-sm90",
        "flash_attention/score_gradients.py",
        "start(x, task.b, task.h, task.q_first + i)",
        "start(x, task.b, task.h_kv, task.q_first + i)",
    ),
    Bug(
        "dk of the gradient in one kernel lacks softcap's slope",
        "flash_attention_backward-sm90-one_kernel_softcap",
        "flash_attention/score_gradients.py",
        "scores[2 * n], scores[2 * n + 1] = bent\n        if chain.weighs:",
        "scores[2 * n], scores[2 * n + 1] = probs\n        if chain.weighs:",
    ),
    Bug(
        "the merge of splits leaves the sink out of the sum",
        "(flash_attention-sm90 or flash_attention_varlen-sm90) and (q3 or few_queries)",
        "flash_attention/sm90/split_kv.py",
        "total = total_of(most)",
        "total = num.zero",
    ),
    Bug(
        "softmax fills a row's last vector with 0, not with -inf",
        "softmax-sm90",
        "softmax/operator.py",
        "FILL, ADDS = num.minus_inf, False",
        "FILL, ADDS = num.zero, False",
    ),
    Bug(
        "layer_norm counts columns for warps after a row's end",
        "layer_norm-sm90",
        "norm/operator.py",
        "max(min(rest - warp * WARP_COLUMNS, WARP_COLUMNS), 0)",
        "min(rest, WARP_COLUMNS)",
    ),
    Bug(
        "the gradient of norms scales dsummed by rstd",
        "rms_norm_backward-sm90 or layer_norm_backward-sm90",
        "norm/ring_backward.py",
        "x_frag[c] += other[c]\n",
        "x_frag[c] += other[c] * row_rstd\n",
    ),
    Bug(
        "rope takes all cosines from the first sequence's table",
        "rope-simt or rope_backward-simt",
        "rope/simt.py",
        "start(tables.cos, b, row)",
        "start(tables.cos, 0, row)",
    ),
    Bug(
        "lion forgets where a chunk begins in its last elements",
        "lion",
        "lion/dense.py",
        "k - mine + begin + whole",
        "k - mine + before + whole",
    ),
    Bug(
        "matmul adds the bias of a tile's first columns to all of its parts",
        "matmul-sm90",
        "matmul/sm90/output.py",
        "my_warpgroup() * columns + part * boxes.columns + 2 *",
        "my_warpgroup() * columns + 2 *",
    ),
    Bug(
        "retention decays a whole chunk where a sequence's last one is shorter",
        "retention-sm90 or retention_backward-sm90",
        "retention/sm90/chunks.py",
        "count = min(i32(call.rows - m0), i32(CHUNK))",
        "count = i32(CHUNK)",
    ),
    Bug(
        "log_decay's gradient adds a token's own share to its sum",
        "retention_backward-sm90",
        "retention/sm90/decay_grad.py",
        "before + (through - mine)",
        "before + through",
    ),
)


def plant(bug: Bug, root: Path) -> None:
    """Edit a tree. Raises ValueError unless the text to replace occurs once."""
    file = root / "dualops/cuda" / bug.file
    text = file.read_text()
    if (found := text.count(bug.old)) != 1:
        raise ValueError(f"{bug.file} has {bug.old!r} {found} times, expected once")
    file.write_text(text.replace(bug.old, bug.new))


def tried(folder: Path, left_out: Path, logs: Path, deadline: float, number: int, bug: Bug) -> Outcome:
    """Run the chosen cases of a bug in a copy of the tree."""
    root = folder / str(number)
    for name in COPIED:
        copy = partial(shutil.copytree, ignore=shutil.ignore_patterns("__pycache__"))
        (copy if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, root / name)
    plant(bug, root)
    if cache.folder().exists():
        shutil.copytree(cache.folder(), root / "cache")
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": paths, "DUALOPS_CACHE_DIR": str(root / "cache")}
    environment |= {"DUALOPS_TEST_LEFT_OUT": str(left_out), "COLUMNS": WIDE}
    stage = Stage(bug.name, ["-x", *spread(PROCESSES), *picked(bug.cases), CASES], environment)
    return run(stage, logs / f"{number}.txt", deadline - time.perf_counter(), root)


def by_which(outcome: Outcome) -> str:
    """Return the test that rejected a result; "" if none did."""
    failed = (line.removeprefix("FAILED ") for line in outcome.lines if line.startswith("FAILED "))
    return next((line.partition(" - ")[0] for line in failed if "Rejected" in line.partition(" - ")[2]), "")


def main(arguments: Sequence[str] | None = None, bugs: Sequence[Bug] = BUGS) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.gpu.planted", description="bugs that tests must catch")
    parser.add_argument("--jobs", type=int, default=len(bugs), help="bugs at once; default: all")
    parser.add_argument("--minutes", type=float, default=9, help="what is not done by then is stopped; default: 9")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/test-gpu-planted", help="folder for what is printed")
    given = parser.parse_args(arguments)
    given.logs.mkdir(parents=True, exist_ok=True)
    deadline = time.perf_counter() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        left_out = folder / "left_out"
        _, compiling, _ = stages(1, "", {"DUALOPS_TEST_LEFT_OUT": str(left_out)})
        choice = run(compiling, given.logs / "choice.txt", deadline - time.perf_counter(), ROOT)
        print(*choice.lines, choice, sep="\n", flush=True)
        if not choice.passed:
            return 1
        with ThreadPoolExecutor(given.jobs) as pool:
            outcomes = [*pool.map(partial(tried, folder, left_out, given.logs, deadline), range(len(bugs)), bugs)]
    for bug, outcome in zip(bugs, outcomes, strict=True):
        test = by_which(outcome)
        print(
            f"{bug.name:72}{outcome.seconds:6.0f}  {f'caught by {test}' if test else f'SURVIVES: {outcome.last_word}'}"
        )
    caught = sum(bool(by_which(outcome)) for outcome in outcomes)
    print(f"{caught} of {len(bugs)} bugs caught, logs in {given.logs}")
    return 0 if caught == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
