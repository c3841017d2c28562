"""Run mutants of kernels that wait, in parallel processes: `python -m tests.wrong [name] [--jobs 2] [--share 6]`."""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # Numba reads it when it is first imported, here and in the other processes

from tests.wrong.mutants import Tally, judged
from tests.wrong.problems import LADDER, PROBLEMS

ALL = [*PROBLEMS, *LADDER]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wrong", description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="a part of the kernels' names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; as many as there are cores")
    parser.add_argument("--share", type=int, default=1, metavar="N", help="one in N of each problem's that must die")
    options = parser.parse_args()
    if options.share < 1:
        parser.error(f"--share is {options.share}, expected 1 or more")
    places = [place for place, problem in enumerate(ALL) if options.name in problem.kernel]
    wrong, total = [], Tally("", 0, 0, ())
    with ProcessPoolExecutor(options.jobs) as pool:
        for tally in pool.map(partial(judged_at, share=options.share), places):
            print(tally.line, flush=True)
            wrong += tally.wrong
            total = Tally("all", total.killed + tally.killed, total.harmless + tally.harmless, tuple(wrong))
    print(total.line, *wrong, sep="\n  ")
    return bool(wrong) or not places


def judged_at(place: int, share: int) -> Tally:
    """Run the mutants of one problem."""
    return judged(ALL[place], share=share)


if __name__ == "__main__":
    sys.exit(main())
