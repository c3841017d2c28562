"""Every kernel of the COMPILE list built offline, for architectures that need not be here. Needs no GPU.

Exit code 1 if a kernel spills, does not fit its Config's registers or the architecture's shared memory, or if ptxas
complains of what makes it slow. 2: this installation can't compile.
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
from typing import Any

from ..machine import NEWEST, install_command
from .errors import CommandError
from .place import SWITCH

HELP = "compile every kernel offline and report registers, spills and shared memory"

DEFAULT = ("sm_90a",)  # the one that dualops is tuned on; all six take six times as long
COLUMNS = ("registers", "stack_bytes", "spill_bytes", "static_shared", "dynamic_shared", "cubin_bytes")
TITLES = ("regs", "stack", "spills", "static", "dynamic", "cubin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", nargs="+", default=DEFAULT, metavar="ARCH", help=f'such as sm_80, or "all"; default: {DEFAULT[0]}'
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes that compile side by side; default: 1"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a kernel and line")


def run(arguments: argparse.Namespace) -> int:
    require_compiler()
    architectures = architectures_of(arguments.arch)
    import_module("dualops.cuda")  # registers the operators
    refused = total = 0
    for report in import_module("dualops.cuda.offline").check_builds(architectures, arguments.jobs):
        if not (total or arguments.json):
            print(f"{'arch':8}" + "".join(f"{title:>9}" for title in TITLES) + f"{'s':>7}  kernel")
        total += 1
        refused += not report.allowed
        print(json.dumps(asdict(report)) if arguments.json else _line(report), flush=True)
    if not total:
        raise CommandError("no operator has a COMPILE case: nothing was built")
    told = f"{total} kernels built, {refused} not allowed"
    print(told, file=sys.stderr if arguments.json else sys.stdout)
    return 1 if refused else 0


def require_compiler() -> None:
    """Let Numba compile, and not simulate. Raises CommandError where it can't."""
    if find_spec("numba_cuda") is None:
        raise CommandError(f"no compiler, which needs no GPU: {install_command(NEWEST)}")
    os.environ[SWITCH] = "0"
    if import_module("dualops.cuda.backend").SIMULATED:
        raise CommandError(f"Numba was imported before with {SWITCH}=1: start a new process")


def architectures_of(wanted: Sequence[str]) -> list[str]:
    """Those named, or all. Raises CommandError for one that is not known."""
    known = import_module("dualops.cuda.device").ARCHITECTURES
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
