"""The command line: `python -m dualops {demo,info,check,warm,estimate,tune,new}`.

    demo    the operators at work, on the GPU, in the simulator or as the reference, held against the float64 truth
    info    versions, device, ceilings, cache
    check   every kernel of the COMPILE list built offline: registers, stack, spills, shared memory
    warm    kernels compiled ahead of time, on all cores
    estimate  what the Configs of an operator would take on a GPU, ranked
    tune    the ways to do a problem timed on this GPU, and the fastest kept for later calls
    new     the files of a new operator, in a clone

Exit codes: 0 all is well, 1 a result or a build is not as it must be, 2 the call was wrong or can't be served, 130 it
was interrupted (Ctrl-C), 141 nobody reads what it writes (`| head`).
Nothing here imports Numba before a subcommand has decided where kernels run: Numba reads its switch once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from . import check, demo, info, new, ranking, tune, warm
from .console import let_go, lines
from .errors import CommandError
from .formatter import Formatter

SUBCOMMANDS = {
    "demo": demo,
    "info": info,
    "check": check,
    "warm": warm,
    "estimate": ranking,
    "tune": tune,
    "new": new,
}
KEPT = {"warm": "what was compiled is kept", "tune": "what was timed is kept"}  # of a command that is interrupted
INTERRUPTED, PIPE_CLOSED = 130, 141  # as a shell says it of a program that SIGINT or SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; a wrong call is one line on stderr and exit code 2."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        let_go()
        return PIPE_CLOSED


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    name = arguments.command
    if name is None:
        parser.print_help()
        return 0
    try:
        return SUBCOMMANDS[name].run(arguments)
    except CommandError as error:
        lines(stderr=True).print(f"dualops {name}: {error}")
        return 2
    except KeyboardInterrupt:
        lines(stderr=True).print("; ".join([f"dualops {name}: interrupted", *([KEPT[name]] if name in KEPT else [])]))
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    told = "GPU operators, as NumPy and as CUDA"
    parser = argparse.ArgumentParser(prog="python -m dualops", description=told, formatter_class=Formatter)
    parser.add_argument("--version", action="version", version=f"dualops {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar=f"{{{','.join(SUBCOMMANDS)}}}")
    for name, module in SUBCOMMANDS.items():
        module.add_arguments(
            subparsers.add_parser(name, help=module.HELP, description=module.__doc__, formatter_class=Formatter)
        )
    return parser
