"""Instructions by which threads synchronize: shuffles of a warp, barriers of a block and of a cluster, grids.

Programmatic dependent launch (sm_90 and later): a grid's blocks may begin before the previous grid has ended. The
simulator runs one grid after another, but the twins check that an overlapping grid waits for the previous one before it
ends. Otherwise the grid after it could begin too early.
"""

from __future__ import annotations

from ..simulator import current, double, exchange, single, waited_for_grid
from .asm import instruction


@instruction(
    "(f32, i32, u32) -> f32",
    "shfl.sync.bfly.b32 {d}, {x}, {distance}, 0x1f, {mask};",
    section="9.7.9.6",
    convergent=True,
)
def shfl_bfly_f32(x, distance, mask):
    """Return x of the lane `lane ^ distance`; every lane of `mask` must call this."""
    return _from("shfl.sync.bfly", single(x), current().lane ^ distance, mask)


@instruction(
    "(f64, i32, u32) -> f64",
    "{ .reg .b32 low, high; mov.b64 {low, high}, {x}; shfl.sync.bfly.b32 low, low, {distance}, 0x1f, {mask}; "
    "shfl.sync.bfly.b32 high, high, {distance}, 0x1f, {mask}; mov.b64 {d}, {low, high}; }",
    section="9.7.9.6",
    convergent=True,
)
def shfl_bfly_f64(x, distance, mask):
    """The same for a double, as two words."""
    return _from("shfl.sync.bfly", double(x), current().lane ^ distance, mask)


@instruction(
    "(i32, i32, u32) -> i32", "shfl.sync.idx.b32 {d}, {x}, {source}, 0x1f, {mask};", section="9.7.9.6", convergent=True
)
def shfl_idx_i32(x, source, mask):
    """Return x of lane `source`; every lane of `mask` must call this.

    If x is the same in all lanes, such as the number of a warpgroup, the assembler then knows that it is.
    """
    return int(_from("shfl.sync.idx", x, source, mask))


@instruction(
    "(f32, i32, u32) -> f32", "shfl.sync.idx.b32 {d}, {x}, {source}, 0x1f, {mask};", section="9.7.9.6", convergent=True
)
def shfl_idx_f32(x, source, mask):
    """Return x of lane `source`; every lane of `mask` must call this."""
    return _from("shfl.sync.idx", single(x), source, mask)


@instruction(
    "(f64, i32, u32) -> f64",
    "{ .reg .b32 low, high; mov.b64 {low, high}, {x}; shfl.sync.idx.b32 low, low, {source}, 0x1f, {mask}; "
    "shfl.sync.idx.b32 high, high, {source}, 0x1f, {mask}; mov.b64 {d}, {low, high}; }",
    section="9.7.9.6",
    convergent=True,
)
def shfl_idx_f64(x, source, mask):
    """The same for a double, as two words."""
    return _from("shfl.sync.idx", double(x), source, mask)


@instruction(
    "(i32, u32) -> i32",
    "{ .reg .pred own, any; setp.ne.s32 own, {x}, 0; vote.sync.any.pred any, own, {mask}; selp.s32 {d}, 1, 0, any; }",
    section="9.7.13.9",
    convergent=True,
)
def vote_any(x, mask):
    """Return 1 if x is not 0 in any lane; every lane of `mask` must call this."""
    return int(any(exchange("vote.sync.any", int(x), mask)))


@instruction(
    "(i32, u32) -> u32",
    "{ .reg .pred own; setp.ne.s32 own, {x}, 0; vote.sync.ballot.b32 {d}, own, {mask}; }",
    section="9.7.13.9",
    convergent=True,
)
def vote_ballot(x, mask):
    """Return one bit per lane: whether its x is not 0; every lane of `mask` must call this."""
    return sum(1 << lane for lane, value in enumerate(exchange("vote.sync.ballot", int(x), mask)) if value)


def _from(name, x, source, mask):
    value = exchange(name, x, mask)[source]
    if value is None:
        raise RuntimeError(f"{name}: lane {current().lane} reads lane {source}, which is not in {mask:#010x}")
    return value


@instruction("() -> void", "barrier.cluster.arrive.release.aligned;", section="9.7.13.4", convergent=True)
def barrier_cluster_arrive():
    """Arrive at the cluster's barrier, and continue."""
    thread = current()
    thread.arrival = thread.scheduler.cluster_barrier.arrive(thread.scheduler)


@instruction("() -> void", "barrier.cluster.arrive.relaxed.aligned;", section="9.7.13.4", convergent=True)
def barrier_cluster_arrive_relaxed():
    """The same, without making this thread's writes visible, and without waiting for its loads in flight."""
    thread = current()
    thread.arrival = thread.scheduler.cluster_barrier.arrive(thread.scheduler)


@instruction("() -> void", "barrier.cluster.wait.acquire.aligned;", section="9.7.13.4", convergent=True)
def barrier_cluster_wait():
    """Wait until every thread of the cluster has arrived; their earlier writes to shared memory are then visible."""
    thread = current()
    if thread.arrival is None:
        raise RuntimeError("barrier.cluster.wait: this thread has not come to the cluster's barrier")
    thread.scheduler.wait(thread.arrival)
    thread.in_cluster = True


@instruction("() -> i32", "mov.u32 {d}, %cluster_ctarank;", section="10.16", pure=True)
def cluster_ctarank():
    """Return this block's number in its cluster."""
    return current().block.rank


@instruction("(u32) -> void", "bar.warp.sync {mask};", section="9.7.13.2", convergent=True)
def bar_warp_sync(mask):
    """Wait for the lanes of `mask`; their writes are then visible to each other."""
    exchange("bar.warp.sync", None, mask)


@instruction("(i32, i32) -> void", "bar.sync {number}, {threads};", section="9.7.13.1", convergent=True)
def bar_sync(number, threads):
    """Wait for `threads` threads, in whole warps, at the block's barrier 1 to 15; their writes are then visible."""
    thread = current()
    thread.block.named_barrier(number, threads).wait(thread.scheduler)


@instruction("(i32, i32) -> void", "barrier.cta.sync {number}, {threads};", section="9.7.13.1", convergent=True)
def barrier_sync(number, threads):
    """Like `bar_sync`, but warps may call it in different branches. synccheck reports such calls of `bar_sync`."""
    thread = current()
    thread.block.named_barrier(number, threads).wait(thread.scheduler)


@instruction("(i32, i32) -> void", "bar.arrive {number}, {threads};", section="9.7.13.1", convergent=True)
def bar_arrive(number, threads):
    """Arrive at the block's barrier 1 to 15 and continue. threads: all that arrive, including those that wait."""
    thread = current()
    thread.block.named_barrier(number, threads).pass_by(thread.scheduler)


@instruction("() -> void", "griddepcontrol.launch_dependents;", section="9.7.13.14")
def griddepcontrol_launch_dependents():
    """Let the next, overlapping grid begin, as soon as all blocks of this grid have called this or ended."""
    current()


@instruction("() -> void", "griddepcontrol.wait;", section="9.7.13.14")
def griddepcontrol_wait():
    """Wait until the previous grid has ended and its writes are visible."""
    waited_for_grid()
