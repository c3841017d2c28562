"""The roof of a case: the least time that this GPU could take for it, as a call that is timed like the contestants.

It is the longer of two times: that of moving the case's bytes, by a plain kernel with the same mix of reads and writes;
and that of its operations at the rate of torch's matrix product of a size that fills the GPU. Both need a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from .timing import Call, burst
from .work import Work


class Roof(NamedTuple):
    """A call, and the seconds of the case over those of the call."""

    call: Call
    scale: float


def roof(work: Work, dtype: str) -> Roof:
    """Return the roof of a case with this work in this dtype. The call owns its memory."""
    from dualops.cuda.tuning.roof import Stream, best_blocking

    at_least = work.flops / matmul_rate(dtype)
    moving = best_blocking(work.bytes_read, work.bytes_written, enough=at_least)
    if moving.seconds > at_least:
        stream = Stream(work.bytes_read, work.bytes_written, moving.threads, moving.vectors)
        return Roof(stream, stream.scale)
    return Roof(matrix_product(dtype), work.flops / (2 * matrix_size(dtype) ** 3))


def matrix_size(dtype: str) -> int:
    """Return M = N = K of a product that fills the GPU."""
    return 8192 if dtype in ("float16", "bfloat16") else 4096


def matrix_product(dtype: str) -> Call:
    """Return torch's product of two square matrices of normal values."""
    size = matrix_size(dtype)
    a, b = (torch.randn(size, size, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.matmul(a, b, out=out)


@cache
def matmul_rate(dtype: str) -> float:
    """Measure the product's flops per second."""
    return 2 * matrix_size(dtype) ** 3 / burst(matrix_product(dtype))
