"""What the bridge asks of the CPU it asks of a GPU too: calls are kept, so that kernels can be compiled before.

    DUALOPS_TEST_CALLS=folder python -m pytest tests/torch_bridge

leaves files there that `tests.cuda.gpu.warm` reads.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dualops import reference
from dualops.spec import OPERATORS, ArrayMeta, Spec
from tests.cuda.calls import Call


class Recorder:
    """The calls that reached the reference by way of `dualops.torch_bridge`, each once."""

    def __init__(self) -> None:
        self.calls: dict[str, bytes] = {}

    def watch(self) -> None:
        """From now on, for what imports the reference's functions from now on."""
        for name, spec in OPERATORS.items():
            for backward in (False, True):
                word = f"{name}_backward" if backward else name
                if hasattr(reference, word):
                    setattr(reference, word, self.noting(spec, backward, getattr(reference, word)))

    def noting(self, spec: Spec, backward: bool, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls from the bridge are kept."""

        def noted(*args: Any, **given: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("dualops.torch_bridge") and not args:
                self.note(spec, backward, given)
            return function(*args, **given)

        return noted

    def note(self, spec: Spec, backward: bool, given: dict[str, Any]) -> None:
        """Keep a call, unless its arrays are lists, or it has a function that another process can't be given.

        A number stays on the host: few tests have a seed on the GPU.
        """
        if any(isinstance(value, list) for value in given.values()):
            return
        numbers = {entry.name for entry in spec.inputs if entry.host}
        metas = {
            name: _placed(value, "host" if name in numbers else "cuda:0")
            for name, value in given.items()
            if isinstance(value, np.ndarray)
        }
        call = Call(spec.name, backward, metas, {name: value for name, value in given.items() if name not in metas})
        if (told := repr(call)) not in self.calls:
            try:
                self.calls[told] = pickle.dumps(call)
            except (pickle.PicklingError, AttributeError, TypeError):
                self.calls[told] = b""

    def write(self, folder: Path) -> None:
        """Leave the calls in a file of this process."""
        folder.mkdir(parents=True, exist_ok=True)
        calls = [pickle.loads(kept) for kept in self.calls.values() if kept]
        (folder / f"{os.getpid()}.calls").write_bytes(pickle.dumps(calls))


def _placed(array: np.ndarray, where: str) -> ArrayMeta:
    """The same array elsewhere, as far off a multiple of 16 bytes."""
    meta = ArrayMeta.of_numpy(array)
    return meta._replace(device=where, pointer=meta.pointer % 16)
