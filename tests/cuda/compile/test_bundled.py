"""A wheel of compiled kernels: built, installed, used without a compiler, and not used where it does not belong."""

import json
import zipfile
from pathlib import Path

import pytest

from dualops import __version__
from dualops.cuda.compiler import binaries, bundled, offline
from dualops.cuda.launch import device
from release import kernels
from tests.cuda.compile.small import ARCH, build
from tests.processes import printed, python_path

PROBLEM = "softmax x=64x256:float32"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder that the wheel of a problem's kernels is installed in."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = kernels.build_wheel(kernels.compiled([PROBLEM], ARCH, 1), ARCH, folder)
    assert wheel.name == f"dualops_kernels_sm90a-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        assert f"Requires-Dist: dualops=={__version__}" in archive.read(metadata).decode()
    return folder / "site"


CALLED = """
import json, sys
import dualops.cuda
imported = set(sys.modules)
import cuda.core
from dualops.cuda.compiler import binaries, offline
from dualops.cuda.launch import device, step

class Loaded:  # what cuda.core would load into a GPU
    from_cubin = classmethod(lambda cls, cubin: cls())
    from_ltoir = staticmethod(cuda.core.ObjectCode.from_ltoir)
    get_kernel = lambda self, entry: entry

cuda.core.ObjectCode = Loaded
wanted = offline.to_warm([{problem!r}], device.every({arch!r}))
binaries.ahead(wanted)
found = [step.load(*each)[0] for each in wanted]
maps = open("/proc/self/maps").read()
compilers = [name for name in ("libnvvm", "libnvJitLink", "libnvrtc") if name in maps]
roots = ("numba", "llvmlite", "dualops.cuda.compiler.frontend")
modules = [name for name in set(sys.modules) - imported if name.startswith(roots)]
print(json.dumps([found, compilers, modules]))
"""


def run(site: Path, cache: Path, script: str) -> str:
    return printed("-c", script, PYTHONPATH=python_path(str(site)), DUALOPS_CACHE_DIR=str(cache))


def test_its_kernels_need_no_compiler(site, tmp_path):
    """In a fresh process with an empty cache, which stays empty."""
    found, compilers, modules = json.loads(run(site, tmp_path / "cache", CALLED.format(problem=PROBLEM, arch=ARCH)))
    assert len(found) == len(offline.to_warm([PROBLEM], device.every(ARCH)))
    assert (compilers, modules) == ([], []), "none but what `import dualops.cuda` has imported"
    assert not (tmp_path / "cache").exists()


def test_other_kernels_are_compiled(site, tmp_path):
    other = "softmax x=64x256:float16"
    found, compilers, modules = json.loads(run(site, tmp_path / "cache", CALLED.format(problem=other, arch=ARCH)))
    assert compilers and "numba.cuda.cudaimpl" in modules
    assert len(list((tmp_path / "cache").iterdir())) == len(found) > 0


def test_the_name_of_a_kernel_does_not_depend_on_the_compiler(monkeypatch):
    before, key = binaries.fingerprint(build(3), ARCH, 0), binaries._key(build(3), ARCH, 0)
    monkeypatch.setattr(binaries, "_versions", lambda: "another Numba")
    assert binaries.fingerprint(build(3), ARCH, 0) == before and binaries._key(build(3), ARCH, 0) != key


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of an installed package with one kernel, "name"."""
    folder = tmp_path / bundled.package_of(ARCH)
    folder.mkdir()
    (folder / "__init__.py").touch()
    bundled.write(folder, {"name": b"content"})
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield folder
    forget()


def forget() -> None:
    bundled.installed.cache_clear()
    bundled.usable.cache_clear()


def test_a_package_of_this_version(package):
    assert bundled.holds(ARCH, "name") and bundled.read(ARCH, "name") == b"content"
    assert not bundled.holds(ARCH, "other") and bundled.read(ARCH, "other") is None
    assert list(bundled.status(("sm_80", ARCH))) == [(ARCH, f"1 kernels, {package}")]


def test_a_file_that_is_not_the_one_of_the_index(package):
    (package / "name.cubin").write_bytes(b"other")
    assert bundled.read(ARCH, "name") is None
    (package / "name.cubin").unlink()
    assert bundled.read(ARCH, "name") is None


def test_a_package_of_another_version(package, monkeypatch):
    monkeypatch.setattr(bundled, "version", lambda: "9.0")
    assert not bundled.holds(ARCH, "name") and bundled.read(ARCH, "name") is None
    assert list(bundled.status((ARCH,))) == [(ARCH, f"not used, they are of dualops {__version__} and this is 9.0")]


@pytest.mark.parametrize("index", [None, "", "[]", "{}", '{"dualops": "0.1.0", "kernels": 3}'])
def test_a_package_without_a_proper_index(package, index):
    (package / bundled.INDEX).unlink() if index is None else (package / bundled.INDEX).write_text(index)
    assert not bundled.holds(ARCH, "name")
    ((arch, status),) = bundled.status((ARCH,))
    assert arch == ARCH and status.startswith(f"not used, {package / bundled.INDEX} can't be read: ")


def test_the_usual_problems_can_be_read():
    """Each is a problem that has kernels on each architecture that wheels are made for."""
    for arch in device.ARCHITECTURES:
        assert len(offline.to_warm(kernels.usual(), device.every(arch))) > 200


def test_info_says_what_is_installed(site, tmp_path):
    script = "import runpy, sys; sys.argv[1:] = ['info']; runpy.run_module('dualops', run_name='__main__')"
    output = run(site, tmp_path, script)
    count = len(offline.to_warm([PROBLEM], device.every(ARCH)))
    assert f"kernels, sm_90a {count} kernels, /" in " ".join(output.split())
