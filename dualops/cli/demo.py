"""Run the operators and compare each result with the float64 reference: one line per operator, one in total, and what
to try next.

    python -m dualops demo                                        every operator, on built-in problems
    python -m dualops demo flash_attention --param causal=True --input qkv.npz --output o.npz

The arrays of --input are named like the operator's arguments (q, k, v, bias, seed). .npz has no bfloat16: with --dtype
bfloat16, arrays of uint16 are read as bfloat16 bits, and --output writes bfloat16 in the same way. --dtype does not
change masks, lengths and seeds. Parameters that are functions (score_mod) can't be given on a command line.
Exit code 1: an error is over its tolerance. Exit code 2: the call is wrong, or takes too long in the simulator.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..spec.meta import FLOATS
from .afterwards import afterwards
from .console import lines
from .errors import CommandError
from .estimate import duration, reference_seconds, run_seconds, simulator_seconds
from .files import same_file, user_job, write_npz
from .measure import Judge, Measurement, on_gpu, on_reference, on_simulator, plan_of
from .own import own_jobs
from .place import PLACES, choose
from .problems import Arrays, Job, Task, parse_params, tasks
from .progress import Steps, progress
from .report import Row, print_table
from .verdict import last_line, operator_line, remarks

HELP = "run the operators and compare each result with the float64 reference"

SIMULATOR_LIMIT = 60.0  # most seconds of a problem in the simulator
CHECK_LIMIT = 300.0  # most seconds of a reference check without --check

RUN: dict[str, Callable[[Job, Arrays, str | None], Measurement]] = {
    "gpu": on_gpu,
    "simulator": on_simulator,
    "reference": on_reference,
}


class Work(NamedTuple):
    """A problem and the rungs to run it on; None is the rung that serves it best."""

    job: Job
    rungs: Sequence[str | None]
    checked: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operator", nargs="?", metavar="OPERATOR", help=f"one of {', '.join(tasks())}; default: all")
    parser.add_argument("--input", type=Path, metavar="FILE.npz", help="your own arrays, by argument name")
    parser.add_argument("--output", type=Path, metavar="FILE.npz", help="save the results, by the spec's names")
    parser.add_argument("--where", choices=PLACES, default="auto", help="default: the GPU, else the simulator")
    parser.add_argument("--kernel", metavar="RUNG", help="force one rung, such as naive or simt")
    parser.add_argument("--dtype", choices=FLOATS, help="dtype of the problem; arrays of --input are rounded to it")
    parser.add_argument(
        "--param", action="append", default=[], metavar="NAME=VALUE", help="a parameter of the operator; repeatable"
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help=f"compare the result with the reference; default: if that takes less than {duration(CHECK_LIMIT)}",
    )
    parser.add_argument(
        "--verbose", "-v", action="store_true", help="also a table of all runs: arguments, errors, time, memory, speed"
    )


def run(arguments: argparse.Namespace) -> int:
    began = time.perf_counter()
    wanted = _wanted_tasks(arguments)
    place, lacking = choose(arguments.where)
    groups = _groups(_work(arguments, wanted, place))
    if lacking:
        lines(stderr=True).print(f"dualops demo: kernels run in the simulator. {' '.join(lacking)}")
    console = lines()
    rows: list[Row] = []
    with progress(_seconds(groups.values(), place)) as steps:
        for name, group in groups.items():
            found = [row for work in group for row in _rows(work, arguments, place, steps)]
            with steps.aside():
                console.print(operator_line(name, max(map(len, groups)), found))
                for remark in remarks(found, arguments.output, said=arguments.check is None):
                    console.print(remark)
            rows += found
    if arguments.verbose:
        print_table(rows, place)
    console.print(last_line(rows, place, time.perf_counter() - began, verbose=arguments.verbose))
    if any(row.failures for row in rows):
        return 1
    if arguments.operator is None:
        for line in afterwards(place):
            console.print(line)
    return 0


def _wanted_tasks(arguments: argparse.Namespace) -> list[Task]:
    known = tasks()
    if arguments.output and not arguments.input:
        raise CommandError("--output needs --input: it saves the results of your arrays")
    if arguments.output and same_file(arguments.output, arguments.input):
        raise CommandError(f"--output {arguments.output} is the file of --input, expected another one")
    if arguments.operator is None:
        for option in ("input", "param", "kernel"):
            if getattr(arguments, option):
                raise CommandError(f"--{option} needs an operator: {', '.join(known)}")
        return list(known.values())
    if arguments.operator not in known:
        raise CommandError(f"no operator {arguments.operator}, expected one of {', '.join(known)}")
    return [known[arguments.operator]]


def _work(arguments: argparse.Namespace, wanted: list[Task], place: str) -> Iterator[Work]:
    """Yield the user's problem on the rung that serves it, or built-in problems on every rung."""
    for task in wanted:
        params = parse_params(arguments.param, task)
        if arguments.kernel is not None and arguments.kernel not in task.spec.rungs:
            raise CommandError(f"--kernel {arguments.kernel}: {task.name} has {', '.join(task.spec.rungs)}")
        if arguments.input:
            jobs, rungs = [user_job(task, arguments.input, params, arguments.dtype)], [arguments.kernel]
        else:
            jobs = own_jobs(task, place, params, arguments.dtype)
            rungs = [arguments.kernel] if arguments.kernel or place == "reference" else task.spec.rungs
        yield from (Work(job, rungs, _to_check(job, arguments.check)) for job in jobs)


