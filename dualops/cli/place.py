"""Where the demo runs: on the GPU, in the simulator, or as the NumPy reference."""

from __future__ import annotations

import os
from importlib import import_module

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
    switch = os.environ.get(SWITCH, "0") != "0"
    if wanted == "gpu" and not gpu_answers():
        raise CommandError(
            "no GPU answers: it takes an NVIDIA driver and `pip install dualops[cu13]` (or [cu12]); "
            "--where simulator and --where reference need neither"
        )
    simulate = wanted == "simulator" or (wanted == "auto" and (switch or not gpu_answers()))
    os.environ[SWITCH] = str(int(simulate))
    backend = import_module("dualops.cuda.backend")
    if simulate != backend.SIMULATED:
        raise CommandError(f"Numba was imported before, set otherwise: start a new process for --where {wanted}")
    return "simulator" if simulate else "gpu"


def gpu_answers() -> bool:
    """Whether the driver knows a GPU and numba-cuda can use it.

    `dualops.cuda.backend.where` answers the same, but importing it imports Numba, which then has read its switch.
    """
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError:
        return False
    try:
        if driver.cuInit(0)[0] != driver.CUresult.CUDA_SUCCESS:
            return False
    except RuntimeError:  # no driver library on this machine
        return False
    error, count = driver.cuDeviceGetCount()
    return error == driver.CUresult.CUDA_SUCCESS and count > 0
