"""The Configs of softmax's kernels, with what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from ..launch.arrays import cdiv
from ..launch.device import Device
from ..rows.chunks import MOST_STAGES, ChunksConfig
from ..rows.cluster import ClusterRowsConfig
from ..rows.registers import RowsConfig
from ..tile.storage import storage

# (row_threads, vectors, rows) by rising length of row: the first that holds the row is taken. Shares of the roof that a
# plain kernel with the same reads and writes reaches: bf16, H200, 32768 rows, 2026-11-21, both still with plain stores.
FORWARD_ROWS = (
    (32, 1, 4),
    (32, 2, 4),
    (64, 2, 2),  # 1024 columns: 0.98; one warp per row with 4 vectors 0.96
    (128, 2, 1),
    (256, 2, 1),  # 4096 columns: 0.97; 128 threads with 4 vectors 0.95
    (256, 4, 1),
    (512, 4, 1),  # 16384 columns: 0.97; 256 threads with 8 vectors 0.96, 1024 with 2 0.66
    (1024, 4, 1),
)
BACKWARD_ROWS = (
    (32, 1, 4),
    (32, 2, 4),
    (64, 2, 2),  # 1024 columns: 1.00; four rows per block 0.97
    (128, 2, 1),
    (128, 4, 2),  # 4096 columns: 0.99; 512 threads with 1 vector 0.98
    (256, 4, 1),
    (512, 4, 1),  # 16384 columns: 0.97; 1024 threads with 2 vectors 0.97
)
# rows that are not aligned: one element per load, so more loads per thread
UNALIGNED_ROWS = ((32, 4, 4), (32, 16, 4), (128, 16, 1), (512, 16, 1))

THREADS = 256  # of a block
# Vectors a thread, at most, and blocks that an SM has registers for. Shares of the roof of 2^29 elements of 2 bytes or
# 2^28 of 4, H200, 2026-11-26; in brackets what such rows took before: 48 KiB 0.97 (a block of 1024 threads 0.78), 64
# KiB 0.96 to 0.97 (0.89), 80: 0.97 (a ring 0.78), 128: 0.97 (a ring 0.90), 256: 0.98 and 512: 0.97 (rows in the shared
# memory of six blocks per SM 0.89, 0.87), 1 MiB 0.91, of 4-byte numbers 0.95 (in stages 0.77, 0.88); 251 KiB 0.98, 297:
# 0.95. Less good: numbers in registers, exponentials once: 0.80 at 128 KiB; 512 threads: 0.91 at 512 KiB, 0.77 at 1
# MiB; 16 blocks of 5 vectors 0.80 at 297 KiB, 4 of these 0.94 at 80; 2 MiB by 512 threads with 16 vectors 0.69. As
# good, but not as simple: bulk copies to shared memory, 0.97 at 128 KiB.
BLOCKS = {8: 4, 12: 3, 16: 2}
# Of y, and as many of dy. Times of 2^29 elements of 2 bytes, one H100 80 GB, 2026-11-27, in brackets those of a ring;
# the roof is 1051 us. 64 KiB 1051 us (1241), 80: 1053 (1264), 128: 1050 (1107), 256: 1051 (1132), 512: 1053 (1112). Of
# four vectors four blocks per SM 1056 to 1057; clusters half as large, with eight vectors, 1057 to 1060
BACKWARD_BLOCKS = {4: 3, 6: 3, 8: 2}
# stages, 0: as many as there is room for; chunks, 0: all but one of these. Shares of the roof are those of H200,
# 2026-11-26, 2^29 elements of 2 bytes or 2^28 of 4.
FORWARD_RING = (
    ChunksConfig(16, 2, 0, 1, 0),  # of shorter rows, for who asks for it
    ChunksConfig(16, 2, 0, 8, 0),  # 1 MiB: 0.88; two blocks per SM 0.86, read twice 0.63
    ChunksConfig(8, 2, 0, 16, 0, min_blocks=2),  # 2 MiB: 0.73; one block an SM 0.69, read twice 0.58
    ChunksConfig(16, 2, 0, 16, 0),  # 4 MiB: 0.79; two blocks per SM 0.67, read twice 0.63
)
# 128 KiB to 512 KiB: 0.95, 1 MiB 0.91 (read twice 0.58), 2 MiB 0.86 (0.56), 4 MiB 0.61 (0.58)
BACKWARD_RING = tuple(ChunksConfig(12, 2, 0, cluster, 0) for cluster in (1, 2, 4, 8, 16))
# small enough for a simulator
SIMULATED_RING = tuple(ChunksConfig(4, 1, 0, cluster, 0) for cluster in (1, 2, 4, 8, 16))
LARGEST_CLUSTER = 16
KEPT_BY_SM = 1 << 10  # bytes of shared memory that an SM keeps of each block


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


def ring_configs(N: int, dtype: str, inputs: int, device: Device) -> Iterator[ChunksConfig]:
    """The first that keeps a row of N elements; else the last that there is, if it copies again what it can't keep.

    The largest cluster may copy a quarter again, which it finds in L2: two blocks per SM are worth that.
    """
    ladder = BACKWARD_RING if inputs == 2 else FORWARD_RING
    found = None
    for config in ladder if device.name != "simulator" else SIMULATED_RING:
        if config.cluster > device.max_cluster:
            break
        found = with_stages(config, dtype, inputs, device)
        if found.kept(dtype) >= (N * 3 // 4 if found.cluster == LARGEST_CLUSTER and found.min_blocks > 1 else N):
            # an even share for every block
            yield replace(found, chunks=min(found.chunks, cdiv(N, found.cluster * found.chunk(dtype))))
            return
    if found is not None:
        yield found


def with_stages(config: ChunksConfig, dtype: str, inputs: int, device: Device) -> ChunksConfig:
    """With as many stages as it asks for and as there is room for."""
    room = (device.shared_memory_per_block + KEPT_BY_SM) // config.min_blocks - KEPT_BY_SM
    stage = replace(config, stages=1).staged(dtype, inputs).nbytes
    stages = min((room - config.static_bytes(dtype)) // stage, config.stages or MOST_STAGES)
    return replace(config, stages=stages, chunks=config.chunks or stages - 1)
