"""What dualops would run with here: versions, driver, device or what is missing for one, measured ceilings, and the
cache of compiled kernels.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from importlib import import_module, metadata

from rich.table import Table
from rich.text import Text

from ..machine import ask_driver
from .console import Console
from .place import SWITCH, choose
from .report import size

HELP = "versions, driver, device or what is missing for one, ceilings, cache"

PACKAGES = ("dualops", "numba", "numba-cuda", "cuda-core", "numpy", "ml_dtypes", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None to add."""


def run(arguments: argparse.Namespace) -> int:
    made = Table(show_header=False, box=None)
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for name, value in (*versions(), *device(), *cache(), *installed()):
        made.add_row(name, Text(value))  # brackets in it are its own
    Console(soft_wrap=True).print(made)
    return 0


def versions() -> Iterator[tuple[str, str]]:
    """Python and every package that matters, installed or not."""
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            yield package, "not installed"


def device() -> Iterator[tuple[str, str]]:
    """Where kernels run, what a GPU can do, or what is missing for one."""
    place = choose("auto")
    yield "driver", str(ask_driver())
    if place.name != "gpu":
        reason = "kernels can't run on a GPU here" if place.missing else f"{SWITCH} is set"
        yield "device", f"the simulator: {reason}"
        yield from (("missing", told) for told in place.missing)
        return
    gpu = import_module("dualops.cuda.device").current()
    yield "device", f"{gpu.name}, {gpu.arch}, {gpu.sms} SMs"
    yield "memory on chip", f"L2 {size(gpu.l2_bytes)}, shared memory a block {size(gpu.shared_memory_per_block)}"
    for mix, bytes_a_second in import_module("dualops.cuda.roof").ceilings().items():
        yield f"ceiling, read:write {mix}", f"{bytes_a_second / 1e12:.2f} TB/s"


def cache() -> Iterator[tuple[str, str]]:
    """Where compiled kernels are kept, and how many, or why none are."""
    there = import_module("dualops.cuda.cache")
    try:
        kept = there.kernels().values()
        told = f"{len(kept)} kernels, {size(sum(kept))}"
    except OSError as error:
        told = f"not used, {error.strerror}"
    yield "cache", f"{there.folder()}: {told}"


def installed() -> Iterator[tuple[str, str]]:
    """Kernels that came compiled, of each architecture that has some, or why they are not used."""
    architectures = import_module("dualops.cuda.device").ARCHITECTURES
    for arch, told in import_module("dualops.cuda.bundled").told(tuple(architectures)):
        yield f"kernels, {arch}", told
