"""Every EDGE case of every operator, once on each rung, to be run under NVIDIA's sanitizers:

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python tests/cuda/gpu/sanitize.py
    compute-sanitizer --tool racecheck ...        (synccheck and initcheck too)

The results are checked as well. Arguments pick the cases whose name holds one of them: `sanitize.py backward sm90`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # it is run as a script

from dualops.spec import Tag
from tests.checks import check
from tests.cuda.gpu.library import TORCH
from tests.cuda.operators import cases_on_rungs


def main(wanted: list[str]) -> None:
    count = 0
    for param in cases_on_rungs(Tag.EDGE):
        if not wanted or any(word in str(param.id) for word in wanted):
            direction, rung, case = param.values
            check(direction.spec, case, direction.function(rung), backward=direction.backward, library=TORCH)
            count += 1
    if not count:
        sys.exit(f"no case is named like {', '.join(wanted)}")
    print(f"{count} cases")


if __name__ == "__main__":
    main(sys.argv[1:])
