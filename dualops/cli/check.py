"""Build every kernel of the COMPILE list offline, for architectures that need not be present. Needs no GPU.

    python -m dualops check                                     every operator, for the architecture dualops is tuned on
    python -m dualops check softmax rms_norm --arch sm_80 sm_90a
    python -m dualops check --since main                        the kernels whose machine code differs from main's

Exit code 1: a kernel spills, exceeds its Config's registers or the architecture's shared memory, or ptxas warns of
something slow; with --since, the machine code of a kernel differs. Exit code 2: this installation can't compile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..machine import NEWEST, install_command
from ..spec import OPERATORS
from . import since
from .errors import CommandError
from .place import SWITCH
from .progress import progress

HELP = "compile every kernel offline and report registers, spills and shared memory"

DEFAULT = ("sm_90a",)  # the architecture that dualops is tuned on; all six take six times as long
COLUMNS = ("registers", "stack_bytes", "spill_bytes", "static_shared", "dynamic_shared", "cubin_bytes")
TITLES = ("regs", "stack", "spills", "static", "dynamic", "cubin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(OPERATORS)}; default: all")
    parser.add_argument(
        "--arch", nargs="+", default=DEFAULT, metavar="ARCH", help=f'such as sm_80, or "all"; default: {DEFAULT[0]}'
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes that compile in parallel; default: 1"
    )
    parser.add_argument(
        "--since", metavar="REV", help="list the kernels whose machine code differs from this revision's"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per kernel and line")


def run(arguments: argparse.Namespace) -> int:
    operators = operators_of(arguments.operators)
    require_compiler()
    architectures = architectures_of(arguments.arch)
    if arguments.since:
        return since.run(arguments.since, operators, architectures, arguments.jobs)
    import_module("dualops.cuda")  # registers the operators
    offline = import_module("dualops.cuda.compiler.offline")
    wanted = offline.to_check(operators, architectures)
    if not wanted:
        raise CommandError(f"no COMPILE case in {', '.join(operators)}: nothing was built")
    if not arguments.json:
        print(f"{'arch':8}" + "".join(f"{title:>9}" for title in TITLES) + f"{'s':>7}  kernel")
    refused = 0
    with progress(len(wanted)) as advance:
        for report in offline.build_all(wanted, arguments.jobs, rebuild=True):
            advance(f"{report.arch}  {report.name.partition('(')[0]}")
            refused += not report.allowed
            with advance.aside():
                print(json.dumps(asdict(report)) if arguments.json else _line(report), flush=True)
    summary = f"{len(wanted)} kernels built, {refused} not allowed"
    print(summary, file=sys.stderr if arguments.json else sys.stdout)
    return 1 if refused else 0


def operators_of(wanted: Sequence[str]) -> list[str]:
    """Return the named operators, or all. Raises CommandError for an unknown name."""
    for name in wanted:
        if name not in OPERATORS:
            raise CommandError(f"no operator {name}, expected some of {', '.join(OPERATORS)}")
    return list(dict.fromkeys(wanted)) or list(OPERATORS)


def require_compiler() -> None:
    """Select Numba's compiler, not its simulator. Raises CommandError if it can't compile."""
    if find_spec("numba_cuda") is None:
        raise CommandError(f"no compiler, which needs no GPU: {install_command(NEWEST)}")
    os.environ[SWITCH] = "0"
    if import_module("dualops.cuda.compiler.backend").SIMULATED:
        raise CommandError(f"Numba was imported before with {SWITCH}=1: start a new process")


def cache_folder() -> Path:
    """Return the folder of kernels and measured times. Raises CommandError if it can't be used."""
    try:
        return import_module("dualops.cuda.compiler.cache").prepare()
    except OSError as error:
        raise not_kept(error) from None


def not_kept(error: OSError) -> CommandError:
    """Build the message for a file that can't be written to the cache."""
    return CommandError(f"{error.filename}: {error.strerror}; DUALOPS_CACHE_DIR names another place")


def architectures_of(wanted: Sequence[str]) -> list[str]:
    """Return the named architectures, or all. Raises CommandError for an unknown name."""
    known = import_module("dualops.cuda.launch.device").ARCHITECTURES
    if "all" in wanted:
        return list(known)
    for arch in wanted:
        if arch not in known:
            raise CommandError(f"no architecture {arch}, expected all or some of {', '.join(known)}")
    return list(wanted)


def _line(report: Any) -> str:
    numbers = "".join(f"{getattr(report, column):9}" for column in COLUMNS)
    line = f"{report.arch:8}{numbers}{report.seconds:7.2f}  {report.name}"
    if not report.allowed:
        line += "  NOT ALLOWED"
    return line + "".join(f"\n{'':10}{complaint}" for complaint in report.complaints)
