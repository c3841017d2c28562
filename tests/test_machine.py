"""What kernels need and a machine lacks: drivers that answer this and that, packages that are installed or not."""

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dualops import machine
from dualops.machine import PACKAGES, Driver, ask_driver, missing
from tests.processes import printed

STRINGS = {100: b"no CUDA-capable device is detected", 803: b"system has unsupported driver combination"}


class Library:
    """The driver's library: its answers."""

    def __init__(self, version: int = 13000, init: int = 0, gpus: int = 1, count: int = 0):
        self.version, self.init, self.gpus, self.count = version, init, gpus, count

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self.init

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, gpus: Any) -> int:
        gpus._obj.value = self.gpus
        return self.count

    def cuGetErrorString(self, error: int, text: Any) -> int:
        text._obj.value = STRINGS.get(error)
        return 0 if error in STRINGS else 1


class Machine:
    """A Linux machine that lacks nothing, until a test takes something from it."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.patch = patch
        patch.setattr(machine.platform, "system", lambda: "Linux")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.driver(Library())
        self.packages(*PACKAGES, cuda=13)

    def driver(self, library: Library | None) -> None:
        def load() -> Library:
            if library is None:
                raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")
            return library

        self.patch.setattr(machine, "_load", load)

    def packages(self, *there: str, cuda: int = 0) -> None:
        """The packages that are installed, for which CUDA."""

        def version(name: str) -> str:
            if not cuda:
                raise metadata.PackageNotFoundError(name)
            return f"{cuda}.1.0"

        def is_there(module: str) -> bool:
            return any(PACKAGES[name] == module for name in there)

        self.patch.setattr(machine, "_is_there", is_there)
        self.patch.setattr(machine.metadata, "version", version)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def only() -> str:
    (message,) = missing()
    return message


def test_nothing_is_missing(here):
    assert missing() == ()
    assert ask_driver() == Driver(True, 13000, 0, "", 1) and str(ask_driver()) == "CUDA 13.0"


def test_another_system(here):
    here.patch.setattr(machine.platform, "system", lambda: "Darwin")
    here.driver(None)
    here.packages()
    assert missing() == ("CUDA needs Linux, this is Darwin.",)


def test_no_driver(here):
    here.driver(None)
    assert only().startswith("There is no NVIDIA driver (libcuda.so.1): install one (580 or newer for CUDA 13, ")
    assert str(ask_driver()) == "not found"


@pytest.mark.parametrize("library", [Library(init=100), Library(gpus=0), Library(count=100)])
def test_no_gpu(here, library):
    here.driver(library)
    assert only().startswith("The NVIDIA driver finds no GPU: see what `nvidia-smi --list-gpus` says; ")
    here.patch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert only().startswith("CUDA_VISIBLE_DEVICES is '' and leaves no GPU to be seen: unset it, or name one ")
    here.patch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert only().startswith("CUDA_VISIBLE_DEVICES is '7' and leaves no GPU to be seen")


def test_a_gpu_among_those_that_are_visible(here):
    here.patch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert missing() == ()


def test_a_driver_that_does_not_start(here):
    here.driver(Library(init=803))
    assert only().startswith("The NVIDIA driver does not start: system has unsupported driver combination (error 803)")
    here.driver(Library(init=12345))
    assert only().startswith("The NVIDIA driver does not start: unknown error (error 12345). ")


@pytest.mark.parametrize(("version", "extra"), [(14000, "cu13"), (13000, "cu13"), (12080, "cu12")])
def test_no_packages(here, version, extra):
    here.packages()
    here.driver(Library(version))
    assert only() == f"numba-cuda and cuda-core are not installed: {machine.install_command(int(extra[2:]))}."
    assert f"numba-cuda[{extra}]" in only() or f"[{extra}]'" in only()


def test_bindings_that_torch_brought_are_not_enough(here):
    here.packages("cuda-bindings", cuda=13)
    assert only().startswith("numba-cuda and cuda-core are not installed: pip install '")
    here.packages("cuda-bindings", "cuda-core", cuda=13)
    assert only().startswith("numba-cuda is not installed: pip install '")


def test_neither_driver_nor_packages(here):
    here.driver(None)
    here.packages()
    driver, packages = missing()
    assert driver.startswith("There is no NVIDIA driver")
    assert packages.startswith("numba-cuda and cuda-core are not installed: pip install '")
    assert packages.endswith(" (with a driver older than 580 cu12 in place of cu13).")


def test_a_driver_that_is_too_old(here):
    here.driver(Library(12040))
    message = (
        "The NVIDIA driver is too old: it knows CUDA 12.4, the packages are for CUDA 13: update it to 580 or newer"
    )
    assert only() == f"{message}, or {machine.install_command(12)}."
    here.driver(Library(11080))
    message = (
        "The NVIDIA driver is too old: it knows CUDA 11.8, the packages are for CUDA 13: update it to 580 or newer."
    )
    assert only() == message
    here.packages()
    message = "The NVIDIA driver is too old: it knows CUDA 11.8, dualops needs CUDA 12: update it to 525 or newer."
    assert missing() == (f"numba-cuda and cuda-core are not installed: {machine.install_command(12)}.", message)


def test_a_newer_driver_than_the_packages_need(here):
    here.packages(*PACKAGES, cuda=12)
    assert missing() == ()


def test_the_command_has_what_the_extra_asks_for(monkeypatch):
    wanted = ["numpy>=2", 'numba-cuda[cu13]<0.31,>=0.30; extra == "cu13"', 'numba-cuda[cu12]; extra == "cu12"']
    monkeypatch.setattr(machine.metadata, "requires", lambda name: wanted)
    assert machine.install_command(13) == "pip install 'numba-cuda[cu13]<0.31,>=0.30'"


def test_the_command_names_a_clone_that_is_not_installed(monkeypatch):
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.metadata, "requires", requires)
    root = Path(machine.__file__).parents[1]
    assert (root / "pyproject.toml").exists()
    assert machine.install_command(12) == f"pip install '{root}[cu12]'"


def test_every_extra_that_is_named_is_there():
    pyproject = (Path(machine.__file__).parents[1] / "pyproject.toml").read_text()
    for major in machine.FIRST_DRIVERS:
        assert f"\ncu{major} = " in pyproject


def test_packages_are_looked_for_without_being_imported():
    code = "import sys; from dualops.machine import missing; missing(); print({'numba', 'torch'} & {*sys.modules})"
    assert printed("-c", code) == "set()\n"


def test_packages_of_a_package_that_is_not_there():
    assert machine._is_there("json.decoder")
    assert not machine._is_there("no_such_package") and not machine._is_there("no_such_package.part")
