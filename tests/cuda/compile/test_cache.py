"""Cubins on disk: found again, never believed when damaged, and done without where they can't be kept."""

import json
import multiprocessing
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import dualops
from dualops.cuda.compiler import binaries, cache, compile as compiler, sources
from dualops.cuda.compiler.backend import builds, cuda, f32, kernel, pointer
from dualops.cuda.compiler.binaries import Wanted, binary, build_all
from dualops.cuda.compiler.compile import Binary
from tests.cuda.compile.installed import as_bytecode, zipped
from tests.cuda.compile.small import run

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
    made, real = [], binaries.compile_kernel

    def compile_kernel(kernel, arch, shared_bytes=0) -> Binary:
        made.append(kernel)
        return real(kernel, arch, shared_bytes)

    monkeypatch.setattr(binaries, "compile_kernel", compile_kernel)
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


def test_a_damaged_file_is_built_again(folder, compilations):
    """`test_cache_folder` has every kind of damage."""
    first = binary(KERNEL, ARCH)
    path = only_file(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    again = binary(KERNEL, ARCH)
    assert is_whole(again) and len(again.cubin) == len(first.cubin) and len(compilations) == 2
    assert binary(KERNEL, ARCH) == again and len(compilations) == 2  # and written again


FIELDS = compiler.Report("n", "sm_90a", 1, 0, 0, 0, 0, 3, ("a",), True, 0.5)


def header(entry='"e"', **fields) -> bytes:
    """As a cubin's file has it, with other JSON for a field."""
    values = {name: json.dumps(value) for name, value in vars(FIELDS).items()} | fields
    report = ", ".join(f'"{name}": {value}' for name, value in values.items())
    return f'{{"entry": {entry}, "report": {{{report}}}}}'.encode()


def test_headers_are_read(folder):
    path = folder / "key.cubin"
    cache.write(path, header() + b"\ncubin")
    assert binaries._read(path) == Binary("e", b"cubin", FIELDS)


@pytest.mark.parametrize(
    "crafted",
    [
        b"",
        b"[" * 100_000,
        b"[]",
        b"5",
        b'{"entry": "e", "report": [1]}',
        header(entry="5"),
        header(entry='"\\ud800"'),
        header(name='"\\ud800"'),
        header(arch="null"),
        header(registers="1e999"),
        header(registers="true"),
        header(registers="1" + "0" * 5000),
        header(complaints='"text"', arch="1"),
        header(complaints="[1]"),
        header(complaints='["\\ud800"]'),
        header(complaints="1"),
        header(allowed="1"),
        header(more="1"),
    ],
)
def test_a_crafted_header_is_built_again(folder, compilations, crafted):
    path = folder / f"{binaries._key(KERNEL, ARCH, 0)}.cubin"
    cache.write(path, crafted + b"\ncubin")
    assert binaries._read(path) is None
    assert is_whole(binary(KERNEL, ARCH)) and len(compilations) == 1


def test_building_ahead_of_time_without_a_disk_is_an_error(tmp_path, monkeypatch, compilations):
    """A kernel that a call has built and could not keep is written when there is room."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DUALOPS_CACHE_DIR", str(tmp_path / "file" / "below"))
    binary(KERNEL, ARCH)
    assert len(list(build_all([Wanted(KERNEL, ARCH)]))) == 1  # whose caller needs no more than the report
    with pytest.raises(NotADirectoryError):
        list(build_all([Wanted(KERNEL, ARCH)], must_keep=True))
    (tmp_path / "file").unlink()
    assert len(list(build_all([Wanted(KERNEL, ARCH)], must_keep=True))) == 1
    assert only_file(tmp_path / "file" / "below") and len(compilations) == 1


@pytest.mark.parametrize("call", ["replace", "open"])
def test_a_folder_that_can_not_be_written(folder, monkeypatch, compilations, call):
    """By a mocked refusal, since no mode keeps root from writing."""
    folder.mkdir(parents=True)

    def refuse(*_, **__):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(cache.os, call, refuse)
    assert is_whole(binary(KERNEL, ARCH))
    assert not list(folder.iterdir())  # no half-written file is left


def write_and_read(folder: str) -> int:
    """In a process of its own: keep and read the same cubin, again and again. Returns how often it was whole."""
    os.environ["DUALOPS_CACHE_DIR"] = folder
    made = compiler.compile_kernel(KERNEL, ARCH)
    path = Path(folder) / f"{binaries._key(KERNEL, ARCH, 0)}.cubin"
    whole = 0
    for _ in range(200):
        binaries._keep(path, made)
        found = binaries._read(path)
        whole += found is not None and is_whole(found)
    return whole


def test_concurrent_writers(folder):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.map_async(write_and_read, [str(folder)] * 3).get(timeout=120) == [200] * 3
    assert only_file(folder)
    assert is_whole(binary(KERNEL, ARCH))


def key(config=Config(3), dtype="float32", arch=ARCH, shared_bytes=0) -> str:
    return binaries._key(build(config, dtype), arch, shared_bytes)


def test_the_key_names_everything_that_a_cubin_depends_on(monkeypatch):
    assert key() == key()
    keys = {key(), key(config=Config(4)), key(dtype="float64"), key(arch="sm_80"), key(shared_bytes=16)}
    monkeypatch.setattr(sources, "digest", lambda _: "other")
    keys.add(key())
    monkeypatch.setattr(binaries, "_versions", lambda: "other")
    keys.add(key())
    assert len(keys) == 7


ZIPPED = """
from dualops.cuda.compiler import binaries, sources
from dualops.cuda.launch.device_words import build_writer
assert ".zip" in binaries.__file__
print(sources.everything())
print(len(binaries.binary(build_writer(3), "sm_90a").cubin))
"""


def test_kernels_of_a_zip_file_of_bytecode(tmp_path, folder):
    """The whole of dualops: two processes agree on the digest, whatever their hashes; another version has another."""
    package, outputs = Path(dualops.__file__).parent, []
    shutil.copytree(package, tmp_path / "tree" / "dualops", ignore=shutil.ignore_patterns("__pycache__"))
    zipped(as_bytecode)(tmp_path / "tree", tmp_path / "first.zip")
    with (tmp_path / "tree" / "dualops" / "cuda" / "launch" / "device_words.py").open("a") as file:
        file.write("another = 1\n")
    shutil.rmtree(tmp_path / "loose")
    zipped(as_bytecode)(tmp_path / "tree", tmp_path / "second.zip")
    for name, seed in (("first", "1"), ("first", "2"), ("second", "1")):
        done = run(f"sys.path.insert(0, {str(tmp_path / name)!r} + '.zip')\n{ZIPPED}", PYTHONHASHSEED=seed)
        assert not done.returncode, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] != outputs[2] and len(list(folder.iterdir())) == 2


def test_the_versions_are_those_installed():
    versions = binaries._versions()
    for name in ("numba ", "llvmlite ", "numba-cuda ", "nvidia-nvjitlink "):
        assert any(line.startswith(name) for line in versions.splitlines()), versions


def test_a_kernel_that_no_build_made_has_no_key():
    @kernel(pointer(f32), threads=32)
    def loose(y):
        y[0] = f32(0)

    with pytest.raises(ValueError, match="loose was made outside a function under @builds"):
        binary(loose, ARCH)
