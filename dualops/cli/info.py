"""Show what dualops would run with here: versions, driver, the device or what it lacks, measured ceilings, and the
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

HELP = "show versions, driver, device or what it lacks, ceilings, cache"

PACKAGES = ("dualops", "numba", "numba-cuda", "cuda-core", "numpy", "ml_dtypes", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run(arguments: argparse.Namespace) -> int:
    made = Table(show_header=False, box=None)
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for name, value in (*versions(), *device(), *cache(), *installed()):
        made.add_row(name, Text(value))  # as Text, so that Rich does not interpret brackets
    Console(soft_wrap=True).print(made)
    return 0


def versions() -> Iterator[tuple[str, str]]:
    """Yield the versions of Python and every relevant package, installed or not."""
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            yield package, "not installed"


def device() -> Iterator[tuple[str, str]]:
    """Yield where kernels run, and the GPU's properties, or what is missing to use one."""
    place = choose("auto")
    yield "driver", str(ask_driver())
    if place.name != "gpu":
        reason = "kernels can't run on a GPU here" if place.missing else f"{SWITCH} is set"
        yield "device", f"the simulator: {reason}"
        yield from (("missing", remedy) for remedy in place.missing)
        return
    gpu = import_module("dualops.cuda.launch.device").current()
    yield "device", f"{gpu.name}, {gpu.arch}, {gpu.sms} SMs"
    yield "memory on chip", f"L2 {size(gpu.l2_bytes)}, shared memory per block {size(gpu.shared_memory_per_block)}"
    for mix, bytes_a_second in import_module("dualops.cuda.tuning.roof").ceilings().items():
        yield f"ceiling, read:write {mix}", f"{bytes_a_second / 1e12:.2f} TB/s"


def cache() -> Iterator[tuple[str, str]]:
    """Yield the cache folder and the number of its kernels, or why it is not used."""
    cache_module = import_module("dualops.cuda.compiler.cache")
    try:
        kept = cache_module.kernels().values()
        text = f"{len(kept)} kernels, {size(sum(kept))}"
    except OSError as error:
        text = f"not used, {error.strerror}"
    yield "cache", f"{cache_module.folder()}: {text}"


def installed() -> Iterator[tuple[str, str]]:
    """Yield the bundled kernels of each architecture, or why they are not used."""
    architectures = import_module("dualops.cuda.launch.device").ARCHITECTURES
    for arch, text in import_module("dualops.cuda.compiler.bundled").status(tuple(architectures)):
        yield f"kernels, {arch}", text
