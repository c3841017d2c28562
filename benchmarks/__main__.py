"""Measurements that are started by hand, and pictures of the results.

python -m benchmarks run OPERATOR [--peers] [--slow-peers] [--case NAME ...] [--json FILE]
python -m benchmarks scaling [--up-to S] [--json FILE]
python -m benchmarks ladder OPERATOR [--json FILE]
python -m benchmarks training [--json FILE] [--steps N] [--tiny]
python -m benchmarks context [--json FILE] [--tiny]
python -m benchmarks host [--json FILE]
python -m benchmarks compile [NAME ...] [--runs N] [--json FILE]
python -m benchmarks numbers [--minutes M]
python -m benchmarks plot
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from . import ladder_table
from .tree import ROOT, spec


def run(arguments: argparse.Namespace) -> int:
    """Time an operator on this machine; 1 if dualops is wrong or nothing can be timed."""
    try:
        from . import comparison
        from .cases import find
        from .workload import WrongResult
    except ImportError as missing:
        print(f"python -m benchmarks run needs torch: {missing}", file=sys.stderr)
        return 1

    def keep(found: list[comparison.Measurement]) -> None:
        if arguments.json:
            comparison.save(arguments.json, comparison.document(arguments.operator, found, arguments.json))

    suite, show = find(arguments.operator), partial(print, flush=True)
    try:
        who = {"peers": arguments.peers is not None, "named": arguments.peers or (), "slow": arguments.slow_peers}
        comparison.run(suite, cases=arguments.case, **who, show=show, keep=keep)
    except (NotImplementedError, ValueError, WrongResult) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def scaling(arguments: argparse.Namespace) -> int:
    """Time attention against length; 1 if dualops is wrong or nothing can be timed."""
    try:
        from . import scaling_run
        from .comparison import save
        from .workload import WrongResult
    except ImportError as missing:
        print(f"python -m benchmarks scaling needs torch: {missing}", file=sys.stderr)
        return 1
    try:
        found = scaling_run.run(longest=arguments.up_to, show=partial(print, flush=True))
    except (NotImplementedError, WrongResult) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        save(arguments.json, scaling_run.document(found))
    return 0


def ladder(arguments: argparse.Namespace) -> int:
    """Time and profile an operator's ladder; 1 if a step is wrong or nothing can be timed."""
    try:
        from . import ladder_run
        from .comparison import save
        from .workload import WrongResult
    except ImportError as missing:
        print(f"python -m benchmarks ladder needs torch: {missing}", file=sys.stderr)
        return 1
    show, chosen = partial(print, flush=True), ladder_run.LADDERS[arguments.operator]
    try:
        if arguments.once:
            show(", ".join(ladder_run.launch_once(chosen)))
            return 0
        found = ladder_run.run(chosen, show)
    except (NotImplementedError, WrongResult) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    there = [point.who for point in found if point.case == chosen.page.counted and point.seconds is not None]
    content = ladder_run.document(chosen, found, ladder_run.counters(chosen, there, show))
    if arguments.json:
        save(arguments.json, content)
    return 0


def training(arguments: argparse.Namespace) -> int:
    """Train a Llama three times; 1 if there is no GPU for the large one, or a package is missing."""
    try:
        import torch

        from . import training_run
        from .comparison import save

        import_module("transformers")
    except ImportError as missing:
        print(f"python -m benchmarks training needs torch and transformers: {missing}", file=sys.stderr)
        return 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.tiny:
        print("python -m benchmarks training needs a GPU; --tiny is for a CPU", file=sys.stderr)
        return 1
    size = training_run.TINY if arguments.tiny else training_run.LLAMA_1B
    found = training_run.run(size, steps=arguments.steps, device=device, show=partial(print, flush=True))
    if arguments.json:
        save(arguments.json, training_run.document(found, size, device))
    print(training_run.table(found))
    return 0


def context(arguments: argparse.Namespace) -> int:
    """Time attention on several GPUs; 1 if there are none, or a result is wrong."""
    try:
        import torch

        from . import context_run
        from .comparison import save
        from .workload import WrongResult
    except ImportError as missing:
        print(f"python -m benchmarks context needs torch: {missing}", file=sys.stderr)
        return 1
    processes = 2 if arguments.tiny else torch.cuda.device_count()
    if processes < 2:
        print("python -m benchmarks context needs two GPUs; --tiny is for CPUs", file=sys.stderr)
        return 1
    try:
        found = context_run.run(processes, tiny=arguments.tiny, show=partial(print, flush=True))
    except WrongResult as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        save(arguments.json, context_run.document(found, tiny=arguments.tiny))
    return 0


