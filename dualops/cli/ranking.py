"""Rank the Configs of an operator by their estimated time on a GPU, and name what bounds each. Nothing is measured, and
no GPU is needed.

    python -m dualops estimate flash_attention
    python -m dualops estimate flash_attention --arch rtx4090 --problem "B=2 H=16 S=8192 D=128 causal=True"
    python -m dualops estimate matmul --problem "M=4096 N=4096 K=4096 transpose_b=True" --build 3
    python -m dualops estimate retention --arch h100 --problem "B=2 H=16 S=8192 D=128"
    python -m dualops estimate layer_norm --problem "M=32768 N=4096"

A problem has sizes (NAME=NUMBER), parameters (NAME=VALUE), and dtype= (default bfloat16); or arrays, in the form that
`warm` takes. --build compiles the best few for the GPU's architecture and shows registers and spills; a Config that
spills moves to the end. dualops/estimate/README.md says how to read the table, and how far off estimates are.

Exit code 2: the request can't be read, has no estimates, or can't be compiled here.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rich.table import Table
from rich.text import Text

from .check import require_compiler
from .console import Console, lines
from .errors import CommandError
from .place import SWITCH
from .progress import progress
from .report import bandwidth, tflops

HELP = "rank an operator's Configs by their estimated time on a GPU"

DEFAULT = "h200"
OTHER_COLUMNS, NARROWEST = 54, 20  # characters: all columns but the Configs', and the least width of that one
DEEPER = " " * 4
CAPTION = """\
* marks the Config that calls take today. KiB: a block's shared memory. Speed is
in bytes if memory is busier than any unit, else in operations. Shares are of
the time: units work in parallel, and the first one named is the bound. Nothing
was measured; dualops/estimate/README.md says how far off that may be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "flash_attention, matmul, retention, softmax, rms_norm, layer_norm, rope or lion"
    parser.add_argument("operator", metavar="OPERATOR", help=names)
    parser.add_argument(
        "--problem", default="", metavar="TEXT", help="sizes, parameters and dtype; default: a typical one"
    )
    parser.add_argument("--arch", default=DEFAULT, metavar="GPU", help=f"such as rtx4090 or sm_80; default: {DEFAULT}")
    parser.add_argument("--forward", action="store_true", help="not the gradient")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="rows of a table; default: 10")
    parser.add_argument("--build", type=int, default=0, metavar="N", help="compile this many, the best; default: none")


def run(arguments: argparse.Namespace) -> int:
    for name, least in (("top", 1), ("build", 0)):
        if (given := getattr(arguments, name)) < least:
            raise CommandError(f"--{name} is {given}, expected at least {least}")
    if arguments.build:
        require_compiler()
    elif find_spec("numba_cuda") is None:
        os.environ[SWITCH] = "1"  # without a compiler Numba has only its simulator, and no compiler is needed here
    import_module("dualops.cuda")  # registers the operators
    cost = import_module("dualops.estimate")
    try:
        gpu = cost.architecture(arguments.arch)
        text = f"{arguments.operator} {arguments.problem}"
        rankings = cost.rankings(text, gpu, backward=False)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise CommandError(str(error)) from None
    if not arguments.forward:
        try:
            rankings = cost.rankings(text, gpu)
        except NotImplementedError as error:
            raise CommandError(f"{error}. --forward leaves the gradient out") from None
    if arguments.build:
        with progress(sum(min(arguments.build, len(ranking.rows)) for ranking in rankings)) as begin:
            rankings = [cost.build(ranking, gpu, arguments.build, begin) for ranking in rankings]
    console = Console(highlight=False)
    for line in textwrap.wrap(cost.problem_of(text)[1].name, console.width, subsequent_indent=DEEPER):
        console.print(Text(line))
    console.print(Text(f"on {gpu.device.name}"))
    for ranking in rankings:
        console.print(Text(f"\n{ranking.title}"))
        console.print(table(ranking, arguments.top, max(console.width - OTHER_COLUMNS, NARROWEST)))
    lines().print(CAPTION)
    return 0


def table(ranking: Any, top: int, width: int) -> Table:
    """Return the first rows of a ranking, and the Config that a call takes today; wrap Configs at `width`."""
    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("", "time", "speed", "KiB"):
        shown.add_column(name, justify="right", overflow="fold")
    for name in ("rung, Config of a kernel", "what bounds it"):
        shown.add_column(name, overflow="fold")  # keep the ends of cells in a narrow window
    for place, row in enumerate(ranking.rows, 1):
        if place <= top or row.taken or row.built:
            shown.add_row(*map(Text, cells(place, row, ranking, width)))
    return shown


def cells(place: int, row: Any, ranking: Any, width: int) -> tuple[str, ...]:
    """Return the cells of one candidate; the compiler's report is below its Config."""
    candidate, said, estimate = row.candidate, row.built, row.candidate.estimate
    seconds, busiest = estimate.seconds, max(estimate.busy, key=lambda unit: estimate.busy[unit])
    below = [*map(str, candidate.parts)]
    if said:
        refused = "" if said.allowed else ", NOT ALLOWED"
        below.append(f"{said.registers} registers, {said.spill_bytes} bytes spilled{refused}")
    kernels = [candidate.rung]
    for each in below:
        kernels += textwrap.wrap(each, width, initial_indent="  ", subsequent_indent=DEEPER, break_on_hyphens=False)
    return (
        f"{'*' if row.taken else ''}{place}",
        f"{1e3 * seconds:.3f} ms",
        bandwidth(ranking.nbytes / seconds) if busiest == "memory" else tflops(ranking.flops / seconds),
        f"{candidate.shared_bytes / 1024:.0f}",
        "\n".join(kernels),
        estimate.reason.replace(", ", "\n"),
    )
