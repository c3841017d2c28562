"""Compile kernels ahead of time and keep them on the disk, so that no call waits for a compiler. Launches nothing.

    python -m dualops warm                      every operator at the sizes of the benchmarks
    python -m dualops warm softmax rms_norm     some of them
    python -m dualops warm --problem "softmax:rows32768x*"      cases with matching names, peer comparisons too
    python -m dualops warm flash_attention --problem "q=2x32x4096x128:bfloat16 k=2x8x4096x128 v=2x8x4096x128"

A problem has a word for each array, name=SHAPE:DTYPE, and for each parameter, name=VALUE (causal=True), without spaces
inside. The default dtype of the first array is float32; the others follow the first. SHAPE@0213 gives the order of axes
in memory, the slowest first. Without a named operator, a problem begins with its operator.

Exit code 2: the request can't be read, is no problem of the operator's, or can't be compiled or kept here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from importlib import import_module

from ..machine import missing
from ..spec import OPERATORS
from .check import architectures_of, cache_folder, not_kept, operators_of, require_compiler
from .errors import CommandError
from .progress import progress

HELP = "compile kernels ahead of time, on all cores"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(OPERATORS)}; default: all")
    parser.add_argument(
        "--problem",
        action="append",
        default=[],
        metavar="TEXT",
        help="a problem instead of the benchmark's; repeatable",
    )
    parser.add_argument("--forward", action="store_true", help="no kernels for gradients")
    parser.add_argument(
        "--arch", nargs="+", default=[], metavar="ARCH", help='such as sm_90a, or "all"; default: the GPU'
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes that compile in parallel; default: one per core"
    )


def run(arguments: argparse.Namespace) -> int:
    problems = _problems(arguments.operators, arguments.problem)
    if arguments.jobs is not None and arguments.jobs < 1:
        raise CommandError(f"--jobs is {arguments.jobs}, expected at least 1")
    require_compiler()
    folder = cache_folder()
    import_module("dualops.cuda")  # registers the operators
    offline, devices = import_module("dualops.cuda.compiler.offline"), import_module("dualops.cuda.launch.device")
    if not arguments.arch and (lacking := missing()):
        raise CommandError(f"{' '.join(lacking)} Or name what to compile for: --arch sm_90a needs no GPU.")
    places = [each for arch in architectures_of(arguments.arch) for each in devices.every(arch)] or [devices.current()]
    try:
        wanted = offline.to_warm(problems, places, backward=not arguments.forward)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise CommandError(str(error)) from None
    began = time.perf_counter()
    kernels = import_module("dualops.cuda.compiler.cache").kernels
    before = kernels().keys()
    try:
        with progress(len(wanted)) as advance:
            for report in offline.build_all(wanted, arguments.jobs, must_keep=True):
                advance(f"{report.arch}  {report.name}")
        built = len(kernels().keys() - before)
    except OSError as error:
        raise not_kept(error) from None
    print(f"{len(wanted)} kernels in {folder}, {built} of them compiled now, in {time.perf_counter() - began:.1f} s")
    return 0


def _problems(operators: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Return operators, or problems that begin with their operator's name."""
    known = operators_of(operators)
    if texts and len(operators) > 1:
        raise CommandError(
            f"--problem is of one operator, expected no more than one before it, not {' '.join(operators)}"
        )
    return [" ".join([*operators, text]) for text in texts] or known
