"""The user's arrays in .npz files: read a problem from one, write results to one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..spec import ArrayMeta
from ..spec.base import Input, Role
from ..spec.meta import contiguous_strides, numpy_dtype
from .errors import CommandError
from .npz import BadFile, Header, Npz
from .problems import Arrays, Job, Task, shape_of
from .report import size

MOST_NAMES = 20  # most names of a file's arrays in a message
# dtypes that may hold the bits of bfloat16 numbers
BITS = (np.dtype(np.uint16), np.dtype("<u2"), np.dtype(">u2"), np.dtype("V2"))


def user_job(task: Task, path: Path, params: Mapping[str, Any], dtype: str | None) -> Job:
    """Read the problem that the arrays of an .npz file state: its keys are the spec's input names.

    .npy has no bfloat16: with dtype "bfloat16", arrays of uint16 are read as bfloat16 bits. Other floats are rounded to
    the dtype that the problem needs. Names, dtypes, shapes and sizes are checked before anything is decompressed.
    Raises CommandError for an unreadable file, a missing or superfluous array, a wrong problem, and arrays larger than
    this machine's memory.
    """
    try:
        with Npz(path) as file:
            inputs = _inputs(file, path, task)
            headers = {given.name: file.header(given.name) for given in inputs}
            dtypes = {given.name: _taken(headers[given.name].dtype, given, dtype) for given in inputs}
            problem = task.bind({name: _meta(header.shape, dtypes[name]) for name, header in headers.items()}, params)
            _check_memory(headers)
            arrays = {given.name: _as_taken(file.read(given.name), dtypes[given.name]) for given in inputs}
        if task.spec.values:
            task.spec.values(task.name, arrays, problem)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None
    except BadFile as error:
        raise CommandError(
            f"{path} is no .npz file of plain arrays, expected one with {_wanted(task)}: it {error}"
        ) from None
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CommandError(f"{path}: {error}") from None
    return Job(task, path.name, problem, params, lambda: arrays)


def _inputs(file: Npz, path: Path, task: Task) -> list[Input]:
    """Return the inputs in the file, in the spec's order. Raises CommandError if one is missing or superfluous."""
    missing = [given.name for given in task.inputs if given.name not in file.members and not given.optional]
    superfluous = file.members.keys() - {given.name for given in task.inputs}
    if missing or superfluous:
        raise CommandError(f"{path} has the arrays {_listed(file.members)}, expected {_wanted(task)}")
    return [given for given in task.inputs if given.name in file.members]


def _listed(names: Iterable[str]) -> str:
    """List the first names on one line, escaped."""
    listed = [ascii(name)[1:-1][:40] for name in names]
    return ", ".join(listed[:MOST_NAMES]) + (", ..." if len(listed) > MOST_NAMES else "") or "(none)"


def _wanted(task: Task) -> str:
    return ", ".join(f"{given.name} (optional)" if given.optional else given.name for given in task.inputs)


def _meta(shape: tuple[int, ...], dtype: np.dtype) -> ArrayMeta:
    return ArrayMeta(shape, dtype.name, contiguous_strides(shape), "cpu", 0)


def _check_memory(headers: Mapping[str, Header]) -> None:
    """Raise ValueError for arrays that are larger than this machine's memory."""
    needed, available = sum(header.nbytes for header in headers.values()), physical_memory()
    if available is not None and needed > available:
        raise ValueError(f"its arrays have {size(needed)}, this machine has {size(available)} of memory")


def physical_memory() -> int | None:
    """Return the machine's memory in bytes; None if the system does not report it."""
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    found = [os.sysconf(name) for name in names] if {*names} <= {*getattr(os, "sysconf_names", {})} else [-1]
    return prod(found) if min(found) > 0 else None


def _taken(own: np.dtype, given: Input, dtype: str | None) -> np.dtype:
    """Return the dtype in which the problem uses an array of the file."""
    if dtype is None or given.role is Role.OTHER:
        return own.newbyteorder("=")
    if dtype == "bfloat16" and own in BITS:
        return numpy_dtype("bfloat16")
    return numpy_dtype(given.dtype_for(dtype)) if own.kind == "f" else own.newbyteorder("=")


def _as_taken(array: np.ndarray, taken: np.dtype) -> np.ndarray:
    """Return a row-major copy in that dtype."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype in BITS and taken == numpy_dtype("bfloat16"):
        array = array.view(taken)
    with np.errstate(over="ignore"):  # a number that is too large becomes infinity
        return array.astype(taken, order="C")


def contents(results: Arrays) -> str:
    """Describe what `write_npz` writes: "o 1×2×20×16 float32, lse 1×2×20 float32"."""
    bits = numpy_dtype("bfloat16")
    dtypes = {name: "bfloat16 as uint16" if x.dtype == bits else str(x.dtype) for name, x in results.items()}
    return ", ".join(f"{name} {shape_of(x.shape)} {dtypes[name]}" for name, x in results.items())


def same_file(one: Path, other: Path) -> bool:
    """Whether both paths lead to the same existing file, through any links and names."""
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist
        return False


def write_npz(path: Path, results: Arrays) -> None:
    """Save results under their names in the spec. bfloat16 is saved as uint16 bits, since .npy has no bfloat16."""
    plain: dict[str, Any] = {
        name: x.view(np.uint16) if x.dtype == numpy_dtype("bfloat16") else x for name, x in results.items()
    }
    try:
        with path.open("wb") as file:  # given a file name, savez would add a suffix
            np.savez(file, **plain)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None
