"""The command line: `python -m dualops {demo,info,check,warm,estimate,tune,new}`.

    demo    the operators at work, on the GPU, in the simulator or as the reference, held against the float64 truth
    info    versions, device, ceilings, cache
    check   every kernel of the COMPILE list built offline: registers, stack, spills, shared memory
    warm    kernels compiled ahead of time, on all cores
    estimate  what the Configs of an operator would take on a GPU, ranked
    tune    the ways to do a problem timed on this GPU, and the fastest kept for later calls
    new     the files of a new operator, in a clone

Exit codes: 0 all is well, 1 a result or a build is not as it must be, 2 the call was wrong or can't be served.
Nothing here imports Numba before a subcommand has decided where kernels run: Numba reads its switch once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import check, demo, info, new, ranking, tune, warm
from .console import lines
from .errors import CommandError

SUBCOMMANDS = {
    "demo": demo,
    "info": info,
    "check": check,
    "warm": warm,
    "estimate": ranking,
    "tune": tune,
    "new": new,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; a wrong call is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m dualops", description="GPU operators, as NumPy and as CUDA")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(SUBCOMMANDS)}}}")
    for name, module in SUBCOMMANDS.items():
        raw = argparse.RawDescriptionHelpFormatter
        module.add_arguments(
            subparsers.add_parser(name, help=module.HELP, description=module.__doc__, formatter_class=raw)
        )
    arguments = parser.parse_args(argv)
    try:
        return SUBCOMMANDS[arguments.command].run(arguments)
    except CommandError as error:
        lines(stderr=True).print(f"dualops {arguments.command}: {error}")
        return 2
