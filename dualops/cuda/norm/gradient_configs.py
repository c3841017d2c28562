"""The Configs of the norms' gradients, by the number of 16-byte vectors in a row, with measurements.

Figures are shares of the roof, which is a plain kernel with the same reads and writes: H100 80 GB, 2026-11-27 and 28,
with one to four numbers of rows, 2^25 to 2^28.6 elements (from 4096 columns on 2^27 and more), weights of x's dtype. In
parentheses: the previous Config, which was chosen by two lengths on an H200, with one number of rows.

Threads should be fully used: with a row of 3072 bfloat16 instead of 4096, `RingConfig(256, 2, 1, 6)` falls from 0.94 to
0.86. The addresses of the arrays matter, too: neighbouring figures differ by 5 %. Long rows of layer_norm are fastest
in large clusters of blocks of 128 threads, three blocks per SM, if a row fills them (two blocks take up to 1.2 times as
long). rms_norm, and gradients with dsummed, are usually fastest with larger blocks whose rows overlap. GPUs with less
shared memory than Hopper use fewer stages; nobody has measured that.

On an H100, a few warps may process a row as fast as memory delivers it. An H200's memory is 1.4 times as fast. FAST has
the Configs that are faster there, for fifteen lengths, for layer_norm with w and b. For other lengths an H200 uses the
H100's Configs. These were within 1 % of the best there, too (rms_norm of 4096, 5120 and 10240 columns, layer_norm of
6144 and 12288; with dsummed 4096 and 8192, for rms_norm up to 65536), or nothing else was timed. The H100's figures are
for a loop with an eighth more instructions than ring_backward.py has since 2026-11-28.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...spec.meta import compute_dtype, itemsize
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..rows.registers import RowsConfig
from ..tile.storage import storage
from .arguments import Variant
from .staging import RingConfig

# by `centred`; the first that can hold a row is used
ROWS = {
    False: (
        RowsConfig(8, 1, 32, min_blocks=2),
        RowsConfig(16, 1, 16, min_blocks=3),  # 128 columns of bfloat16: 0.91 (0.74)
        RowsConfig(8, 4, 16, min_blocks=2),  # 256: 0.94 (0.79)
        RowsConfig(16, 4, 8, min_blocks=2),  # 512: 0.94 (0.89)
        RowsConfig(32, 4, 4, min_blocks=2),  # 1024: 0.85 to 0.95 (0.80 to 0.89), of float32 half as long 0.95 (0.89)
        RowsConfig(128, 2, 1, min_blocks=4),  # 2048: 0.92
        RowsConfig(256, 2, 1, min_blocks=2),  # 4096: 0.90
        RowsConfig(512, 2, 1),  # 8192: 0.86
    ),
    True: (
        RowsConfig(8, 1, 32, min_blocks=2),
        RowsConfig(8, 2, 16, min_blocks=4),  # 128: 0.92 (0.80)
        RowsConfig(16, 2, 16, min_blocks=2),  # 256: 0.93 (0.82)
        RowsConfig(32, 2, 8, min_blocks=2),  # 512: 0.93 (0.89)
        RowsConfig(32, 4, 4, min_blocks=3),  # 1024: 0.84 to 0.92
        RowsConfig(64, 4, 2, min_blocks=3),  # 2048: 0.94
        RowsConfig(128, 4, 1, min_blocks=3),  # 4096: 0.91 to 0.95 (0.88 to 0.91)
        RowsConfig(512, 2, 1),  # 8192: 0.83
    ),
}
# most vectors of rows that are faster in registers than in a ring, without dsummed. Rows with lengths between the pairs
# of IN_REGISTERS_TOO are, too, if they lie along one axis, with weights of x's dtype
IN_REGISTERS = 64
IN_REGISTERS_TOO = {False: (96, 128), True: (384, 512)}
UNALIGNED = (
    RowsConfig(32, 4, 8, aligned=False, min_blocks=2),
    RowsConfig(32, 16, 8, aligned=False, min_blocks=2),
    RowsConfig(128, 16, 2, aligned=False, min_blocks=2),
    RowsConfig(512, 16, 1, aligned=False),
)

SHORT = (
    (8, RingConfig(8, 1, 32, 0, min_blocks=2)),
    (16, RingConfig(16, 1, 16, 0, min_blocks=2)),
    (32, RingConfig(32, 1, 8, 0, min_blocks=2)),
)
# (most vectors of a row, Config) by `centred`. Figures after a length in columns are those described above. Figures
# after a length in KiB: an H200, 2026-11-26, float32 weights; in parentheses: rows read twice
RINGS: dict[bool, tuple[tuple[int, RingConfig], ...]] = {
    False: (
        *SHORT,
        (64, RingConfig(32, 2, 8, 0, min_blocks=2)),
        (128, RingConfig(64, 2, 2, 6, min_blocks=3)),  # 768: 0.93 (0.91); eight stages 0.91
        (256, RingConfig(128, 2, 1, 6, min_blocks=2)),  # 2048: 0.94 (0.89)
        (384, RingConfig(128, 4, 2, 6)),  # 3072: 0.91
        (512, RingConfig(128, 2, 1, 6, 2, min_blocks=2, overlap=True)),  # 4096: 0.95 to 0.98 (0.94 to 0.96)
        (640, RingConfig(320, 2, 1, 6)),  # 5120: 0.95 (0.92)
        (768, RingConfig(384, 2, 1, 6, overlap=True)),  # 6144: 0.91 (0.88)
        (1024, RingConfig(256, 2, 1, 6, 2, overlap=True)),  # 8192: 0.95 (0.89), with dsummed 0.97 (0.91)
        (1280, RingConfig(320, 2, 1, 6, 2, overlap=True)),  # 10240: 0.96 (0.93 to 0.96)
        (1536, RingConfig(256, 3, 1, 6, 2)),  # 12288: 0.91 to 0.94
        (1792, RingConfig(224, 2, 1, 6, 4, min_blocks=2, overlap=True)),  # 14336: 0.85 to 0.90 (0.82 to 0.84)
        (2048, RingConfig(128, 4, 1, 6, 4, overlap=True)),  # 16384: 0.94 to 0.97, of float32 half as long 0.96 to 0.98
        (2560, RingConfig(320, 2, 1, 6, 4, overlap=True)),  # 20480: 0.93 to 0.97 (0.90 to 0.95)
        (3072, RingConfig(512, 2, 1, 6, 4, overlap=True)),  # 24576: 0.92 to 0.97
        (4096, RingConfig(128, 2, 1, 7, 16, min_blocks=3)),  # 32768: 0.90 to 0.94 (0.85 to 0.90)
        (4096, RingConfig(256, 2, 1, 6, 8, overlap=True)),  # 0.88 to 0.92
        (8192, RingConfig(256, 2, 1, 6, 16, overlap=True)),  # 65536: 0.89 to 0.95, with dsummed 0.90 to 0.94
        (8192, RingConfig(512, 2, 1, 0, 8, overlap=True)),  # of GPUs without clusters of 16
        (16384, RingConfig(512, 2, 1, 0, 16, overlap=True)),  # 256 KiB: 0.92 (0.58), without overlap 0.89
        (32768, RingConfig(256, 8, 1, 0, 16, w_shared=True)),  # 512 KiB: 0.71 (0.52)
    ),
    True: (
        *SHORT,
        (64, RingConfig(16, 4, 8, 2, min_blocks=2)),
        (128, RingConfig(64, 2, 2, 6, min_blocks=3)),  # 1024: 0.85 to 0.96 (0.85 to 0.92), 768: 0.90 (0.89)
        (256, RingConfig(128, 2, 1, 6, min_blocks=3)),  # 2048: 0.95 (0.79)
        (384, RingConfig(128, 3, 1, 6, min_blocks=2)),  # 3072: 0.93 (0.90)
        (512, RingConfig(256, 2, 1, 6)),  # 4096: 0.90 to 0.93
        (640, RingConfig(320, 2, 1, 6)),  # 5120: 0.92 (0.77)
        (768, RingConfig(128, 3, 1, 6, 2, min_blocks=2, overlap=True)),  # 6144: 0.92 to 0.95 (0.79)
        (1024, RingConfig(128, 2, 1, 7, 4, min_blocks=3)),  # 8192: 0.93 to 0.97 (0.90 to 0.94)
        (1280, RingConfig(256, 3, 1, 6, 2, overlap=True)),  # 10240: 0.92 to 0.96
        (1536, RingConfig(256, 3, 1, 6, 2, overlap=True)),  # 12288: 0.92 to 0.96
        (2048, RingConfig(128, 2, 1, 7, 8, min_blocks=3)),  # 16384: 0.91 to 0.96 (0.86 to 0.93), 14336: 0.89 to 0.94
        (2560, RingConfig(160, 4, 1, 4, 4, min_blocks=2, overlap=True)),  # 20480: 0.85 to 0.89 (0.79 to 0.84)
        (3072, RingConfig(256, 3, 1, 6, 4, overlap=True)),  # 24576: 0.89 to 0.96 (0.86 to 0.93)
        (4096, RingConfig(128, 2, 1, 7, 16, min_blocks=3)),  # 32768: 0.87 to 0.94 (0.82 to 0.88)
        (4096, RingConfig(256, 2, 1, 6, 8, overlap=True)),  # 0.82 to 0.88
        (8192, RingConfig(256, 4, 1, 0, 8, overlap=True)),  # 65536: 0.78 to 0.88
        (16384, RingConfig(256, 4, 1, 0, 16, overlap=True)),  # 256 KiB: 0.89 (0.56); 512 threads 0.88
    ),
}
# with dsummed; these come before the Configs for as many vectors; by `centred`
ADDED: dict[bool, dict[int, RingConfig]] = {
    False: {
        128: RingConfig(64, 2, 2, 6, min_blocks=2),  # 1024: 0.86 to 0.94 (0.80 to 0.85)
        768: RingConfig(384, 1, 1, 6, 2, overlap=True),  # 6144: 0.94 to 0.96 (0.90 to 0.91)
        1536: RingConfig(256, 3, 1, 6, 2, overlap=True),  # 12288: 0.94 to 0.96 (0.91 to 0.93)
        1792: RingConfig(128, 4, 1, 6, 4, overlap=True),  # 14336: 0.93 to 0.96
        3072: RingConfig(256, 3, 1, 6, 4, overlap=True),  # 24576: 0.91 to 0.93 (0.89 to 0.91)
        4096: RingConfig(256, 2, 1, 6, 8, overlap=True),  # 32768: 0.92 to 0.96 (0.86 to 0.90)
    },
    True: {
        512: RingConfig(128, 2, 1, 6, 2, min_blocks=2, overlap=True),  # 4096: 0.96 to 0.98 (0.93 to 0.96)
        1024: RingConfig(128, 4, 1, 6, 2, overlap=True),  # 8192: 0.95 to 0.98
        1280: RingConfig(320, 2, 1, 6, 2, overlap=True),  # 10240: 0.94 to 0.97 (0.89 to 0.92)
        2048: RingConfig(256, 2, 1, 6, 4, overlap=True),  # 16384: 0.91 to 0.95 (0.87 to 0.91)
        2560: RingConfig(320, 2, 1, 6, 4, overlap=True),  # 20480: 0.91 to 0.96 (0.89 to 0.91)
        4096: RingConfig(256, 2, 1, 6, 8, overlap=True),  # 32768: 0.88 to 0.94 (0.83 to 0.88)
        8192: RingConfig(256, 2, 1, 6, 16, overlap=True),  # 65536: 0.86 to 0.94 (0.71 to 0.77)
    },
}
# the same without dsummed, for Hopper GPUs with fast memory, by `centred` and whether x has 16 bits. Shares of the roof
# of an H200, 2026-11-28: bfloat16 with 2^27 elements up to 3072 columns and 2^28 above, float32 with 2^27. In
# parentheses: the H100's Config on the H200. Judging by the blocks' clocks, all GPCs seem to get the same bandwidth, so
# GPCs with 18 SMs end last. Configs that could be faster than memory stay below 0.92; blocks that are just fast enough,
# such as those with 384 threads, reach 0.94
FAST: dict[tuple[bool, bool], dict[int, RingConfig]] = {
    (False, True): {
        128: RingConfig(64, 2, 1, 6, min_blocks=4, overlap=True),  # 1024: 0.91 (0.84 in registers)
        256: RingConfig(128, 2, 1, 4, min_blocks=2),  # 2048: 0.93 (0.89)
        384: RingConfig(192, 2, 1, 4, min_blocks=2, overlap=True),  # 3072: 0.92 (0.86)
        768: RingConfig(128, 3, 1, 4, 2, min_blocks=2, overlap=True),  # 6144: 0.93 (0.89)
        1024: RingConfig(256, 4, 1, 2),  # 8192: 0.92 to 0.93 (0.91 to 0.92)
        1536: RingConfig(256, 3, 1, 4, 2, overlap=True),  # 12288: 0.93 (0.90)
        # 16384: 0.90, of twice as many rows 0.91 to 0.92 (0.72, 0.73)
        2048: RingConfig(128, 2, 1, 4, 8, min_blocks=3, overlap=True),
        2560: RingConfig(320, 4, 1, 5, 2),  # 20480: 0.89 (0.81)
        3072: RingConfig(384, 2, 1, 6, 4, overlap=True),  # 24576: 0.94 (0.88)
        4096: RingConfig(128, 2, 1, 6, 16, min_blocks=3, overlap=True),  # 32768: 0.91 to 0.92 (0.90 to 0.91)
        8192: RingConfig(384, 3, 1, 6, 8, overlap=True),  # 65536: 0.93 (0.76; 512 threads: 0.89 to 0.91)
    },
    (False, False): {
        512: RingConfig(128, 4, 2, 6),
        2048: RingConfig(512, 2, 1, 0, 2, overlap=True),
        4096: RingConfig(512, 2, 1, 0, 4, overlap=True),  # 16384: 0.91
        8192: RingConfig(512, 2, 1, 0, 8, overlap=True),
    },
    (True, True): {
        128: RingConfig(32, 4, 4, 2, min_blocks=2, w_shared=True),  # 1024: 0.92 (0.85)
        384: RingConfig(128, 3, 1, 4, min_blocks=2, overlap=True),  # 3072: 0.90 (0.86)
        512: RingConfig(256, 2, 1, 2, min_blocks=2),  # 4096: 0.91 to 0.92 (0.83 to 0.84 in registers)
        4096: RingConfig(512, 2, 1, 0, 4, overlap=True),  # without w or b
    },
    (True, False): {
        128: RingConfig(32, 4, 4, 2, min_blocks=2),
        512: RingConfig(256, 2, 1, 2, min_blocks=2),
        2048: RingConfig(512, 2, 1, 0, 2),
        4096: RingConfig(512, 2, 1, 0, 4, overlap=True),
    },
}
# with dw and db: by whether x has 16 bits (else float32) and whether dsummed is added; `w_shared` is not changed
FAST_WITH_BOTH: dict[tuple[bool, bool], dict[int, RingConfig]] = {
    (False, False): {
        1024: RingConfig(256, 2, 1, 6, 2, overlap=True),  # 4096: 0.96 (0.88)
        4096: RingConfig(384, 3, 1, 6, 4, overlap=True),  # 16384: 0.94 (512 threads: 0.90)
    },
    (True, False): {
        256: RingConfig(128, 2, 1, 4, min_blocks=2),  # 2048: 0.91 (0.85)
        640: RingConfig(128, 5, 1, 2, min_blocks=2, w_shared=True),  # 5120: 0.90 (0.76 to 0.77)
        1024: RingConfig(256, 4, 1, 2),  # 8192: 0.89 to 0.90 (0.88)
        1280: RingConfig(320, 4, 1, 4, overlap=True),  # 10240: 0.92 (0.81)
        # 16384: 0.88, with twice as many rows 0.89 to 0.90 (0.85, 0.86); 14336: 0.92 (0.76). Three blocks of 128
        # threads in clusters of eight, with overlap: 0.89, 0.90 to 0.91; nobody has measured them at 14336
        2048: RingConfig(256, 4, 1, 4, 2, overlap=True),
        2560: RingConfig(320, 4, 1, 4, 2, w_shared=True, overlap=True),  # 20480: 0.91 (0.83)
        3072: RingConfig(128, 3, 1, 6, 8, min_blocks=2, overlap=True),  # 24576: 0.91 to 0.92 (0.86)
        4096: RingConfig(256, 4, 1, 6, 4, overlap=True),  # 32768: 0.89 (0.77)
        8192: RingConfig(256, 4, 1, 6, 8, overlap=True),  # 65536: 0.88 (0.86 to 0.87)
    },
    (True, True): {
        # 16384: 0.92 to 0.93, of twice as many rows 0.94 (0.86 to 0.87, 0.88)
        2048: RingConfig(128, 2, 1, 6, 8, min_blocks=2, overlap=True),
        4096: RingConfig(256, 2, 1, 6, 8, overlap=True),  # 32768: 0.88 (0.85 to 0.86)
        8192: RingConfig(256, 4, 1, 4, 8, overlap=True),  # 65536: 0.88 (0.80)
    },
}


def comes_first(N: int, variant: Variant, device: Device) -> bool:
    """Return whether rows of N elements are faster in registers than in a ring, if there is one."""
    vectors, (more, most) = cdiv(N, storage(variant.dtype).vector), IN_REGISTERS_TOO[variant.centred]
    plain = variant.rank == 1 and variant.w in (None, variant.dtype) and most not in _first(variant, device)
    return not variant.added and (vectors <= IN_REGISTERS or (plain and more < vectors <= most))


def rings(N: int, variant: Variant, device: Device) -> Iterator[RingConfig]:
    """Yield the ring Configs that can hold rows of N elements, best first, with as many stages as possible."""
    first = _first(variant, device)
    for most, config in RINGS[variant.centred]:
        if cdiv(N, storage(variant.dtype).vector) <= most:
            if most in first:
                yield first[most]
            yield with_place_for_w(config, variant)


def with_place_for_w(config: RingConfig, variant: Variant) -> RingConfig:
    """Keep w in shared memory if there are dw and db, which leave it no registers (except most of FAST_WITH_BOTH)."""
    return replace(config, w_shared=config.w_shared or variant.weight_gradients > 1)


def _first(variant: Variant, device: Device) -> dict[int, RingConfig]:
    """Return the ring Configs that come before the others for as many vectors."""
    # for layer_norm, some have no registers for the addresses of rows along several axes
    fast = device.has_fast_memory and device.has_wgmma and (not variant.centred or variant.rank == 1)
    narrow = itemsize(variant.dtype) < itemsize(compute_dtype(variant.dtype))
    first, as_they_are = {}, {}
    if variant.added:
        first = ADDED[variant.centred]
    elif fast:
        first = FAST[variant.centred, narrow]
    if fast and variant.weight_gradients > 1 and itemsize(variant.dtype) <= 4:
        as_they_are = FAST_WITH_BOTH.get((narrow, variant.added), {})
    return {most: with_place_for_w(config, variant) for most, config in first.items()} | as_they_are
