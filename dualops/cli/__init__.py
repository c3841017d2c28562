"""The command line: `python -m dualops {demo,info,check,warm,estimate,tune,new}`.

    demo    run the operators on the GPU, in the simulator or as the reference, and compare with the float64 truth
    info    versions, device, ceilings, cache
    check   build every kernel of the COMPILE list offline: registers, stack, spills, shared memory
    warm    compile kernels ahead of time, on all cores
    estimate  rank an operator's Configs by their estimated time on a GPU
    tune    time the rungs and Configs that can run a problem on this GPU, and keep the fastest for later calls
    new     write the files of a new operator, in a clone

Exit codes: 0 success, 1 a wrong result or a failed build, 2 the call was wrong or can't be served, 130 interrupted
(Ctrl-C), 141 the reader of the output has closed the pipe (`| head`).
Nothing here imports Numba before a subcommand has chosen where kernels run: Numba reads its switch only once.
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

SUBCOMMANDS = {"demo": demo, "info": info, "check": check, "warm": warm, "estimate": ranking, "tune": tune, "new": new}
# printed when the command is interrupted
KEPT = {"warm": "what was compiled is kept", "tune": "what was timed is kept"}
INTERRUPTED, PIPE_CLOSED = 130, 141  # as a shell reports a program that SIGINT or SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. A wrong call prints one line on stderr and returns 2."""
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
    description = "GPU operators, as NumPy and as CUDA"
    parser = argparse.ArgumentParser(prog="python -m dualops", description=description, formatter_class=Formatter)
    parser.add_argument("--version", action="version", version=f"dualops {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar=f"{{{','.join(SUBCOMMANDS)}}}")
    for name, module in SUBCOMMANDS.items():
        module.add_arguments(
            subparsers.add_parser(name, help=module.HELP, description=module.__doc__, formatter_class=Formatter)
        )
    return parser
