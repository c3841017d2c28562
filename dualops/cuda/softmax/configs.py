"""The Configs of softmax's kernels, with what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from ..launch.device import Device
from ..rows.cluster import ClusterRowsConfig
from ..rows.registers import RowsConfig
from ..tile.storage import storage

# (row_threads, vectors, rows) by rising length of row: the first that holds the row is taken. Shares of the roof that a
# plain kernel with the same reads and writes reaches: bf16, H200, 32768 rows, 2026-11-21, both still with plain stores.
FORWARD_ROWS = (
    (32, 1, 4),
    (32, 2, 4),
    (64, 2, 2),  # 1024 columns: 0.98; a warp a row with 4 vectors 0.96
    (128, 2, 1),
    (256, 2, 1),  # 4096 columns: 0.97; 128 threads with 4 vectors 0.95
    (256, 4, 1),
    (512, 4, 1),  # 16384 columns: 0.97; 256 threads with 8 vectors 0.96, 1024 with 2 0.66
    (1024, 4, 1),
)
BACKWARD_ROWS = (
    (32, 1, 4),
    (32, 2, 4),
    (64, 2, 2),  # 1024 columns: 1.00; four rows a block 0.97
    (128, 2, 1),
    (128, 4, 2),  # 4096 columns: 0.99; 512 threads with 1 vector 0.98
    (256, 4, 1),
    (512, 4, 1),  # 16384 columns: 0.97; 1024 threads with 2 vectors 0.97
)
# rows that are not aligned: one element a load, so more loads a thread
UNALIGNED_ROWS = ((32, 4, 4), (32, 16, 4), (128, 16, 1), (512, 16, 1))

THREADS = 256  # of a block
# Vectors a thread, at most, and blocks that an SM has registers for. Shares of the roof of 2^29 elements of 2 bytes or
# 2^28 of 4, H200, 2026-11-26; in brackets what such rows took before: 48 KiB 0.97 (a block of 1024 threads 0.78), 64
# KiB 0.96 to 0.97 (0.89), 80: 0.97 (a ring 0.78), 128: 0.97 (a ring 0.90), 256: 0.98 and 512: 0.97 (rows in the shared
# memory of six blocks an SM 0.89, 0.87), 1 MiB 0.91, of 4-byte numbers 0.95 (in stages 0.77, 0.88); 251 KiB 0.98, 297:
# 0.95. Less good: numbers in registers, exponentials once: 0.80 at 128 KiB; 512 threads: 0.91 at 512 KiB, 0.77 at 1
# MiB; 16 blocks of 5 vectors 0.80 at 297 KiB, 4 of these 0.94 at 80; 2 MiB by 512 threads with 16 vectors 0.69. As
# good, but not as simple: bulk copies to shared memory, 0.97 at 128 KiB.
BLOCKS = {8: 4, 12: 3, 16: 2}
# Of y, and as many of dy. Times of 2^29 elements of 2 bytes, one H100 80 GB, 2026-11-27, in brackets those of a ring;
# the roof is 1051 us. 64 KiB 1051 us (1241), 80: 1053 (1264), 128: 1050 (1107), 256: 1051 (1132), 512: 1053 (1112). Of
# four vectors four blocks an SM 1056 to 1057; clusters half as large, with eight vectors, 1057 to 1060
BACKWARD_BLOCKS = {4: 3, 6: 3, 8: 2}


def cluster_config(N: int, dtype: str, device: Device, blocks: Mapping[int, int] = BLOCKS) -> ClusterRowsConfig | None:
    """The smallest cluster that holds a row of N elements; None where none does, and where a block holds it.

    blocks: as BLOCKS. Rows of the fewest vectors in it need no cluster; of more than the second most, the largest one.
    """
    step, (least, few, most) = THREADS * storage(dtype).vector, blocks
    if step * least >= N:
        return None
    clusters = [cluster for cluster in (2, 4, 8, 16) if cluster <= device.max_cluster]
    cluster = next((cluster for cluster in clusters if cluster * few * step >= N), clusters[-1])
    for vectors in range(1, (most if dtype != "float64" else few) + 1):
        if cluster * vectors * step >= N:
            resident = next(blocks[many] for many in blocks if vectors <= many)
            return ClusterRowsConfig(THREADS, vectors, cluster, resident - (dtype == "float64"))
    return None


@cache
def _row_configs(shapes: tuple[tuple[int, int, int], ...], dtype: str, aligned: bool) -> list[tuple[int, RowsConfig]]:
    """The longest row that each config keeps in registers, and the config, by rising length."""
    configs = [RowsConfig(*shape, aligned) for shape in shapes]
    return [(config.columns(dtype), config) for config in configs]


def rows_config(N: int, dtype: str, backward: bool, aligned: bool) -> RowsConfig | None:
    """The first config that keeps a row of N elements in registers, None if none does."""
    shapes = (BACKWARD_ROWS if backward else FORWARD_ROWS) if aligned else UNALIGNED_ROWS
    return next((config for columns, config in _row_configs(shapes, dtype, aligned) if columns >= N), None)
