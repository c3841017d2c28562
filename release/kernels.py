"""Build the wheel of compiled kernels for one architecture. Needs no GPU.

    python -m release.kernels --arch sm_90a --out dist

It contains the kernels of the cases that README's tables time, and those of attention's usual options (`USUAL`).
`dualops.cuda.compiler.bundled` says when an installed one is used.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import dualops.cuda  # noqa: F401  registers the operators
from dualops import __version__
from dualops.cuda.compiler import binaries, bundled, offline
from dualops.cuda.launch import device
from dualops.spec import OPERATORS

MOST_BYTES = 60 * 2**20  # size limit of a wheel

# dtype, width of heads, options; for a batch of equal sequences and for packed ones
USUAL = [
    *product(("bfloat16",), (64, 128, 256), ("", "causal=True", "causal=True window=(1023,0)")),
    *product(("float16",), (64, 128), ("", "causal=True")),
    ("bfloat16", 64, "causal=True window=(127,0) sinks=32"),  # gpt-oss
    ("bfloat16", 64, "causal=True sinks=32"),
    ("bfloat16", 128, "causal=True softcap=50.0"),  # Gemma 2
    ("bfloat16", 128, "causal=True softcap=50.0 window=(4095,0)"),
    ("bfloat16", 256, "causal=True softcap=50.0"),
    ("bfloat16", 256, "causal=True softcap=50.0 window=(4095,0)"),
    ("bfloat16", 128, "causal=True alibi_slopes=32"),
]
DENSE = "flash_attention q=2x32x{q}x{D}:{dtype} k=2x8x{k}x{D} v=2x8x{k}x{D} {options}"
PACKED = (
    "flash_attention_varlen q=4096x32x{D}:{dtype} k=4096x8x{D} v=4096x8x{D} cu_seqlens_q=9 cu_seqlens_k=9 {options}"
)

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Compiled kernels of dualops for {arch}"
license = "BSD-3-Clause"
requires-python = ">=3.11"
dependencies = ["dualops=={version}"]

[tool.setuptools]
packages = ["{package}"]
package-data = {{ "{package}" = ["*.cubin", "{index}"] }}
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="release.kernels", description="Build a wheel of compiled kernels.")
    parser.add_argument("--arch", required=True, choices=device.ARCHITECTURES)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="the folder for the wheel; default: dist")
    parser.add_argument("--jobs", type=int, help="processes that compile in parallel; default: one per core")
    parser.add_argument(
        "--problem", action="append", help="problems instead of the usual ones, in the form of `dualops warm`"
    )
    arguments = parser.parse_args()
    kernels = compiled(arguments.problem or usual(), arguments.arch, arguments.jobs)
    wheel = build_wheel(kernels, arguments.arch, arguments.out)
    nbytes = wheel.stat().st_size
    print(f"{wheel}: {len(kernels)} kernels, {nbytes / 2**20:.1f} MiB")
    return 1 if nbytes > MOST_BYTES else 0


def usual() -> list[str]:
    """Return the problems whose kernels a wheel has."""
    found = [f"{name}:*" for name in OPERATORS]
    for dtype, D, options in USUAL:
        for q, k in ((2048, 2048), (1, 2048)):
            found.append(DENSE.format(q=q, k=k, D=D, dtype=dtype, options=options))
        found.append(PACKED.format(D=D, dtype=dtype, options=options))
    return found


def compiled(problems: Sequence[str], arch: str, jobs: int | None) -> dict[str, bytes]:
    """Compile the problems' kernels; return the files by name."""
    wanted = offline.to_warm(problems, device.every(arch))
    for number, report in enumerate(binaries.build_all(wanted, jobs), 1):
        print(f"[{number}/{len(wanted)}] {report.name.partition('(')[0]}", file=sys.stderr, flush=True)
    return {binaries.fingerprint(*each): binaries.packed(binaries.binary(*each)) for each in wanted}


def build_wheel(kernels: dict[str, bytes], arch: str, out: Path) -> Path:
    """Pack kernels into a wheel in a folder."""
    package = bundled.package_of(arch)
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder) / package
        inside.mkdir()
        (inside / "__init__.py").write_text(f'"""Kernels of dualops {__version__} for {arch}: data alone."""\n')
        bundled.write(inside, kernels)
        text = PROJECT.format(
            name=package.replace("_", "-"), version=__version__, arch=arch, package=package, index=bundled.INDEX
        )
        (Path(folder) / "pyproject.toml").write_text(text)
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out.resolve()), folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out / f"{package}-{__version__}-py3-none-any.whl"


if __name__ == "__main__":
    sys.exit(main())
