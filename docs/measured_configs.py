"""What dualops' own kernels reached at known Configs, as pages and Configs' docstrings have it: TFLOP/s of the products
that each makes, on an H200; of retention milliseconds of a call, on an H200 or an H100. What `benchmarks/peer_results`
has is read from there.

Batches and heads that a source does not name are those of the benchmarks' cases of that length; V is as wide as Q.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dualops.cuda.flash_attention.sm80.config import Sm80Config
from dualops.cuda.flash_attention.sm90.config import Sm90Config
from dualops.cuda.flash_attention.sm90.dkv_config import DkvApartConfig, DkvConfig
from dualops.cuda.flash_attention.sm90.dq_config import DqConfig
from dualops.cuda.matmul import sm80
from dualops.cuda.matmul.sm90.config import START, TILE, TILES
from dualops.cuda.retention.sm80.config import Sm80Config as RetentionSm80Config, Sm80Rows, Sm80States
from dualops.cuda.retention.sm90.config import Sm90Config as RetentionSm90Config, WideConfig

D64, D128, D192, D256 = (
    "B=2 H=32 S=8192 D=64",
    "B=2 H=16 S=8192 D=128",
    "B=2 H=16 S=8192 D=192 Dv=128",
    "B=2 H=8 S=4096 D=256",
)
SHORT, CAUSAL = "B=8 H=16 S=2048 D=128", " causal=True"


class Measured(NamedTuple):
    """fitted: whether numbers of the cost model were fitted to it (`dualops/estimate/README.md`)."""

    problem: str
    config: Any
    tflops: float
    fitted: bool = False


WIDE_FORWARD = Sm90Config(2, 112, q_stages=1)
FORWARD = [  # sm90/config.py, 2026-11-22
    Measured(D128, Sm90Config(2, 128), 620, fitted=True),
    Measured(D128 + CAUSAL, Sm90Config(2, 128), 600),
    Measured(D128, Sm90Config(2, 128, turns=False), 627, fitted=True),
    Measured(D128 + CAUSAL, Sm90Config(2, 128, turns=False), 602),
    Measured(SHORT, Sm90Config(2, 128), 571),
    Measured(SHORT + CAUSAL, Sm90Config(2, 128), 534),
    Measured(SHORT, Sm90Config(2, 128, turns=False), 555),
    Measured(SHORT + CAUSAL, Sm90Config(2, 128, turns=False), 527),
    Measured(D64, Sm90Config(3, 128, stages=3, turns=False), 506, fitted=True),
    Measured(D64 + CAUSAL, Sm90Config(3, 128, stages=3, turns=False), 461),
    Measured(D64, Sm90Config(3, 128), 475),
    Measured(D64 + CAUSAL, Sm90Config(3, 128), 456),
    Measured(D192, WIDE_FORWARD, 654),
    Measured(D192 + CAUSAL, WIDE_FORWARD, 614),
    # the page, section 12: other days and states of the code
    Measured("B=8 H=32 S=2048 D=64", Sm90Config(3, 128, stages=3, turns=False), 473),
    Measured("B=8 H=32 S=2048 D=64 causal=True", Sm90Config(3, 128, stages=3, turns=False), 343),
    Measured("B=1 H=8 S=16384 D=256", Sm90Config(2, 80, q_stages=1, o_over_q=True), 703),
    Measured("B=1 H=8 S=16384 D=256 causal=True", Sm90Config(2, 80, q_stages=1, o_over_q=True), 701),
    Measured(D256, Sm90Config(2, 80, turns=False, q_stages=1, o_over_q=True), 647 / 1.05),  # compared with "turns"
    Measured(D256 + CAUSAL, Sm90Config(2, 80, turns=False, q_stages=1, o_over_q=True), 593 / 1.04),
    Measured(D128, Sm80Config(1, 64, min_blocks=2), 369 * 0.93 / 1.03),
    Measured(D128 + CAUSAL, Sm80Config(1, 64, min_blocks=2), 351 * 1.04 / 1.10),
]

WIDE_DQ = {"dq_over_q": True, "zeroed": True}
DQ = [  # the page, section 13, and sm90/dq_config.py; TFLOP/s of three products
    Measured(D128, DqConfig(2, 128), 702, fitted=True),
    Measured(D128 + CAUSAL, DqConfig(2, 128), 716),
    Measured(D128, DqConfig(2, 128, turns=False), 643, fitted=True),
    Measured(D128, DqConfig(2, 96), 644, fitted=True),
    Measured(D128, DqConfig(2, 96, turns=False), 611, fitted=True),
    Measured(D128, DqConfig(2, 64), 563, fitted=True),
    Measured(D64, DqConfig(2, 128), 561),
    Measured(D256, DqConfig(2, 48, turns=False, **WIDE_DQ), 686, fitted=True),
    Measured(D256, DqConfig(2, 48, **WIDE_DQ), 626, fitted=True),
    Measured("B=2 H=8 S=4096 D=192 causal=True", DqConfig(2, 80, turns=False, **WIDE_DQ), 687),
    Measured("B=2 H=8 S=4096 D=192 causal=True", DqConfig(2, 80, **WIDE_DQ), 725),
]

DKV = [  # the same, and dkv_config.py; of four products
    Measured(D128, DkvConfig(2, 64, 3, overlap=False), 586),
    Measured(D128 + CAUSAL, DkvConfig(2, 64, 3, overlap=False), 544),
    Measured(D128, DkvConfig(2, 48, 3), 570),
    Measured(D128, DkvConfig(2, 48, 3, overlap=False), 550),
    Measured(D128, DkvConfig(2, 32, 3), 527),
    Measured(D64, DkvConfig(2, 96, 3), 539),
    Measured(D256, DkvApartConfig(48, 3), 697),
    Measured(D256, DkvApartConfig(64, 2), 534),
    Measured(D256, DkvApartConfig(32, 4), 637),
    Measured(D192, DkvApartConfig(80, 3), 671),
    Measured(D192, DkvApartConfig(64, 3), 649),
    Measured(D192, DkvConfig(2, 32, 3), 586),
]

MATMUL = (
    [  # sm90/config.py: picoseconds for a step of the sum where every SM has a tile, here 132 of 8192 steps
        Measured(
            f"M={11 * config.block_m} N={12 * config.block_n} K=8192",
            config,
            2 * 132 * config.block_m * config.block_n * 8192 / (START + TILE + 8192 * picoseconds),
        )
        for config, picoseconds in TILES
        if config.splits == 1
    ]
    + [  # sm80.py: the first four, of which the first has 0.55 of cuBLAS's speed, which the page's section 11 has
        Measured("M=4096 N=4096 K=4096", config, 2 * 4096**3 / (0.186e-3 * 1.03) / 1e12 * 0.55 * speed)
        for config, speed in sm80.TILES[:4]
    ]
)


class Timed(NamedTuple):
    """A call of retention, "forward" or "backward". fitted: as that of `Measured`."""

    gpu: str
    problem: str
    direction: str
    config: Any
    milliseconds: float
    fitted: bool = False


HEADS, FEWER, NARROW, WIDE, LONG = (
    "B=8 H=16 S=2048 D=128",
    "B=2 H=16 S=8192 D=128",
    "B=8 H=16 S=2048 D=64",
    "B=2 H=8 S=8192 D=256 Dv=512",
    "B=1 H=8 S=131072 D=128",
)


def _sm80(chunk: int = 256, min_blocks: int = 2, **rows: int) -> RetentionSm80Config:
    return RetentionSm80Config(chunk, Sm80Rows(min_blocks=min_blocks, **rows), Sm80States())


NOW = 0.367 / 0.389  # the same call's later time, relative to the time in the docstring
RETENTION = [  # the page, section 6
    Timed("h200", HEADS, "forward", RetentionSm90Config(), 0.076),
    Timed("h200", HEADS, "backward", RetentionSm90Config(), 0.233),  # the middle of two
    Timed("h200", FEWER, "forward", RetentionSm90Config(segments=4), 0.140),
    Timed("h200", FEWER, "backward", RetentionSm90Config(), 0.273),
    Timed("h200", LONG, "forward", RetentionSm90Config(segments=16), 0.428),
    Timed("h200", LONG, "backward", RetentionSm90Config(segments=16), 1.32),
    Timed("h100", NARROW, "forward", RetentionSm90Config(), 0.064),
    Timed("h100", NARROW, "backward", RetentionSm90Config(), 0.173),
    Timed("h100", WIDE, "forward", WideConfig(segments=2), 0.344),
    Timed("h100", WIDE, "backward", WideConfig(), 1.151),
    Timed("h100", HEADS, "forward", _sm80(), 0.367, fitted=True),
    Timed("h100", HEADS, "backward", _sm80(), 1.104),
    Timed("h100", FEWER, "forward", _sm80(), 0.413),
    Timed("h100", FEWER, "backward", _sm80(), 1.241),
    Timed("h100", NARROW, "forward", _sm80(), 0.188),
    Timed("h100", NARROW, "backward", _sm80(), 0.540),
    Timed("h100", WIDE, "forward", _sm80(min_blocks=1), 1.644),
    Timed("h100", WIDE, "backward", _sm80(min_blocks=1), 4.638),
    # sm80/__init__.py
    Timed("h100", HEADS, "forward", _sm80(min_blocks=1, warps=8), 0.410 * NOW),
    Timed("h100", HEADS, "backward", _sm80(min_blocks=1, warps=8), 1.208 * NOW),
    Timed("h100", HEADS, "forward", _sm80(min_blocks=1, block_kv=32), 0.398 * NOW),
    Timed("h100", HEADS, "backward", _sm80(min_blocks=1, block_kv=32), 1.181 * NOW),
    Timed("h100", HEADS, "forward", _sm80(chunk=128), 0.532 * NOW),
    Timed("h100", HEADS, "backward", _sm80(chunk=128), 1.586 * NOW),
]
