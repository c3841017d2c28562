"""The user's arrays in .npz files: a problem out of one, results into one."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..spec import ArrayMeta
from ..spec.base import Input, Role
from ..spec.meta import numpy_dtype
from .errors import CommandError
from .problems import Arrays, Job, Task, shape_of


def user_job(task: Task, path: Path, params: Mapping[str, Any], dtype: str | None) -> Job:
    """The problem that the arrays of an .npz file state: its keys are the spec's input names."""
    arrays = read_npz(path, task, dtype)
    try:
        problem = task.bind({name: ArrayMeta.of_numpy(array) for name, array in arrays.items()}, params)
        if task.spec.values:
            task.spec.values(task.name, arrays, problem)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CommandError(f"{path}: {error}") from None
    return Job(task, path.name, problem, params, lambda: arrays)


def read_npz(path: Path, task: Task, dtype: str | None) -> Arrays:
    """The inputs of `task` from an .npz file, in the order of the spec, for a problem of `dtype` if one is given.

    .npy has no bfloat16: with dtype "bfloat16" arrays of uint16 are taken as the bits of bfloat16 numbers. Other floats
    are rounded to what the problem has them in. Raises CommandError for a file that can't be read, a missing or a
    superfluous array.
    """
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise CommandError(f"{path} holds a single array, expected an .npz file with {_wanted(task)}")
        with file:
            arrays = {name: file[name] for name in file.files}
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        raise CommandError(f"{path} is no .npz file of plain arrays, expected one with {_wanted(task)}") from None
    missing = [given.name for given in task.inputs if given.name not in arrays and not given.optional]
    superfluous = sorted(arrays.keys() - {given.name for given in task.inputs})
    if missing or superfluous:
        raise CommandError(f"{path} has the arrays {', '.join(arrays) or '(none)'}, expected {_wanted(task)}")
    given_arrays = [(given, arrays[given.name]) for given in task.inputs if given.name in arrays]
    return {given.name: _in_dtype(array, given, dtype).copy(order="C") for given, array in given_arrays}


def _wanted(task: Task) -> str:
    return ", ".join(f"{given.name} (optional)" if given.optional else given.name for given in task.inputs)


def _in_dtype(array: np.ndarray, given: Input, dtype: str | None) -> np.ndarray:
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if dtype is None or given.role is Role.OTHER:
        return array
    if dtype == "bfloat16" and array.dtype in (np.dtype(np.uint16), np.dtype("V2")):
        return array.view(numpy_dtype("bfloat16"))
    return array.astype(numpy_dtype(given.dtype_for(dtype))) if array.dtype.kind == "f" else array


def contents(results: Arrays) -> str:
    """What `write_npz` writes: "o 1×2×20×16 float32, lse 1×2×20 float32"."""
    bits = numpy_dtype("bfloat16")
    dtypes = {name: "bfloat16 as uint16" if x.dtype == bits else str(x.dtype) for name, x in results.items()}
    return ", ".join(f"{name} {shape_of(x.shape)} {dtypes[name]}" for name, x in results.items())


def write_npz(path: Path, results: Arrays) -> None:
    """Save results by their names in the spec; bfloat16 as the uint16 of its bits, for .npy has no bfloat16."""
    plain: dict[str, Any] = {
        name: x.view(np.uint16) if x.dtype == numpy_dtype("bfloat16") else x for name, x in results.items()
    }
    try:
        with path.open("wb") as file:  # by name alone, savez would add a suffix
            np.savez(file, **plain)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None