def host(arguments: argparse.Namespace) -> int:
    """Time the host's work per call; 1 if nothing can be timed."""
    try:
        from . import host_run
    except ImportError as missing:
        print(f"python -m benchmarks host needs torch: {missing}", file=sys.stderr)
        return 1
    try:
        found = host_run.run(partial(print, flush=True))
    except (NotImplementedError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        host_run.save(arguments.json, found)
    return 0


def compile_(arguments: argparse.Namespace) -> int:
    """Time how long kernels take to build, without a GPU; 1 if they can't be built."""
    from . import compile_run

    try:
        found = compile_run.run(arguments.names, arguments.runs, partial(print, flush=True))
    except (ImportError, RuntimeError) as error:
        print(f"python -m benchmarks compile needs numba-cuda: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        compile_run.save(arguments.json, found)
    return 0


def numbers(arguments: argparse.Namespace) -> int:
    """Measure all missing numbers; 3 if the time ended before, 1 if something failed."""
    try:
        import torch

        from . import numbers as all_numbers
        from .cases import require_gpu
        from .comparison import commit
    except ImportError as missing:
        print(f"python -m benchmarks numbers needs torch: {missing}", file=sys.stderr)
        return 1
    try:
        require_gpu()
    except NotImplementedError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    source = all_numbers.Source(commit(ROOT), torch.cuda.get_device_name())
    if reason := all_numbers.missing(source):
        print(f"python -m benchmarks numbers: {reason}", file=sys.stderr)
        return 1
    every = all_numbers.parts(arguments.folder, arguments.machine, torch.cuda.device_count())
    os.environ.update(all_numbers.CACHES)
    warm, warm_peers = import_module("dualops.cuda").warm, all_numbers.build_kernels_of_peers
    ways: dict[str, Any] = {"warm": lambda cases: warm(*cases), "warm_peers": warm_peers}
    return all_numbers.run(every, source, 60 * arguments.minutes, main, **ways, show=partial(print, flush=True))


def plot(arguments: argparse.Namespace) -> int:
    """Fill the pages' tables and draw the pictures from committed results; 1 if nothing has been recorded."""
    from . import headlines, host_table, peers_plot, plot as drawing, scaling_plot, training_plot
    from .recorded import all_recordings, peer_runs

    peers, everywhere = peer_runs(arguments.peer_results), all_recordings(arguments.results)
    if not everywhere:
        print(f"asv recorded no times in {arguments.results}", file=sys.stderr)
        return 1
    for page, content in (
        (arguments.readme, headlines.table(peers)),
        (arguments.numbers, drawing.summary(peers)),
        (arguments.every_case, drawing.table(everywhere, peers)),
    ):
        page.write_text(drawing.fill(page.read_text(), content))
        print(page)
    timed = {key.operator for one in everywhere for key in one.seconds}
    for operator in drawing.row_operators():
        if operator not in timed:
            continue
        target = arguments.docs / f"{operator}.png"
        drawing.picture(operator, everywhere, peers.get(operator), target)
        print(target)
    target = arguments.docs / "peers.png"
    if peers_plot.picture(peers, target):
        print(target)
        page = arguments.index.read_text()
        arguments.index.write_text(drawing.fill(page, peers_plot.caption(peers), *peers_plot.MARKERS))
        print(arguments.index)
    lengths = arguments.scaling / f"{arguments.machine}.json"
    if lengths.exists():
        target = arguments.docs / "flash_attention_scaling.png"
        scaling_plot.picture(lengths, target)
        print(target)
        page = arguments.page.read_text()
        markers = "<!-- scaling:begin -->", "<!-- scaling:end -->"
        arguments.page.write_text(drawing.fill(page, scaling_plot.table(lengths), *markers))
        print(arguments.page)
    trained = arguments.training / "llama.json"
    if trained.exists():
        target = arguments.docs / "llama_training.png"
        training_plot.picture(trained, target)
        print(target)
    costs = arguments.host / f"{arguments.machine}.json"
    if costs.exists():
        page = arguments.every_case.read_text()
        arguments.every_case.write_text(drawing.fill(page, host_table.table(costs), *host_table.MARKERS))
    for operator in ladder_table.PAGES:
        steps = ladder_table.recorded(operator, arguments.machine, arguments.ladder)
        page = arguments.pages / operator / "README.md"
        page.write_text(drawing.fill(page.read_text(), ladder_table.tables(operator, steps), *ladder_table.MARKERS))
        print(page)
        if steps.exists():
            target = arguments.docs / ladder_table.picture_name(operator)
            ladder_table.picture(steps, target)
            print(target)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(required=True)
    runner = commands.add_parser("run", help="time an operator and its peers on this machine's GPU")
    runner.add_argument("operator", choices=list(spec.OPERATORS))
    peers = "also time every peer that can be imported, or those with one of these words in their names"
    runner.add_argument("--peers", nargs="*", metavar="WORD", help=peers)
    runner.add_argument("--slow-peers", action="store_true", help="also time those that search for their best kernel")
    runner.add_argument(
        "--case", nargs="+", default=[], metavar="NAME", help="only these BENCH or COMPARE cases; * is any"
    )
    runner.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the figures there; keep those that are not timed now"
    )
    runner.set_defaults(command=run)
    lengths = commands.add_parser("scaling", help="time attention and count its memory against the length of sequences")
    lengths.add_argument("--up-to", type=int, default=16384, metavar="S", help="the longest; default: 16384")
    lengths.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    lengths.set_defaults(command=scaling)
    steps = commands.add_parser("ladder", help="time the steps of an operator's ladder, and count what they do")
    steps.add_argument("operator", choices=[*ladder_table.PAGES])
    steps.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    steps.add_argument("--once", action="store_true", help="only launch each kernel once, for a profiler that watches")
    steps.set_defaults(command=ladder)
    trainer = commands.add_parser("training", help="train a Llama of 1 B parameters, compared with eager and float32")
    trainer.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    trainer.add_argument("--steps", type=int, default=30, metavar="N", help="default: 30")
    trainer.add_argument("--tiny", action="store_true", help="a tiny one, on a CPU too")
    trainer.set_defaults(command=training)
    shared = commands.add_parser("context", help="time attention on several GPUs, and on one of them")
    shared.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    shared.add_argument("--tiny", action="store_true", help="a tiny one, on two CPU processes")
    shared.set_defaults(command=context)
    costs = commands.add_parser("host", help="time the host's work per call, and that of torch's calls")
    costs.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    costs.set_defaults(command=host)
    builder = commands.add_parser("compile", help="time how long kernels take to build; no GPU is needed")
    builder.add_argument("names", nargs="*", metavar="NAME", help="only cases whose names contain one of these")
    builder.add_argument("--runs", type=int, default=3, metavar="N", help="builds of each kernel; default: 3")
    builder.add_argument("--json", type=Path, metavar="FILE", help="also write the ratios there")
    builder.set_defaults(command=compile_)
    everything = commands.add_parser("numbers", help="measure all of the above of this commit, in several runs")
    everything.add_argument("--minutes", type=float, default=9.0, metavar="M", help="of this run; default: 9")
    everything.add_argument("--machine", default="h200", help="the files' name; default: h200")
    everything.add_argument("--folder", type=Path, default=ROOT / "benchmarks", help="of the files")
    everything.set_defaults(command=numbers)
    plotter = commands.add_parser("plot", help="draw the pages' tables and pictures from the committed results")
    plotter.add_argument("--machine", default="h200", help="whose scaling, ladders and host are drawn; default: h200")
    plotter.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    pages = ROOT / "dualops" / "cuda"
    page = ROOT / "docs" / "measurements" / "flash_attention.md"
    plotter.add_argument("--page", type=Path, default=page, help="whose table of attention against length is filled")
    plotter.add_argument(
        "--pages", type=Path, default=pages, help="an operator's page below it has its ladder's tables"
    )
    plotter.add_argument("--peer-results", type=Path, default=ROOT / "benchmarks" / "peer_results")
    plotter.add_argument("--scaling", type=Path, default=ROOT / "benchmarks" / "scaling")
    plotter.add_argument("--training", type=Path, default=ROOT / "benchmarks" / "training")
    plotter.add_argument("--ladder", type=Path, default=ROOT / "benchmarks" / "ladder")
    plotter.add_argument("--host", type=Path, default=ROOT / "benchmarks" / "host")
    plotter.add_argument("--readme", type=Path, default=ROOT / "README.md", help="gets a row an operator")
    all_numbers = ROOT / "docs" / "pages" / "numbers.md"
    plotter.add_argument("--numbers", type=Path, default=all_numbers, help="gets a row an operator and dtype")
    every_case = ROOT / "benchmarks" / "README.md"
    plotter.add_argument("--every-case", type=Path, default=every_case, help="the page that gets every case")
    plotter.add_argument("--docs", type=Path, default=ROOT / "docs")
    index = ROOT / "docs" / "pages" / "index.md"
    plotter.add_argument("--index", type=Path, default=index, help="the page that says which GPUs peers.png is of")
    plotter.set_defaults(command=plot)
    arguments = parser.parse_args(words)
    return arguments.command(arguments)


if __name__ == "__main__":
    sys.exit(main())
