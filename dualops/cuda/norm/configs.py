"""The Configs of the norms' kernels, best first, with measurements.

Each list is in the order of the row length, in 16-byte vectors. The first Config that can hold the row is used.
"""

from __future__ import annotations

from dataclasses import replace

from ...spec.meta import compute_dtype, itemsize
from ..launch.device import Device
from ..rows.cluster import ClusterRowsConfig, smallest_cluster
from ..rows.registers import UNALIGNED, RowsConfig
from ..tile.storage import storage
from . import gradient_configs
from .arguments import Variant
from .staging import RingConfig
from .sums import SumsConfig

# Shares of the roof, which is a plain kernel with the same reads and writes: bf16, H200, 2026-11-21, 32768 rows, and
# 8192 of 65536. At that time the plain kernel's loads bypassed L1, and it was 1.5 to 4 % slower than now.
# If w and b are loaded before the sums, they cost registers, so fewer blocks run: 0.90 instead of 0.99 at 4096
FORWARD_ROWS = (
    RowsConfig(8, 1, 16),
    RowsConfig(16, 1, 8),
    RowsConfig(32, 1, 4),
    RowsConfig(32, 2, 4),
    RowsConfig(64, 2, 2),  # 1024 columns: 1.00
    RowsConfig(128, 2, 1),
    RowsConfig(256, 2, 1),  # 4096: 0.99; 128 threads with 4 vectors 0.97, a ring 0.90
    RowsConfig(256, 4, 1),
    RowsConfig(512, 4, 1),  # 16384: 0.97; a ring of two blocks 0.89
)
# a warp's two sums cost more than another vector per thread
CENTRED_ROWS = (
    *FORWARD_ROWS[:3],
    RowsConfig(16, 4, 8),
    RowsConfig(32, 4, 4),  # 1024 columns: 0.95; 64 threads with 2 vectors 0.90
    RowsConfig(64, 4, 2),
    RowsConfig(128, 4, 1),  # 4096: 0.95; 256 threads with 2 vectors 0.84, a ring 0.86
    RowsConfig(256, 4, 1),
    RowsConfig(256, 8, 1, min_blocks=2),  # 16384: 0.96; 512 threads with 4 vectors 0.94, a ring 0.87
)