def _groups(every: Iterator[Work]) -> dict[str, list[Work]]:
    """Group work that shares a line, an operator and its gradient, by the operator's name."""
    groups: dict[str, list[Work]] = {}
    for work in every:
        task = work.job.task
        groups.setdefault(task.spec.name if task.spec.name in groups else task.name, []).append(work)
    return groups


def _seconds(groups: Iterable[list[Work]], place: str) -> list[float]:
    """Estimate the seconds of each run. The reference runs once for all rungs, together with the first of them."""
    every = (work for group in groups for work in group)
    return [
        run_seconds(work.job, place, work.checked and not number) for work in every for number in range(len(work.rungs))
    ]


def _to_check(job: Job, insisted: bool | None) -> bool:
    return reference_seconds(job) <= CHECK_LIMIT if insisted is None else insisted


def _rows(work: Work, arguments: argparse.Namespace, place: str, steps: Steps) -> Iterator[Row]:
    """Run a problem on its rungs, check the results, and write the user's output."""
    job = work.job
    arrays = job.load()
    judge = Judge(job, arrays) if work.checked else None
    for kernel in work.rungs:
        steps(" ".join(filter(None, [job.task.name, kernel, job.title])))
        try:
            if place == "simulator":
                _refuse_if_slow(work, arrays, kernel)
            measured = RUN[place](job, arrays, kernel)
        except NotImplementedError as error:
            if arguments.input or arguments.kernel:
                raise CommandError(str(error)) from None
            continue  # this rung does not serve the problem; show the others
        found = judge.verdict(measured.results) if judge else None
        if arguments.output:
            write_npz(arguments.output, measured.results)
        yield Row(job, measured, found and found.worst, found.failures if found else [])


def _refuse_if_slow(work: Work, arrays: Arrays, kernel: str | None) -> None:
    job, check = work.job, reference_seconds(work.job) if work.checked else 0
    seconds = simulator_seconds(job, plan_of(job, arrays, kernel))
    if seconds > SIMULATOR_LIMIT:
        raise CommandError(
            f"{job}: without a GPU the simulator would need about {duration(seconds + check)}; --where reference runs "
            f"it as NumPy in about {duration(run_seconds(job, 'reference', work.checked))}"
            + (", the check included" if check else "")
        )
