"""What this machine lacks to run kernels on a GPU: driver, GPU, packages.

This module works without the packages that may be missing, and names a remedy for each. It imports neither Numba nor
anything of CUDA: the command line calls it before it chooses where kernels run.
"""

from __future__ import annotations

import ctypes
import os
import platform
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

LIBRARY = "libcuda.so.1"  # part of the driver, not of any package
PACKAGES = {"numba-cuda": "numba_cuda", "cuda-core": "cuda.core", "cuda-bindings": "cuda.bindings"}  # package -> module
NEWEST, OLDEST = 13, 12  # CUDA's major versions with an extra
FIRST_DRIVERS = {13: 580, 12: 525}  # the first driver versions that support them
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
CONTAINERS = "a container has the host's if it is started with --gpus all"


class Driver(NamedTuple):
    """State of the NVIDIA driver."""

    found: bool = False
    version: int = 0  # the CUDA version that it supports: 13000 is 13.0
    error: int = 0  # the error code of cuInit; 0 is success
    reason: str = ""  # the error as text
    gpus: int = 0

    @property
    def major(self) -> int:
        return self.version // 1000

    def __str__(self) -> str:
        """Return the CUDA version that the driver supports: "CUDA 13.0"."""
        return f"CUDA {self.major}.{self.version % 1000 // 10}" if self.found else "not found"


def missing() -> tuple[str, ...]:
    """Return what is missing to run kernels on a GPU of this machine, each with its remedy; () if nothing is
    missing."""
    if platform.system() != "Linux":
        return (f"CUDA needs Linux, this is {platform.system()}.",)
    driver = ask_driver()
    found = (_of_driver(driver), _of_gpus(driver), _of_packages(driver), _of_versions(driver))
    return tuple(filter(None, found))


def ask_driver() -> Driver:
    """Start the driver, if there is one, and query its GPUs."""
    try:
        library = _load()
    except OSError:
        return Driver()
    version, gpus, reason = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
    library.cuDriverGetVersion(ctypes.byref(version))
    if error := library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(gpus)):
        library.cuGetErrorString(error, ctypes.byref(reason))
        return Driver(True, version.value, error, (reason.value or b"unknown error").decode())
    return Driver(True, version.value, gpus=gpus.value)


def _load() -> Any:
    return ctypes.CDLL(LIBRARY)


def _of_driver(driver: Driver) -> str:
    if not driver.found:
        return (
            f"There is no NVIDIA driver ({LIBRARY}): install one ({FIRST_DRIVERS[NEWEST]} or newer for CUDA {NEWEST}, "
            f"{FIRST_DRIVERS[OLDEST]} or newer for CUDA {OLDEST}); {CONTAINERS}."
        )
    if driver.error and driver.error != NO_DEVICE:
        return (
            f"The NVIDIA driver does not start: {driver.reason} (error {driver.error}). See what `nvidia-smi` says; "
            "after an update of the driver the machine has to be restarted."
        )
    return ""


def _of_gpus(driver: Driver) -> str:
    if not driver.found or driver.gpus or driver.error not in (0, NO_DEVICE):
        return ""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return (
            f"CUDA_VISIBLE_DEVICES is {visible!r} and leaves no GPU to be seen: unset it, or name one that "
            "`nvidia-smi --list-gpus` has."
        )
    return f"The NVIDIA driver finds no GPU: see what `nvidia-smi --list-gpus` says; {CONTAINERS}."


def _of_packages(driver: Driver) -> str:
    absent = [package for package, module in PACKAGES.items() if not _is_there(module)]
    if not absent:
        return ""
    problem = f"{' and '.join(absent[:2])} {'are' if len(absent) > 1 else 'is'} not installed"
    if not driver.found:
        older = f"with a driver older than {FIRST_DRIVERS[NEWEST]} cu{OLDEST} in place of cu{NEWEST}"
        return f"{problem}: {install_command(NEWEST)} ({older})."
    return f"{problem}: {install_command(max(OLDEST, min(NEWEST, driver.major)))}."


def _of_versions(driver: Driver) -> str:
    """Explain if the packages' CUDA is newer than the driver's."""
    wheels = _major_of_packages()
    if not driver.version or driver.major >= (wheels or OLDEST):
        return ""
    needs = f"update it to {FIRST_DRIVERS.get(wheels, FIRST_DRIVERS[OLDEST])} or newer"
    if not wheels:
        return f"The NVIDIA driver is too old: it knows {driver}, dualops needs CUDA {OLDEST}: {needs}."
    other = f", or {install_command(driver.major)}" if driver.major >= OLDEST else ""
    return f"The NVIDIA driver is too old: it knows {driver}, the packages are for CUDA {wheels}: {needs}{other}."


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _major_of_packages() -> int:
    """Return CUDA's major version of the installed packages; 0 without them."""
    try:
        return int(metadata.version("cuda-bindings").partition(".")[0])
    except (metadata.PackageNotFoundError, ValueError):
        return 0


def install_command(major: int) -> str:
    """Return the pip command for the packages of the extra cu12 or cu13, wherever this dualops came from."""
    extra = f"cu{major}"
    try:
        every = metadata.requires("dualops") or []
    except metadata.PackageNotFoundError:  # a clone on the path
        return f"pip install '{Path(__file__).parents[1]}[{extra}]'"
    wanted = [requirement.partition(";")[0].strip() for requirement in every if f'extra == "{extra}"' in requirement]
    return "pip install " + " ".join(f"'{requirement}'" for requirement in wanted)
