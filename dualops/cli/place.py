"""Where the demo runs: on the GPU, in the simulator, or as the NumPy reference."""

from __future__ import annotations

import os
from importlib import import_module

from ..machine import missing
from .errors import CommandError

SWITCH = "NUMBA_ENABLE_CUDASIM"
PLACES = ("auto", "gpu", "simulator", "reference")


def choose(wanted: str) -> str:
    """ "gpu", "simulator" or "reference" for one of `PLACES`; sets Numba's switch, so call it before Numba is imported.

    "auto" is the simulator if the switch is set, else the GPU if there is one, else the simulator.
    Raises CommandError where `wanted` is not to be had.
    """
    if wanted == "reference":
        return wanted
    simulate = wanted == "simulator" or (wanted == "auto" and is_switched())
    if not simulate and (told := missing()):
        if wanted == "gpu":
            raise CommandError(f"{' '.join(told)} --where simulator and --where reference need no GPU.")
        simulate = True
    os.environ[SWITCH] = str(int(simulate))
    backend = import_module("dualops.cuda.backend")
    if simulate != backend.SIMULATED:
        raise CommandError(f"Numba was imported before, set otherwise: start a new process for --where {wanted}")
    return "simulator" if simulate else "gpu"


def is_switched() -> bool:
    """Whether the environment asks for the simulator."""
    return os.environ.get(SWITCH, "0") != "0"
