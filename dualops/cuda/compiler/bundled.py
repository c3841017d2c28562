"""Kernels that were compiled elsewhere and installed: the package dualops-kernels-sm90a has those for sm_90a.

A package has `index.json` and a file for each kernel, in the format of the cache folder. A file's name is the kernel's
`binaries.fingerprint`: the digest of its sources, its build with its arguments, and the architecture, but of no version
of Numba or of CUDA's compiler. So a kernel is used if its sources equal those of the installed dualops, with any
compiler. A package of another version of dualops is not used. A file is used if its digest is the index's.

`release/kernels.py` makes such packages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from .cache import DAMAGED

INDEX = "index.json"


class Bundle(NamedTuple):
    """The index of a package."""

    folder: Path
    version: str  # of dualops
    digests: dict[str, str]  # SHA-256 of each kernel's file, by the kernel's name


def version() -> str:
    """Return the version of the running dualops."""
    return import_module("dualops").__version__


def package_of(arch: str) -> str:
    """Return the importable name of the package for an architecture."""
    return f"dualops_kernels_{arch.replace('_', '')}"


@cache
def installed(arch: str) -> Bundle | None:
    """Return the package for an architecture, None if missing. Raises ValueError if its index can't be read."""
    spec = find_spec(package_of(arch))
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        found = json.loads((folder / INDEX).read_text("utf-8"))
        return Bundle(
            folder, str(found["dualops"]), {str(name): str(digest) for name, digest in found["kernels"].items()}
        )
    except (OSError, *DAMAGED) as error:
        raise ValueError(f"{folder / INDEX} can't be read: {error}") from None


@cache
def usable(arch: str) -> Bundle | None:
    """Return the package for an architecture if it is of this version of dualops, else None."""
    try:
        found = installed(arch)
    except ValueError:
        return None
    return found if found and found.version == version() else None


def holds(arch: str, name: str) -> bool:
    """Whether a usable package has a kernel of this name."""
    found = usable(arch)
    return found is not None and name in found.digests


def read(arch: str, name: str) -> bytes | None:
    """Return the content of a kernel's file, None if it is missing or its digest is not the index's."""
    found = usable(arch)
    if found is None or name not in found.digests:
        return None
    try:
        content = (found.folder / f"{name}.cubin").read_bytes()
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == found.digests[name] else None


def write(folder: Path, kernels: dict[str, bytes]) -> None:
    """Write files and index of a package of this version, into an existing folder."""
    for name, content in kernels.items():
        (folder / f"{name}.cubin").write_bytes(content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(kernels.items())}
    (folder / INDEX).write_text(json.dumps({"dualops": version(), "kernels": digests}, indent=1), "utf-8")


def status(architectures: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield each installed package's architecture, and its number of kernels or the reason why it is not used."""
    for arch in architectures:
        try:
            found = installed(arch)
        except ValueError as error:
            yield arch, f"not used, {error}"
            continue
        if found and found.version != version():
            yield arch, f"not used, they are of dualops {found.version} and this is {version()}"
        elif found:
            yield arch, f"{len(found.digests)} kernels, {found.folder}"
