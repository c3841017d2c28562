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
        """Keep a call, unless its arrays are lists, or it has a function that another process can't be given."""
        arrays = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
        if any(isinstance(value, list) for value in given.values()):
            return
        host = {entry.name for entry in (*spec.inputs, *spec.gradient_inputs) if entry.host}
        metas = {}
        for name, array in arrays.items():
            meta = ArrayMeta.of_numpy(array)
            meta = meta._replace(device="cuda:0", pointer=meta.pointer % 16)
            metas[name] = meta._replace(device="host", pointer=0) if name in host and not array.ndim else meta
        params = {name: value for name, value in given.items() if name not in arrays}
        call = Call(spec.name, backward, metas, params)
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
