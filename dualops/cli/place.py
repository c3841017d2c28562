"""Where the demo runs: on the GPU, in the simulator, or as the NumPy reference."""

from __future__ import annotations

import os
from importlib import import_module
from typing import NamedTuple

from ..machine import missing
from .errors import CommandError

SWITCH = "NUMBA_ENABLE_CUDASIM"
PLACES = ("auto", "gpu", "simulator", "reference")


class Place(NamedTuple):
    """ "gpu", "simulator" or "reference". If nobody asked for the simulator, also what is missing for a GPU."""

    name: str
    missing: tuple[str, ...] = ()


def choose(wanted: str) -> Place:
    """Choose one of `PLACES` and set Numba's switch; call it before Numba is imported.

    "auto" is the simulator if the switch is set, else the GPU if there is one, else the simulator.
    Raises CommandError if the `wanted` place is unavailable.
    """
    if wanted == "reference":
        return Place(wanted)
    simulate = wanted == "simulator" or (wanted == "auto" and os.environ.get(SWITCH, "0") != "0")
    lacking = () if simulate else missing()
    if wanted == "gpu" and lacking:
        raise CommandError(f"{' '.join(lacking)} --where simulator and --where reference need no GPU.")
    simulate = simulate or bool(lacking)
    os.environ[SWITCH] = str(int(simulate))
    backend = import_module("dualops.cuda.compiler.backend")
    if simulate != backend.SIMULATED:
        raise CommandError(f"Numba was imported before, set otherwise: start a new process for --where {wanted}")
    return Place("simulator" if simulate else "gpu", lacking)
