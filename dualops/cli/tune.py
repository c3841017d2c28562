"""Time the ways to run an operator's problems on this GPU, and keep the fastest for later calls with such a problem.
A way is a rung with one of its Configs.

    python -m dualops tune matmul                                   at the sizes of the benchmarks
    python -m dualops tune flash_attention --problem "B=2 H=16 S=8192 D=128 causal=True"
    python -m dualops tune softmax --problem "x=8192x4096:bfloat16" --top 4
    python -m dualops tune matmul --dry-run --arch rtx4090          only list the ways, without a GPU
    python -m dualops tune --clear                                  delete all measured times, or an operator's

State a problem as for `estimate` and `warm`: sizes of attention, matmul, retention, softmax and the norms, or arrays.
Without --remeasure, a way that was timed before is not timed again. Ctrl-C keeps all measured times.
`print(dualops.cuda.plan(...))` shows the way that a call takes.

Exit code 2: the request can't be read or is no problem of the operator's, there is no GPU or none of the ways works on
it, or the cache can't be written to.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from ..machine import missing
from ..spec import OPERATORS, Case, Spec, Tag
from ..spec.text import case_of
from .check import cache_folder
from .errors import CommandError
from .gpu import Bench
from .own import case_arrays, job_of_case
from .place import SWITCH
from .problems import Arrays, Job, Task, tasks
from .progress import progress

HELP = "time an operator's ways on this GPU and keep the fastest"

DEFAULT = "h200"  # for --dry-run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operator", nargs="?", metavar="OPERATOR", help=f"of {', '.join(OPERATORS)}")
    parser.add_argument(
        "--problem",
        action="append",
        default=[],
        metavar="TEXT",
        help="a problem instead of the benchmark's; repeatable",
    )
    parser.add_argument("--forward", action="store_true", help="not the gradient")
    parser.add_argument("--top", type=int, default=8, metavar="N", help="number of ways for each problem; default: 8")
    parser.add_argument("--remeasure", action="store_true", help="also time ways that were timed before")
    parser.add_argument("--dry-run", action="store_true", help="list the ways without timing them")
    parser.add_argument("--arch", metavar="GPU", help=f"for --dry-run, such as rtx4090 or sm_80; default: {DEFAULT}")
    parser.add_argument("--clear", action="store_true", help="delete measured times, and time nothing")


def run(arguments: argparse.Namespace) -> int:
    name = arguments.operator
    if name is not None and name not in OPERATORS:
        raise CommandError(f"no operator {name}, expected one of {', '.join(OPERATORS)}")
    if arguments.top < 1:
        raise CommandError(f"--top is {arguments.top}, expected at least 1")
    if arguments.arch and not arguments.dry_run:
        raise CommandError(f"--arch {arguments.arch}: tune times this GPU; name another one only with --dry-run")
    if arguments.clear:
        if arguments.dry_run or arguments.problem or arguments.forward or arguments.remeasure:
            raise CommandError("--clear deletes all times of an operator, expected no other option with it")
        _without_compiler()
        return _clear(name)
    if name is None:
        raise CommandError(f"no operator, expected one of {', '.join(OPERATORS)}, or --clear")
    if arguments.dry_run:
        _without_compiler()
    elif lacking := missing():
        raise CommandError(f"{' '.join(lacking)} Or --dry-run, which needs no GPU.")
    import_module("dualops.cuda")  # registers the operators
    found = [each for each in tasks().values() if each.spec.name == name and not (arguments.forward and each.backward)]
    try:
        problems = [(task, case) for case in _cases(name, arguments.problem) for task in _of_case(found, case)]
        absent_problem = import_module("dualops.cuda.compiler.offline").absent_problem
        for task, case in problems:
            absent_problem(task.spec, case, task.backward)  # raises for a wrong problem before any is timed
        if arguments.dry_run:
            return _dry_run(problems, arguments.arch or DEFAULT, arguments.top)
        cache_folder()
        return _tune(problems, arguments.top, arguments.remeasure)
    except (ValueError, TypeError, NotImplementedError, RuntimeError, OSError, MemoryError) as error:
        raise CommandError(str(error) or type(error).__name__) from None


def _without_compiler() -> None:
    """Select the simulator if there is no compiler; none is needed here."""
    if find_spec("numba_cuda") is None:
        os.environ[SWITCH] = "1"


def _clear(name: str | None) -> int:
    """Delete the records of an operator and its gradient, or all records."""
    clear = import_module("dualops.cuda.tuning.records").clear
    try:
        count = clear() if name is None else clear(name) + clear(f"{name}_backward")
    except OSError as error:
        raise CommandError(str(error)) from None
    print(f"{count} records forgotten")
    return 0


def _cases(name: str, texts: Sequence[str]) -> list[Case]:
    """Return the cases that texts state, or the benchmark's. Raises ValueError for an unreadable text."""
    spec = OPERATORS[name]
    found = [_case(spec, text) for text in texts] or list(spec.tagged(Tag.BENCH))
    for case in found:
        if case.orders and texts:
            raise ValueError(f"{case.name}: arrays are made dense, expected none with @")
    return found


def _case(spec: Spec, text: str) -> Case:
    cost = import_module("dualops.estimate")
    whole = f"{spec.name} {text}"
    return (cost.problem_of(whole) if spec.name in cost.SIZES else case_of(whole, OPERATORS))[1]


def _of_case(found: Sequence[Task], case: Case) -> list[Task]:
    """Return the tasks of a case: without the gradient, if the case has none."""
    return [task for task in found if case.backward or not task.backward]


def _dry_run(problems: Sequence[tuple[Task, Case]], arch: str, top: int) -> int:
    """Print the ways in the operator's own order."""
    device = import_module("dualops.estimate").architecture(arch).device
    offline = import_module("dualops.cuda.compiler.offline")
    operations = import_module("dualops.cuda.launch.operation").OPERATIONS
    title = import_module("dualops.cuda.tuning.records").title
    fast = import_module("dualops.cuda.tuning.tune").worth_timing
    for task, case in problems:
        operation = operations[task.spec.name][task.backward]
        problem = offline.absent_problem(task.spec, case, task.backward)
        print(f"{title(operation.op, problem, operation.lengths)} on {device.name}")
        for choice in fast(operation.choices(problem, problem.outputs(operation.outputs), device))[:top]:
            print(f"    {choice.rung}  {choice.config}: {choice.reason}")
    return 0


def _tune(problems: Sequence[tuple[Task, Case]], top: int, remeasure: bool) -> int:
    """Time each problem's ways, and print its record."""
    tune = import_module("dualops.cuda.tuning.tune").tune
    with progress(len(problems) * top) as begin:
        for task, case in problems:
            bench = Bench(job_of_case(task, case), case_arrays(task, case, _on_gpu), None)
            out = tuple(bench.outs[0].values())
            given = {**bench.inputs[0], **bench.job.params}
            record = tune(
                task.spec.name, out=out, backward=task.backward, top=top, remeasure=remeasure, begin=begin, **given
            )
            with begin.aside():
                print(record, flush=True)
    return 0


def _on_gpu(job: Job, arrays: Arrays) -> Arrays:
    """Compute forward's results on the GPU: at these sizes the reference would take minutes."""
    return Bench(job, arrays, None).results()
