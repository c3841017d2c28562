"""`make test-gpu`: everything that is tested on a GPU, in stages, the last of them in many processes.

    python -m tests.cuda.gpu [--jobs N] [--minutes M] [--only WORDS] [--logs FOLDER] [--all | --since REV]

What is timed runs alone. Then tests are chosen and their kernels compiled, and then the tests run; those of the bridge
compile what they need. Exit code 1 if anything failed or did not end.

All cases and random problems need some 4,400 kernels. By default tests are chosen whose kernels have most pairs of
values (`cover`), at most 700 kernels. All other tests build some 870 more. With --since every test runs whose kernels
are made of an edited module, and a sample of the others. With --all all tests run. DUALOPS_TEST_CHANGED lists edited
modules where there is no git.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tests.cuda.gpu.stages import BRIDGE, GPU, ROOT, TIMED, Stage, cores, picked, run, spread


def stages(jobs: int, only: str, choice: Mapping[str, str]) -> list[Stage]:
    """In the order in which they run; `choice` is the environment that says how tests are chosen."""
    some, others = picked(only), [f"--ignore={TIMED}", GPU]
    return [
        Stage("what is timed", [*some, TIMED], may_be_empty=bool(only)),
        Stage("compiling", ["--collect-only", "-qq", *some, *others], choice, may_be_empty=bool(only)),
        Stage("all other tests", [*spread(jobs), *some, *others, BRIDGE], choice),
    ]


def edited(revision: str) -> list[str]:
    """The modules of dualops that differ from a revision's."""
    command = ["git", "diff", "--name-only", revision, "--", "dualops"]
    files = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    paths = [Path(file).with_suffix("") for file in files if file.endswith(".py")]
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.gpu", description="all tests that need a GPU")
    parser.add_argument("--jobs", type=int, default=cores(), help="processes; default: one a core")
    parser.add_argument("--minutes", type=float, default=30, help="what is not done by then is stopped; default: 30")
    parser.add_argument("--only", default="", metavar="WORDS", help="as pytest's -k")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/test-gpu", help="folder; default: build/test-gpu")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--all", action="store_true", help="all tests, whatever they need to have compiled")
    how.add_argument("--since", metavar="REV", help="every test of kernels that changed since, and a sample")
    given = parser.parse_args()
    if find_spec("xdist") is None:
        parser.error("pytest-xdist is missing: pip install -e '.[test]'")
    given.logs.mkdir(parents=True, exist_ok=True)
    began, outcomes = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        choice = {} if given.all else {"DUALOPS_TEST_LEFT_OUT": f"{folder}/left_out"}
        if given.since:
            choice["DUALOPS_TEST_CHANGED"] = " ".join(edited(given.since))
        for number, stage in enumerate(stages(given.jobs, given.only, choice)):
            print(f"{stage.name} ...", flush=True)
            left = 60 * given.minutes - (time.perf_counter() - began)
            outcome = run(stage, given.logs / f"{number}.txt", left)
            outcomes.append(outcome)
            for line in outcome.lines:
                print(f"    {line}", flush=True)
    print(f"\n{'stage':24}{'s':>6}")
    print(*outcomes, sep="\n")
    print(f"{'all':24}{time.perf_counter() - began:6.0f}  logs in {given.logs}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
