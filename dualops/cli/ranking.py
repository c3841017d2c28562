"""What the Configs of an operator would take on a GPU, best first, and what holds each up. Nothing is measured, and no
GPU is needed.

    python -m dualops estimate flash_attention
    python -m dualops estimate flash_attention --arch rtx4090 --problem "B=2 H=16 S=8192 D=128 causal=True"
    python -m dualops estimate matmul --problem "M=4096 N=4096 K=4096 transpose_b=True" --build 3
    python -m dualops estimate retention --arch h100 --problem "B=2 H=16 S=8192 D=128"
    python -m dualops estimate layer_norm --problem "M=32768 N=4096"

A problem has sizes, NAME=NUMBER, parameters, NAME=VALUE, and dtype=, bfloat16 where it is not said; or arrays, as
`warm` takes them. --build compiles so many, the best, for the GPU's architecture: registers and spills, and what spills
goes to the end. dualops/cuda/cost/README.md says how to read the table, and how far off estimates are.

Exit code 2: what was asked for can't be read, has no estimates, or can't be compiled here.
"""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .check import require_compiler
from .console import lines
from .errors import CommandError
from .place import SWITCH
from .progress import progress

HELP = "rank an operator's Configs by what they would take on a GPU"

DEFAULT = "h200"
WIDEST = 400  # columns
CAPTION = """\
* is what a call takes today. KiB: a block's shared memory. Shares are of the time: units work side by side, and what
is named first bounds it. Nothing was measured; dualops/cuda/cost/README.md says how far off that may be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "flash_attention, matmul, retention, softmax, rms_norm or layer_norm"
    parser.add_argument("operator", metavar="OPERATOR", help=names)
    parser.add_argument(
        "--problem", default="", metavar="TEXT", help="sizes, parameters and dtype; default: a usual one"
    )
    parser.add_argument("--arch", default=DEFAULT, metavar="GPU", help=f"such as rtx4090 or sm_80; default: {DEFAULT}")
    parser.add_argument("--forward", action="store_true", help="not the gradient")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="rows of a table; default: 10")
    parser.add_argument("--build", type=int, default=0, metavar="N", help="compile so many, the best; default: none")


def run(arguments: argparse.Namespace) -> int:
    for name, least in (("top", 1), ("build", 0)):
        if (given := getattr(arguments, name)) < least:
            raise CommandError(f"--{name} is {given}, expected at least {least}")
    if arguments.build:
        require_compiler()
    elif find_spec("numba_cuda") is None:
        os.environ[SWITCH] = "1"  # without a compiler Numba has nothing but its simulator, and none is needed
    import_module("dualops.cuda")  # registers the operators
    cost = import_module("dualops.cuda.cost")
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
    console = Console()
    for ranking in rankings:
        shown = table(f"{arguments.operator}, {ranking.title}, {gpu.title}", ranking, arguments.top)
        natural = console.measure(shown, options=console.options.update(width=WIDEST)).maximum
        console.width = max(console.width, natural)  # a narrow window breaks lines, but no cell loses its end
        console.print(shown)
    lines().print(CAPTION)
    return 0


def table(title: str, ranking: Any, top: int) -> Table:
    """The first rows of a ranking, and what a call takes today, wherever it stands."""
    built = any(row.built for row in ranking.rows)
    shown = Table(title=title, title_justify="left", box=HORIZONTALS)
    for name in ("", "time", "TFLOP/s", "KiB", *(("regs", "spills") if built else ())):
        shown.add_column(name, justify="right")
    for name in ("rung, Config of each kernel", "what bounds it"):
        shown.add_column(name)
    for place, row in enumerate(ranking.rows, 1):
        if place <= top or row.taken or row.built:
            shown.add_row(*map(Text, cells(place, row, ranking.flops, built)))
    return shown


def cells(place: int, row: Any, flops: int, built: bool) -> tuple[str, ...]:
    """Of one candidate. built: whether any was compiled."""
    candidate, said = row.candidate, row.built
    seconds = candidate.estimate.seconds
    spills = f"{said.spill_bytes}{'' if said.allowed else ' NOT ALLOWED'}" if said else ""
    return (
        f"{'*' if row.taken else ''}{place}",
        f"{1e3 * seconds:.3f} ms",
        f"{flops / seconds / 1e12:.0f}",
        f"{candidate.shared_bytes / 1024:.0f}",
        *((str(said.registers) if said else "", spills) if built else ()),
        "\n".join([candidate.rung, *(f"  {part}" for part in candidate.parts)]),
        candidate.estimate.reason.replace(", ", "\n"),
    )
