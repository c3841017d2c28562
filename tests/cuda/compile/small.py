"""Kernels that are built in a blink, and what compiles them in other processes."""

import os
import subprocess
import sys

from dualops.cuda.compiler.backend import Kernel, builds, cuda, f32, i32, kernel, pointer

ARCH = "sm_90a"


@builds
def build(factor: int) -> Kernel:
    """y[i] *= factor for the first 16 of N numbers.

    `min` has overloads that Numba tries in vain: the exceptions hold on to frames until the collector comes by.
    """
    FACTOR, MOST = f32(factor), i32(16)

    @kernel(pointer(f32), i32, threads=32)
    def scaled(y, N):
        if cuda.threadIdx.x < min(N, MOST):
            y[cuda.threadIdx.x] *= FACTOR

    return scaled


@builds
def build_wrong(factor: int) -> Kernel:
    """What Numba can't type."""

    @kernel(pointer(f32), threads=32)
    def wrong(y):
        y[0] = "a word"

    return wrong


def run(program: str, *arguments: object, timeout: float = 100, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python program with this one's modules, in a process of its own."""
    start = f"import sys; sys.path[:] = {sys.path!r}\n"
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", start + program, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
