"""`make test-gpu-cold`: the bridge's tests on the GPU with no kernel on the disk, again and again.

    python -m tests.cuda.gpu.cold [--processes 1 6] [--rounds 3] [--together] [--minutes M] [--only WORDS]

Forward is built in one thread, and backward in another or by helpers, as in any training that is started for the first
time.
Every round has a disk cache of its own. With --together all rounds run at once, as far as cores go. Exit code 1 if
anything failed, died or did not end.
"""

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cuda.gpu.stages import BRIDGE, ROOT, Outcome, Stage, picked, run, spread


def stage_of(processes: int, number: int, cache: Path, only: str) -> Stage:
    name = f"{processes} process{'es' if processes > 1 else ''}, round {number}"
    arguments = [*spread(processes), *picked(f"cuda and ({only})" if only else "cuda"), BRIDGE]
    helpers = 1 if processes > 1 else 4
    return Stage(name, arguments, {"DUALOPS_CACHE_DIR": str(cache), "DUALOPS_HELPERS": str(helpers)})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.gpu.cold", description="the bridge from nothing")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 6], help="default: rounds of 1 and of 6")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--together", action="store_true", help="all rounds at once")
    parser.add_argument("--minutes", type=float, default=120, help="what is not done by then is stopped; default: 120")
    parser.add_argument("--only", default="", metavar="WORDS", help="as pytest's -k")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/test-gpu-cold", help="folder for what is printed")
    given = parser.parse_args()
    given.logs.mkdir(parents=True, exist_ok=True)
    deadline = time.perf_counter() + 60 * given.minutes
    rounds = [(processes, number + 1) for processes in given.processes for number in range(given.rounds)]

    def go(processes: int, number: int) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            stage = stage_of(processes, number, Path(folder), given.only)
            outcome = run(stage, given.logs / f"{processes}-{number}.txt", deadline - time.perf_counter())
            built = len(list(Path(folder).glob("*.cubin")))
        outcome = outcome._replace(last_word=f"{outcome.last_word}; {built} kernels built")
        for line in outcome.lines if not outcome.passed else ():
            print(f"    {line}")
        print(outcome, flush=True)
        return outcome

    with ThreadPoolExecutor(len(rounds) if given.together else 1) as pool:
        outcomes = list(pool.map(go, *zip(*rounds, strict=True)))
    print(f"{sum(outcome.passed for outcome in outcomes)} of {len(outcomes)} rounds passed, logs in {given.logs}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
