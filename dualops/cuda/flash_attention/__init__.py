"""flash_attention on the GPU: which kernel serves which problem, and the public function.

simt.py   fused and tiled, on CUDA cores: any GPU, dtype and width
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ...spec import ArrayMeta, Problem
from ...spec import flash_attention as SPEC
from ..device import Device
from ..launch import Choice, Operation
from ..step import Step
from . import simt
from .simt import SimtConfig

RUNGS = SPEC.rungs


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    return_lse: bool = False,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """softmax(scale * q @ k.T) @ v without ever holding the scores; Dao 2023, arXiv:2307.08691.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]: device arrays of one library and dtype (float64, float32,
    float16, bfloat16), any strides with a contiguous last axis, H a multiple of Hkv, D and Dv up to 512.
    causal: query i sees keys j <= i + Sk - Sq; "top_left": keys j <= i. scale: 1 / sqrt(D) if None.
    Returns o [B, H, Sq, Dv] in q's dtype and axis order; with return_lse also lse [B, H, Sq], natural logarithm,
    float32 (float64 for float64). A query that sees no key gives 0 and -inf; NaN in a key or value that it does not see
    does not reach it. Bit-equal from run to run.
    out: an array for o, or (o, lse), sharing no memory with the inputs. kernel: a rung instead of the best. stream: a
    stream object or handle instead of the library's current one.
    Raises TypeError and ValueError for a wrong call, NotImplementedError where this device or rung can't do it. No
    gradient is recorded.
    """
    return forward((q, k, v), (causal, scale, return_lse), out, kernel, stream)


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Ways to do attention, best first."""
    p = problem
    if p.B * p.H * p.Sq == 0:
        yield Choice("simt", None, "nothing to do", tuple)
        return
    for config, reason in _simt_configs(problem):
        if config.shared_bytes(p.D, p.Dv, p.dtype) <= device.shared_memory_per_block:
            yield Choice("simt", config, reason, partial(_simt_step, problem, results, config))


def _simt_configs(problem: Problem) -> Iterator[tuple[SimtConfig, str]]:
    """Tiles for the simt rung, best first."""
    p = problem
    if p.Sq > 32 and p.dtype != "float64":
        # share of torch's memory-efficient attention, float32, S=4096 D=64 and S=2048 D=128, H200, 2026-11-21
        if p.Dv <= 128:  # 0.50; 64 x 64 scores 0.46
            yield SimtConfig(8, 4), "128 x 64 scores a block"
        yield SimtConfig(4, 4), "64 x 64 scores a block: wide heads leave registers for no more"
    if p.Sq > 16:
        yield SimtConfig(2, 2), "32 x 32 scores a block: what fits for double precision or the widest heads"
    yield SimtConfig(1, 1), "16 x 16 scores a block: few queries, or little shared memory"


def _simt_step(problem: Problem, results: Mapping[str, ArrayMeta], config: SimtConfig) -> Sequence[Step]:
    p = problem
    build = simt.build_forward(config, p.dtype, p.D, p.Dv, bool(p.causal), p.return_lse)
    strides = [*results["o"].strides[:3]]
    strides += results["lse"].strides if p.return_lse else (0, 0, 0)
    for name in ("q", "k", "v"):
        strides += p.arrays[name].strides[:3]
    offset = p.Sk - p.Sq if p.causal is True else 0
    blocks = p.B * p.H * -(-p.Sq // config.block_q)
    args = ("o", "lse", "q", "k", "v", p.H, p.group, p.Sq, p.Sk, offset, p.scale, *strides)
    return [Step(build, (blocks,), args, config.shared_bytes(p.D, p.Dv, p.dtype))]


forward = Operation(SPEC, forward_choices)
