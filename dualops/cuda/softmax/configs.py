"""The Configs of softmax's kernels, with measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..launch.arrays import cdiv
from ..launch.device import Device
from ..rows.chunks import MOST_STAGES, ChunksConfig
from ..rows.cluster import ClusterRowsConfig, smallest_cluster
from ..rows.registers import UNALIGNED, RowsConfig
from ..tile.storage import storage

# In the order of the row length: the first that can hold the row is used. Shares of the roof, a plain kernel with the
# same reads and writes: bf16, H200, 32768 rows, 2026-11-21, both still with plain stores.
FORWARD_ROWS = (
    RowsConfig(32, 1, 4),
    RowsConfig(32, 2, 4),
    RowsConfig(64, 2, 2),  # 1024 columns: 0.98; one warp per row with 4 vectors 0.96
    RowsConfig(128, 2, 1),
    RowsConfig(256, 2, 1),  # 4096 columns: 0.97; 128 threads with 4 vectors 0.95
    RowsConfig(256, 4, 1),
    RowsConfig(512, 4, 1),  # 16384 columns: 0.97; 256 threads with 8 vectors 0.96, 1024 with 2 0.66
    RowsConfig(1024, 4, 1),
)
BACKWARD_ROWS = (
    RowsConfig(32, 1, 4),
    RowsConfig(32, 2, 4),
    RowsConfig(64, 2, 2),  # 1024 columns: 1.00; four rows per block 0.97
    RowsConfig(128, 2, 1),
    RowsConfig(128, 4, 2),  # 4096 columns: 0.99; 512 threads with 1 vector 0.98
    RowsConfig(256, 4, 1),
    RowsConfig(512, 4, 1),  # 16384 columns: 0.97; 1024 threads with 2 vectors 0.97
)

THREADS = 256  # threads per block
# Most vectors per thread -> blocks for which an SM has registers. Shares of the roof with 2^29 elements of 2 bytes or
# 2^28 of 4, H200, 2026-11-26; in parentheses: the previous kernel for such rows.
#   48 KiB: 0.97 (a block of 1024 threads 0.78); 64: 0.96 to 0.97 (0.89); 80: 0.97 (a ring 0.78); 128: 0.97 (a ring
#   0.90); 251: 0.98; 256: 0.98 and 512: 0.97 (rows in the shared memory of six blocks per SM 0.89, 0.87); 297: 0.95;
#   1 MiB: 0.91, of 4-byte numbers 0.95 (in stages 0.77, 0.88).
# Slower variants: numbers in registers and exponentials computed once: 0.80 at 128 KiB; 512 threads: 0.91 at 512 KiB,
# 0.77 at 1 MiB; 16 blocks of 5 vectors: 0.80 at 297 KiB; 4 such blocks: 0.94 at 80 KiB; 512 threads with 16 vectors:
# 0.69 at 2 MiB. As fast, but not as simple: bulk copies to shared memory, 0.97 at 128 KiB.
BLOCKS = {8: 4, 12: 3, 16: 2}
# The same for backward: vectors of y, and as many of dy. Times of 2^29 elements of 2 bytes, one H100 80 GB, 2026-11-27;
# in parentheses: a ring. The roof is 1051 us. 64 KiB: 1051 us (1241); 80: 1053 (1264); 128: 1050 (1107); 256: 1051
# (1132); 512: 1053 (1112). Four vectors with four blocks per SM: 1056 to 1057; clusters half as large, with eight
# vectors: 1057 to 1060
BACKWARD_BLOCKS = {4: 3, 6: 3, 8: 2}
# stages, 0: as many as fit; chunks, 0: all stages except one. Shares of the roof: H200, 2026-11-26, 2^29 elements of 2
# bytes or 2^28 of 4.
FORWARD_RING = (
    ChunksConfig(16, 2, 0, 1, 0),  # for shorter rows, only on request
    ChunksConfig(16, 2, 0, 8, 0),  # 1 MiB: 0.88; two blocks per SM 0.86, read twice 0.63
    ChunksConfig(8, 2, 0, 16, 0, min_blocks=2),  # 2 MiB: 0.73; one block per SM 0.69, read twice 0.58
    ChunksConfig(16, 2, 0, 16, 0),  # 4 MiB: 0.79; two blocks per SM 0.67, read twice 0.63
)
# 128 KiB to 512 KiB: 0.95, 1 MiB 0.91 (read twice 0.58), 2 MiB 0.86 (0.56), 4 MiB 0.61 (0.58)
BACKWARD_RING = tuple(ChunksConfig(12, 2, 0, cluster, 0) for cluster in (1, 2, 4, 8, 16))
# small enough for the simulator
SIMULATED_RING = tuple(ChunksConfig(4, 1, 0, cluster, 0) for cluster in (1, 2, 4, 8, 16))
LARGEST_CLUSTER = 16
KEPT_BY_SM = 1 << 10  # bytes of shared memory that an SM keeps of each block


def cluster_config(N: int, dtype: str, device: Device, blocks: Mapping[int, int] = BLOCKS) -> ClusterRowsConfig | None:
    """Return the smallest cluster that can hold a row of N elements; None if none can, or if a block can.

    blocks: like BLOCKS. Rows of the fewest vectors in it need no cluster. Rows of more than the second most vectors
    need the largest cluster.
    """
    step, (least, few, most) = THREADS * storage(dtype).vector, blocks
    if step * least >= N:
        return None
    found = smallest_cluster(N, step, few, few if dtype == "float64" else most, device)
    if found is None:
        return None
    cluster, vectors = found
    resident = next(blocks[many] for many in blocks if vectors <= many)
    return ClusterRowsConfig(THREADS, vectors, cluster, resident - (dtype == "float64"))


def rows_config(N: int, dtype: str, backward: bool, aligned: bool) -> RowsConfig | None:
    """Return the first Config that keeps a row of N elements in registers, or None."""
    ladder = (BACKWARD_ROWS if backward else FORWARD_ROWS) if aligned else UNALIGNED
    return next((config for config in ladder if config.columns(dtype) >= N), None)


def ring_configs(N: int, dtype: str, inputs: int, device: Device) -> Iterator[ChunksConfig]:
    """Yield the first Config that can keep a row of N elements; else the last one, if it may copy a part twice.

    The largest cluster may copy a quarter of a row twice, the second time from L2: with two blocks per SM that is
    faster.
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
    """Return the Config with the stages that it wants, or as many as fit."""
    room = (device.shared_memory_per_block + KEPT_BY_SM) // config.min_blocks - KEPT_BY_SM
    stage = replace(config, stages=1).staged(dtype, inputs).nbytes
    stages = min((room - config.static_bytes(dtype)) // stage, config.stages or MOST_STAGES)
    return replace(config, stages=stages, chunks=config.chunks or stages - 1)
