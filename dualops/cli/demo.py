"""The operators at work, each result held against the float64 reference.

    python -m dualops demo                                        every operator, on problems of its own
    python -m dualops demo flash_attention --param causal=True --input qkv.npz --output o.npz

The arrays of --input have the names that the operator's arguments have (q, k, v, bias, seed). .npz knows no bfloat16:
with --dtype bfloat16 arrays of uint16 are taken as the bits of bfloat16 numbers, and --output writes bfloat16 so. No
dtype changes masks, lengths and seeds. Parameters that are functions (score_mod) can't be given on a command line.
Exit code 1: an error is over its tolerance. 2: the call is wrong, or would take the simulator too long.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ..spec.meta import FLOATS
from .errors import CommandError
from .estimate import duration, reference_seconds, simulator_seconds
from .files import user_job, write_npz
from .measure import Judge, Measurement, on_gpu, on_reference, on_simulator, plan_of
from .own import own_jobs
from .place import PLACES, choose
from .problems import Arrays, Job, Task, parse_params, tasks
from .progress import progress
from .report import Row, table

HELP = "run the operators and hold each result against the float64 reference"

WIDEST = 400  # columns
SIMULATOR_LIMIT = 60.0  # seconds that a problem may take in the simulator
CHECK_LIMIT = 300.0  # seconds that the reference may take to check it, unless --check insists

RUN: dict[str, Callable[[Job, Arrays, str | None], Measurement]] = {
    "gpu": on_gpu,
    "simulator": on_simulator,
    "reference": on_reference,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operator", nargs="?", metavar="OPERATOR", help=f"one of {', '.join(tasks())}; default: all")
    parser.add_argument("--input", type=Path, metavar="FILE.npz", help="your own arrays, by argument name")
    parser.add_argument("--output", type=Path, metavar="FILE.npz", help="save the results, by the spec's names")
    parser.add_argument("--where", choices=PLACES, default="auto", help="default: the GPU, else the simulator")
    parser.add_argument("--kernel", metavar="RUNG", help="force one rung, such as naive or simt")
    parser.add_argument("--dtype", choices=FLOATS, help="of the problem; rounds the arrays of --input to it")
    parser.add_argument(
        "--param", action="append", default=[], metavar="NAME=VALUE", help="a parameter of the operator; repeatable"
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help=f"hold the result against the reference; default: if that takes less than {duration(CHECK_LIMIT)}",
    )


def run(arguments: argparse.Namespace) -> int:
    wanted = _wanted_tasks(arguments)
    place = choose(arguments.where)
    work = _work(arguments, wanted, place)
    rows: list[Row] = []
    failures: list[str] = []
    with progress(sum(len(rungs) for _, rungs in work)) as advance:
        for job, rungs in work:
            arrays = job.load()
            judge = Judge(job, arrays) if _to_check(job, arguments.check) else None
            for kernel in rungs:
                advance(" ".join(filter(None, [job.task.name, job.title, kernel])))
                try:
                    if place == "simulator":
                        _refuse_if_slow(job, arrays, kernel)
                    measured = RUN[place](job, arrays, kernel)
                except NotImplementedError as error:
                    if arguments.input or arguments.kernel:
                        raise CommandError(str(error)) from None
                    continue  # a rung that does not serve this problem: the others are shown
                found = judge.verdict(measured.results) if judge else None
                rows.append(Row(job, measured, found and found.worst))
                told = found.failures if found else ()
                failures += [f"{job.task.name}, {job.title}, {measured.rung}: {message}" for message in told]
                if arguments.output:
                    write_npz(arguments.output, measured.results)
    _print(rows, failures, place)
    return 1 if failures else 0


def _wanted_tasks(arguments: argparse.Namespace) -> list[Task]:
    known = tasks()
    if arguments.output and not arguments.input:
        raise CommandError("--output needs --input: it saves the results of your arrays")
    if arguments.operator is None:
        for option in ("input", "param", "kernel"):
            if getattr(arguments, option):
                raise CommandError(f"--{option} needs an operator: {', '.join(known)}")
        return list(known.values())
    if arguments.operator not in known:
        raise CommandError(f"no operator {arguments.operator}, expected one of {', '.join(known)}")
    return [known[arguments.operator]]


def _work(arguments: argparse.Namespace, wanted: list[Task], place: str) -> list[tuple[Job, Sequence[str | None]]]:
    """What to run: the user's problem on the rung that serves it, or problems of our own on every rung."""
    work: list[tuple[Job, Sequence[str | None]]] = []
    for task in wanted:
        params = parse_params(arguments.param, task)
        if arguments.kernel is not None and arguments.kernel not in task.spec.rungs:
            raise CommandError(f"--kernel {arguments.kernel}: {task.name} has {', '.join(task.spec.rungs)}")
        if arguments.input:
            return [(user_job(task, arguments.input, params, arguments.dtype), [arguments.kernel])]
        rungs = [arguments.kernel] if arguments.kernel or place == "reference" else task.spec.rungs
        work += [(job, rungs) for job in own_jobs(task, place, params, arguments.dtype)]
    return work


def _refuse_if_slow(job: Job, arrays: Arrays, kernel: str | None) -> None:
    seconds = simulator_seconds(job, plan_of(job, arrays, kernel))
    if seconds > SIMULATOR_LIMIT:
        raise CommandError(
            f"{job}: without a GPU the simulator would need about {duration(seconds)}; "
            f"--where reference runs it as NumPy in about {duration(reference_seconds(job))}"
        )


def _to_check(job: Job, insisted: bool | None) -> bool:
    return reference_seconds(job) <= CHECK_LIMIT if insisted is None else insisted


def _print(rows: list[Row], failures: list[str], place: str) -> None:
    console = Console()
    shown = table(rows, place)
    natural = console.measure(shown, options=console.options.update(width=WIDEST)).maximum
    console.width = max(console.width, natural)  # a narrow window breaks lines, but no cell loses its end
    console.print(shown)
    for row in rows:
        if row.accuracy is None:
            told = duration(reference_seconds(row.job))
            console.print(f"{row.job.task.name} was not checked: the reference needs about {told}, --check insists")
    for message in failures:
        console.print(f"over its tolerance: {message}", style="bold red", highlight=False, soft_wrap=True)
