"""Cubins on disk: found again, never believed when damaged, and done without where they can't be kept."""

from __future__ import annotations

import multiprocessing
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest

from dualops.cuda import compile as compiler
from dualops.cuda.backend import builds, cuda, f32, kernel, pointer
from dualops.cuda.compile import Binary, binary, cache_dir

ARCH = "sm_90a"


@dataclass(frozen=True)
class Config:
    factor: int


@builds
def build(config, dtype):
    FACTOR = f32(config.factor)

    @kernel(pointer(f32), threads=32)
    def scaled(y):
        y[cuda.threadIdx.x] *= FACTOR

    return scaled


KERNEL = build(Config(3), "float32")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    path = tmp_path / "kept" / "cubins"
    monkeypatch.setenv("DUALOPS_CACHE_DIR", str(path))
    return path


@pytest.fixture
def compilations(monkeypatch):
    """The kernels that are compiled from here on."""
    made, real = [], compiler.compile_kernel

    def compile_kernel(kernel, arch, shared_bytes=0) -> Binary:
        made.append(kernel)
        return real(kernel, arch, shared_bytes)

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    return made


def is_whole(made: Binary) -> bool:
    """Whether a cubin holds its kernel. Two of one kernel differ: Numba counts up in its symbols."""
    return made.cubin[:4] == b"\x7fELF" and made.entry.encode() in made.cubin


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    assert path.suffix == ".cubin"
    return path


def test_the_second_call_reads_the_file(folder, compilations):
    first, second = binary(KERNEL, ARCH), binary(KERNEL, ARCH)
    assert first == second and len(compilations) == 1
    assert only_file(folder).read_bytes().endswith(first.cubin)


def test_the_folder_is_the_owners_alone(folder):
    assert cache_dir() == folder
    binary(KERNEL, ARCH)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(folder).stat().st_mode) & 0o077 == 0


def test_without_the_variable_it_is_the_users_cache(monkeypatch):
    monkeypatch.delenv("DUALOPS_CACHE_DIR", raising=False)
    assert cache_dir().name == "dualops" and cache_dir() != Path("dualops")


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:40],
        lambda whole: whole[:-1],
        lambda whole: whole + b"\0",
        lambda whole: whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:],
        lambda whole: whole[:70] + bytes([whole[70] ^ 1]) + whole[71:],
        lambda whole: b"0" * 64 + whole[64:],
        lambda whole: b"\xff" * len(whole),
    ],
    ids=["empty", "no header", "truncated", "longer", "a bit of the cubin", "a bit of the header", "digest", "other"],
)
def test_a_damaged_file_is_built_anew(folder, compilations, damage):
    first = binary(KERNEL, ARCH)
    path = only_file(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    again = binary(KERNEL, ARCH)
    assert is_whole(again) and len(again.cubin) == len(first.cubin) and len(compilations) == 2
    assert binary(KERNEL, ARCH) == again and len(compilations) == 2  # and kept anew


def test_a_folder_that_can_not_be_made(tmp_path, monkeypatch, compilations):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DUALOPS_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert is_whole(binary(KERNEL, ARCH)) and binary(KERNEL, ARCH) == binary(KERNEL, ARCH)
    assert len(compilations) == 1  # this process keeps it itself


@pytest.mark.parametrize("call", ["replace", "fdopen"])
def test_a_folder_that_can_not_be_written(folder, monkeypatch, compilations, call):
    """By a mocked refusal, since no mode keeps root from writing."""
    folder.mkdir(parents=True)

    def refuse(*_, **__):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(compiler.os, call, refuse)
    assert is_whole(binary(KERNEL, ARCH))
    assert not list(folder.iterdir())  # no half-written file is left


def write_and_read(folder: str) -> int:
    """In a process of its own: keep and read the same cubin, again and again. Returns how often it was whole."""
    os.environ["DUALOPS_CACHE_DIR"] = folder
    made = compiler.compile_kernel(KERNEL, ARCH)
    path = Path(folder) / f"{compiler._key(KERNEL, ARCH, 0)}.cubin"
    whole = 0
    for _ in range(200):
        compiler._keep(path, made)
        found = compiler._read(path)
        whole += found is not None and is_whole(found)
    return whole


def test_concurrent_writers(folder):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.map_async(write_and_read, [str(folder)] * 3).get(timeout=120) == [200] * 3
    assert only_file(folder)
    assert is_whole(binary(KERNEL, ARCH))


# --- the key -----------------------------------------------------------------------------------------


def key(config=Config(3), dtype="float32", arch=ARCH, shared_bytes=0) -> str:
    return compiler._key(build(config, dtype), arch, shared_bytes)


def test_the_key_names_everything_that_a_cubin_depends_on(monkeypatch):
    assert key() == key()
    keys = {key(), key(config=Config(4)), key(dtype="float64"), key(arch="sm_80"), key(shared_bytes=16)}
    monkeypatch.setattr(compiler, "_sources", lambda: "other")
    keys.add(key())
    monkeypatch.setattr(compiler, "_versions", lambda: "other")
    keys.add(key())
    assert len(keys) == 7


def test_the_sources_are_all_of_dualops_cuda(monkeypatch, tmp_path):
    package = tmp_path / "cuda"
    (package / "tile").mkdir(parents=True)
    (package / "compile.py").write_text("a = 1\n")
    (package / "tile" / "rows.py").write_text("b = 1\n")
    monkeypatch.setattr(compiler, "__file__", str(package / "compile.py"))
    digests = set()
    for path, text in (
        ("compile.py", "a = 1\n"),
        ("compile.py", "a = 2\n"),
        ("tile/rows.py", "b = 2\n"),
        ("new.py", ""),
    ):
        (package / path).write_text(text)
        digests.add(compiler._sources.__wrapped__())
    assert len(digests) == 4


def test_the_versions_are_those_installed():
    told = compiler._versions()
    for name in ("numba ", "llvmlite ", "numba-cuda ", "nvidia-nvjitlink "):
        assert any(line.startswith(name) for line in told.splitlines()), told


def test_a_kernel_that_no_build_made_has_no_key():
    @kernel(pointer(f32), threads=32)
    def loose(y):
        y[0] = f32(0)

    with pytest.raises(ValueError, match="loose was made outside a function under @builds"):
        binary(loose, ARCH)
