"""From a kernel to a cubin: Numba -> LTO-IR -> nvJitLink, without a GPU, and kept on disk.

LTO-IR and not PTX is linked: from PTX, ptxas would make relocatable code, ignore `setmaxnreg` and serialise `wgmma`.
A cubin is kept under DUALOPS_CACHE_DIR (else the user's cache directory) by a key of everything it depends on: the
sources of `dualops.cuda` and of attention's options, the build with its arguments, the architecture, the versions of
Python, Numba, numba-cuda and the toolkit. Files are written whole and renamed into place, checked when read, and done
without where the directory can't be written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs

from .backend import SIMULATED, Kernel, cuda, types
from .device import compute_capability, known

REGISTERS_PER_SM = 65536
LINK_ATTEMPTS = 3  # nvJitLink has been seen to return a cubin and no log, once in some hundred links
# wgmma serialised, setmaxnreg ignored: a kernel that is right and several times too slow
FATAL_COMPLAINTS = ("C7504", "C7509", "C7510", "C7514")


@dataclass(frozen=True)
class Report:
    """What the assembler said of a kernel."""

    name: str
    arch: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    static_shared: int
    dynamic_shared: int
    cubin_bytes: int
    complaints: tuple[str, ...]
    allowed: bool
    seconds: float


@dataclass(frozen=True)
class Binary:
    """A compiled kernel."""

    entry: str
    cubin: bytes
    report: Report


def binary(kernel: Kernel, arch: str, shared_bytes: int = 0) -> Binary:
    """The kernel for `arch`: from the disk if it is there and whole, else compiled and kept."""
    path = cache_dir() / f"{_key(kernel, arch, shared_bytes)}.cubin"
    return _read(path) or _keep(path, compile_kernel(kernel, arch, shared_bytes))


def lto_ir(kernel: Kernel, arch: str) -> bytes:
    """What Numba makes of a kernel for the linker: most of the work. Needs numba-cuda."""
    ltoir, _ = cuda.compile(
        kernel.function,
        types.void(*kernel.argtypes),
        cc=compute_capability(arch),
        device=False,
        abi="numba",
        output="ltoir",
        launch_bounds=(kernel.threads, kernel.min_blocks),
    )
    return ltoir


def compile_kernel(kernel: Kernel, arch: str, shared_bytes: int = 0, ltoir: bytes | None = None) -> Binary:
    """Compile, whatever the disk holds; `ltoir`: what `lto_ir` made, if it did so already.

    Raises RuntimeError in the simulator, or without numba-cuda.
    """
    if SIMULATED:
        raise RuntimeError("dualops.cuda: nothing can be compiled in the simulator, unset NUMBA_ENABLE_CUDASIM")
    try:
        from cuda.core import Linker, LinkerOptions, ObjectCode
    except ImportError as error:
        raise RuntimeError(f"dualops.cuda: compiling needs numba-cuda, pip install dualops[cu13] ({error})") from error
    began = time.perf_counter()
    if ltoir is None:
        ltoir = lto_ir(kernel, arch)
    options = LinkerOptions(arch=arch, ptxas_options="-v", link_time_optimization=True)
    cubin, log = b"", ""
    for _ in range(LINK_ATTEMPTS):
        linker = Linker(ObjectCode.from_ltoir(ltoir), options=options)
        cubin = bytes(linker.link("cubin").code)
        log = linker.get_info_log() + linker.get_error_log()
        if "Used" in log:
            break
    report = _report(kernel, arch, shared_bytes, cubin, log, time.perf_counter() - began)
    return Binary(_entry(cubin), cubin, report)


def _entry(cubin: bytes) -> str:
    """The kernel's name in a cubin: its code lies in the section .text.<name>."""
    found = re.search(rb"\0\.text\.([^\0]+)\0", cubin)
    if not found:
        raise RuntimeError("dualops.cuda: the linker made a cubin without a kernel")
    return found[1].decode()


def _report(kernel: Kernel, arch: str, dynamic: int, cubin: bytes, log: str, seconds: float) -> Report:
    def number(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, log))

    registers, static = number(r"Used (\d+) registers"), number(r"(\d+) bytes smem")
    stack, spills = number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes spill stores")
    complaints = tuple(line.strip() for line in log.splitlines() if re.search(r"(?i:warning)|C7\d\d\d", line))
    fits = (
        registers * kernel.threads * kernel.min_blocks <= REGISTERS_PER_SM
        and static + dynamic <= known(arch).shared_memory_per_block
    )
    sound = not any(code in line for code in FATAL_COMPLAINTS for line in complaints)
    return Report(
        name=kernel.identity.removeprefix("dualops.cuda."),
        arch=arch,
        registers=registers,
        stack_bytes=stack,
        spill_bytes=spills,
        static_shared=static,
        dynamic_shared=dynamic,
        cubin_bytes=len(cubin),
        complaints=complaints,
        allowed=registers > 0 and fits and sound and stack == 0 and spills == 0,
        seconds=round(seconds, 3),
    )


# --- the disk --------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """DUALOPS_CACHE_DIR, else the user's cache directory for dualops."""
    given = os.environ.get("DUALOPS_CACHE_DIR")
    return Path(given) if given else Path(platformdirs.user_cache_dir("dualops"))


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    package = Path(__file__).parent.parent
    for path in sorted([*package.glob("cuda/**/*.py"), *package.glob("spec/attention/*.py")]):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def _versions() -> str:
    names = ("numba", "llvmlite", "numba-cuda", "cuda-core", "nvidia-nvjitlink", "nvidia-nvvm", "nvidia-cuda-nvcc")
    found = [sys.version]
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return "\n".join(found)


def _key(kernel: Kernel, arch: str, shared_bytes: int) -> str:
    if not kernel.identity:
        raise ValueError(f"{kernel.name} was made outside a function under @builds: it has no identity")
    everything = "\n".join([_sources(), _versions(), kernel.identity, arch, str(shared_bytes)])
    return hashlib.sha256(everything.encode()).hexdigest()


def _read(path: Path) -> Binary | None:
    """What a file holds, or None where it is missing or damaged."""
    try:
        digest, header, cubin = path.read_bytes().split(b"\n", 2)
        if hashlib.sha256(header + b"\n" + cubin).hexdigest().encode() != digest:
            return None
        fields: dict[str, Any] = json.loads(header)
        fields["report"]["complaints"] = tuple(fields["report"]["complaints"])
        return Binary(fields["entry"], cubin, Report(**fields["report"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _keep(path: Path, made: Binary) -> Binary:
    """Write `made` under a name of its own, then rename: a reader sees the whole file or none."""
    body = json.dumps({"entry": made.entry, "report": asdict(made.report)}).encode() + b"\n" + made.cubin
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
    return made