# most stages; 0: as many as fit in shared memory
# Rows from 64 KiB on, shares of the roof: H200, 2026-11-26, 2^29 elements of 2 bytes or 2^28 of 4, float32 weights. In
# parentheses: rows that are read twice (rows/reread.py), as are all longer rows. rms_norm: 2 MiB 0.56, 4 MiB 0.60;
# layer_norm, when it read rows three times: 1 MiB 0.47, 2 MiB 0.45, 4 MiB 0.46.
LONG_FORWARD = (
    # with weights in a wider dtype than x. 64 KiB: 0.91, 128: 0.92, 256 (float32): 0.92 (0.64), 512: 0.92 (0.61);
    # without overlap 0.85, 0.87, 0.89, 0.87; 512 threads the same; 128 threads and two blocks per SM 0.90. A ring that
    # only copies reaches 0.905
    *(RingConfig(256, 8, 1, 0, cluster, overlap=True) for cluster in (2, 4, 8, 16)),
    # with a residual
    *(RingConfig(256, 4, 1, 0, cluster, w_shared=cluster < 8) for cluster in (2, 4, 8)),
    *(RingConfig(512, 4, 1, 0, cluster, w_shared=True) for cluster in (8, 16)),
    # 1 MiB: 0.89 (0.61); with overlap only three stages fit: 0.80
    RingConfig(512, 8, 1, 0, 16, w_shared=True),
)
CLUSTER_THREADS = 256  # threads per block
# Clusters: most vectors per thread -> blocks for which an SM has registers; for layer_norm, and with a residual.
# Times of 2^29 elements of 2 bytes or 2^28 of 4, one H100 80 GB, 2026-11-27, weights of x's dtype; in parentheses: a
# ring. The roof is 709 us, with a residual 1418.
#   layer_norm: 48 KiB 722 us (788); 64: 730 (770); 128: 730 (772), float32 722 (781); 256: 739 (802), float32 726
#   (804); 512: 770 (757); with a residual, 128 KiB: 1445 (1519). Four vectors with three blocks: 760; two blocks: 994.
#   rms_norm: 128 KiB 719 (769), with eight vectors in clusters half as large 725 to 728; 256: 720 (771); with a
#   residual, 128 KiB: 1441 (1525).
# A cluster processes two rows, one after the other. With four and eight rows of 128 KiB, layer_norm takes 740 and 751
# us, rms_norm 725 and 737. H200, shares of the roof, 2026-11-26: rms_norm, 512 KiB 0.96 (0.93), 1 MiB 0.92. Slower
# variants: w from L1 or L2 for each row, 0.92, at 512 KiB 0.86; float32 weights of 16-bit rows, 0.92 at 128 KiB, 0.86
# at 512 (a ring 0.91, 0.93).
CLUSTER_BLOCKS = {
    (False, False): {12: 3, 16: 2},
    (False, True): {4: 4, 5: 3, 8: 2},
    (True, False): {4: 4, 6: 3},
    (True, True): {5: 3},
}
# most vectors of 16-bit numbers with which the blocks above do not spill; without w
MOST_NARROW, MOST_WITHOUT_W = 15, 6
# (dtype, whether rows lie along several axes, vectors) that spill with the blocks above, although more vectors do not
SPILL = {("float32", False, 10), ("float16", True, 10), ("float16", True, 11)}
FEW_VECTORS = {False: 6, True: 5}  # only the largest cluster has more vectors; by whether there is a residual
LEAST_VECTORS = 8  # rows of at most this many vectors fit in a block
FORWARD_RING = (
    RingConfig(8, 1, 32, 0, min_blocks=2),
    RingConfig(16, 1, 16, 0, min_blocks=2),
    RingConfig(32, 1, 8, 0, min_blocks=2),
    RingConfig(32, 2, 8, 0, min_blocks=2),
    RingConfig(64, 2, 4, 0, min_blocks=2),
    RingConfig(128, 2, 2, 0, min_blocks=2),
    RingConfig(256, 2, 1, 0, min_blocks=2),
    RingConfig(256, 4, 1, 0, w_shared=True),
    *LONG_FORWARD,
)
# Two rows alternate on an SM, since it is idle during a row's two sums: 0.87 to 0.90 at 65536 columns with 16-bit
# weights (0.77 with float32 weights, 2026-11-26); with one block per SM 0.68 to 0.72; with four blocks of 512 threads
# per row 0.89. The second Config of a pair is for a residual and wide weights.
CENTRED_FORWARD_RING = (
    *FORWARD_RING[:7],
    *(
        config
        for cluster in (1, 2, 4, 8)
        for config in (
            RingConfig(128, 8, 1, 0, cluster, min_blocks=2, w_shared=True),
            RingConfig(256, 4, 1, 0, cluster),
        )
    ),
    RingConfig(512, 4, 1, 0, 8, w_shared=True),  # 256 KiB: 0.90 (0.49); 256 threads 0.88
    # 512 KiB: 0.87 with weights of 16 bits (0.44), without overlap 0.80
    RingConfig(256, 8, 1, 0, 16, w_shared=True, overlap=True),
    RingConfig(256, 8, 1, 0, 16, w_shared=True),  # with a residual
)
RINGS = {False: FORWARD_RING, True: CENTRED_FORWARD_RING}
# small enough for the simulator
SIMULATED_RING = (RingConfig(32, 1, 2, 0), *(RingConfig(32, 1, 1, 0, cluster) for cluster in (2, 4, 8)))
MOST_STAGES = 16
LEAST_STAGES_AHEAD = 4  # least stages with overlap: the row that is written, the next one, and two that are loaded
STATIC = 4 << 10  # bytes of shared memory for barriers and parts; usually fewer are needed
BARRIERS = 1 << 10  # bytes for barriers only
MOST_NUMBERS = 128 << 10  # most bytes of registers for a block's numbers of a row: half of an SM's registers
KEPT_BY_SM = 1 << 10  # bytes of shared memory that an SM keeps of each block


def rows_config(N: int, variant: Variant, aligned: bool) -> RowsConfig | None:
    """Return the first Config that keeps a row of N elements in registers, or None."""
    if variant.backward:
        ladder = gradient_configs.ROWS[variant.centred] if aligned else gradient_configs.UNALIGNED
    else:
        ladder = (CENTRED_ROWS if variant.centred else FORWARD_ROWS) if aligned else UNALIGNED
    found = next((config for config in ladder if config.columns(variant.dtype) >= N), None)
    if found and variant.backward and variant.added and variant.weight_gradients > 1:
        return replace(found, min_blocks=min(found.min_blocks, 2))  # with three blocks per SM it spills on sm_80
    return found


