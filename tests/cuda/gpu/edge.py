"""EDGE cases of every operator on each rung, one after another: what `tests.cuda.gpu.sanitize` runs under each tool.

    python -m tests.cuda.gpu.edge backward sm90             # those whose name holds all of these words
    python -m tests.cuda.gpu.edge --from FILE --until T     # those named in a file, until time.time() is T
    python -m tests.cuda.gpu.edge matmul --given            # into memory that has been written before; workspaces, too,
                                                            # where bulk copies write to them
    python -m tests.cuda.gpu.edge --mistake racecheck       # a kernel that this tool must complain of
    python -m tests.cuda.gpu.edge matmul --warm             # only compile their kernels, on all cores

The results are checked as well. A line before each case and one after it say how far this came. Exit code 1 where a
result is wrong, or a case could not be run: then nothing after it is, since a GPU's error stays with the process.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from dualops.cuda.compiler.backend import Kernel, cuda, verb
from dualops.spec import Tag
from tests.checks import WAYS, Rejected, check
from tests.cuda.calls import Call, calls_of_case
from tests.cuda.operators import cases_on_rungs

BEGINS, DONE, WRONG, BROKE = "begins", "done", "wrong", "broke"  # what a line starts with
BULK_SUMS = ("flash_attention_backward", "sm90")  # whose workspaces are written by bulk copies


def names() -> list[str]:
    """Of all cases, each once."""
    return list(cases())


def cases() -> dict[str, Any]:
    """(direction, rung, case) by name."""
    return {str(param.id): param.values for param in cases_on_rungs(Tag.EDGE)}


def run(wanted: list[str], until: float, ways: Sequence[str] = WAYS) -> int:
    """Check these cases, at least one of them, in these ways, and print how far that came. Returns the exit code."""
    import torch

    from tests.cuda.gpu.library import TORCH

    known, code = cases(), 0
    for place, name in enumerate(wanted):
        if place and time.time() > until:
            break
        direction, rung, case = known[name]
        print(BEGINS, name, flush=True)
        # what a tool does not see written holds NaN then, as all that torch allocates
        filled = ways != WAYS and all(word in name for word in BULK_SUMS)
        torch.use_deterministic_algorithms(filled, warn_only=True)
        try:
            check(direction.spec, case, direction.function(rung), backward=direction.backward, library=TORCH, ways=ways)
        except Rejected as error:
            code = 1
            print(WRONG, name, one_line(error), flush=True)
        except Exception as error:
            print(BROKE, name, one_line(error), flush=True)
            return 1
        print(DONE, name, flush=True)
    return code


def calls_of(wanted: list[str]) -> dict[str, tuple[Call, ...]]:
    known = cases()
    return {name: tuple(calls_of_case(*known[name])) for name in wanted}


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:1000]


# --- mistakes that the tools must see --------------------------------------------------------------


def mistakes() -> dict[str, tuple[Callable[[str], Kernel], bool]]:
    """By tool: a kernel that it must complain of, and whether what this reads has been written."""
    from tests.wrong.broken import BROKEN, control
    from tests.wrong.kernels import build, build_through_shared, right

    @verb
    def half_a_warp_waits(warp):
        if cuda.threadIdx.x % 32 < 16:
            cuda.syncthreads()

    return {
        "memcheck": (BROKEN["one_element_too_many"].build, True),
        "racecheck": (lambda dtype: build_through_shared(dtype, False), True),
        "synccheck": (lambda dtype: build(dtype, right(dtype).but(meet=half_a_warp_waits)), True),
        "initcheck": (control, False),
    }


def make_mistake(tool: str) -> None:
    """Launch the kernel that `tool` must complain of."""
    import torch

    from tests.cuda.gpu.test_wrong import launch

    build, written = mistakes()[tool]
    rows, columns = 3, 67
    y = torch.zeros(rows, columns, device="cuda")
    x = torch.zeros_like(y) if written else torch.empty_like(y)
    launch(build("float32"), rows, {"y": y, "x": x}, columns, [columns, columns])
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description="EDGE cases, one after another")
    parser.add_argument("words", nargs="*", help="in the name of each case that is run")
    parser.add_argument("--from", type=Path, dest="file", help="a file with the names of cases, one a line")
    parser.add_argument("--until", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--mistake", choices=("memcheck", "racecheck", "synccheck", "initcheck"))
    parser.add_argument("--given", action="store_true", help="results only where the caller says, not in new memory")
    parser.add_argument("--warm", action="store_true", help="only compile the cases' kernels")
    given = parser.parse_intermixed_args()
    if given.mistake:
        make_mistake(given.mistake)
        return 0
    wanted = list(picked(names(), given.words)) if given.file is None else given.file.read_text().split()
    if not wanted:
        parser.error(f"no case is named like {' '.join(given.words)}")
    if given.warm:
        from tests.cuda.gpu.warm import warm

        print(f"warm: {warm(chain(*calls_of(wanted).values()))}", flush=True)
        return 0
    code = run(wanted, given.until, WAYS[:1] if given.given else WAYS)
    print(f"{len(wanted)} cases")
    return code


def picked(every: list[str], words: list[str]) -> Iterator[str]:
    return (name for name in every if all(word in name for word in words))


if __name__ == "__main__":
    sys.exit(main())