def cluster_config(N: int, variant: Variant, device: Device) -> ClusterRowsConfig | None:
    """Return the smallest cluster that can hold a row of N elements; None if none can, or if a block can.

    It is not used for weights in a wider dtype than x, which a ring reads less often. It is used only on Hopper: for
    Blackwell, the compiler does not unroll loops over a thread's vectors, and rows would be in local memory.
    """
    if not {variant.w, variant.b} <= {None, variant.dtype} or not device.has_wgmma:
        return None
    step, blocks = CLUSTER_THREADS * storage(variant.dtype).vector, CLUSTER_BLOCKS[variant.centred, variant.added]
    if step * LEAST_VECTORS >= N:
        return None
    found = smallest_cluster(N, step, FEW_VECTORS[variant.added], max(blocks), device)
    if found is None:
        return None
    cluster, vectors = found
    return ClusterRowsConfig(CLUSTER_THREADS, vectors, cluster, _blocks_of_cluster(vectors, variant), rows=2)


def _blocks_of_cluster(vectors: int, variant: Variant) -> int:
    """Return the number of blocks per SM for which no registers spill.

    It is smaller for 64-bit numbers, for rows along several axes, and for many 16-bit numbers. Without w, the assembler
    uses more registers for the latter.
    """
    blocks = CLUSTER_BLOCKS[variant.centred, variant.added]
    resident = next(blocks[most] for most in blocks if vectors <= most)
    narrow = itemsize(variant.dtype) == 2 and not variant.added
    many = narrow and vectors > (MOST_NARROW if variant.w else MOST_WITHOUT_W)
    several = variant.rank > 1
    spills = not variant.added and (variant.dtype, several, vectors) in SPILL
    return max(1, resident - (variant.dtype == "float64") - several - many - spills)


def ring_config(N: int, variant: Variant, device: Device) -> RingConfig | None:
    """Return the first Config that can hold a row of N elements, with two stages, or None."""
    if not device.has_bulk_copies:
        return None
    dtype, number = variant.dtype, itemsize(compute_dtype(variant.dtype))
    ladder = gradient_configs.rings(N, variant, device) if variant.backward else RINGS[variant.centred]
    if device.name == "simulator":
        ladder = (gradient_configs.with_place_for_w(config, variant) for config in SIMULATED_RING)
    for config in ladder:
        if config.cluster * config.columns(dtype) < N or config.cluster > device.max_cluster:
            continue
        if config.rows * config.columns(dtype) * number >= MOST_NUMBERS:
            continue
        config = with_stages(config, variant, device)
        if config.stages >= (LEAST_STAGES_AHEAD if config.overlap and not variant.backward else 2):
            return config
    return None


def with_stages(config: RingConfig, variant: Variant, device: Device) -> RingConfig:
    """Return the Config with the stages that it wants, or as many as fit."""
    stage = replace(config, stages=1).layout(variant).stages.nbytes
    kept = replace(config, stages=0).layout(variant).nbytes
    number = itemsize(compute_dtype(variant.dtype))
    own = config.columns(variant.dtype) * number if config.rows > 1 else 0
    parts = (4 << config.overlap) * config.row_warps * config.rows * config.cluster * number
    static = max(STATIC, BARRIERS + parts)
    room = (device.shared_memory_per_block + KEPT_BY_SM) // config.min_blocks - KEPT_BY_SM - own - static - kept
    return replace(config, stages=max(min(room // stage, config.stages or MOST_STAGES), 0))


def sums_config(tiles: int, device: Device) -> SumsConfig:
    """Return the Config for tiles * LANES columns of dw and db: many small blocks, if there are two for each SM.

    Times on an H200, 2026-11-28, including the launch, with 16 slices, 8, and 4 with 16 loads each: 128 tiles with 198
    slots 6.6, 6.7 and 6.4 us; 256 tiles 6.7, 6.2, 6.3; 512 tiles with 66 slots 8.7, 6.3, 6.3; 1024 tiles 14.6, 9.1,
    8.3. Few tiles (short rows) may have more slots, so they have 16 slices.
    """
    if device.name == "simulator":
        return SumsConfig(2)
    if tiles <= device.sms:
        return SumsConfig(16)
    return SumsConfig(8) if tiles <= 2 * device.sms else SumsConfig(4, batch=16)
