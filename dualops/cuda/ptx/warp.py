"""Instructions by which threads meet: shuffles of a warp, barriers of a cluster."""

from __future__ import annotations

from ..simulator import current, double, exchange, single
from .asm import instruction


@instruction(
    "(f32, i32, u32) -> f32",
    "shfl.sync.bfly.b32 {d}, {x}, {distance}, 0x1f, {mask};",
    section="9.7.9.6",
    convergent=True,
)
def shfl_bfly_f32(x, distance, mask):
    """The value that lane `lane ^ distance` brings; every lane of `mask` must come."""
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
    "(i32, i32, u32) -> i32",
    "shfl.sync.idx.b32 {d}, {x}, {source}, 0x1f, {mask};",
    section="9.7.9.6",
    convergent=True,
)
def shfl_idx_i32(x, source, mask):
    """The value that lane `source` brings; every lane of `mask` must come.

    Of what is the same in all lanes, the number of a warpgroup say, it makes what the assembler knows to be so.
    """
    return int(_from("shfl.sync.idx", x, source, mask))


@instruction(
    "(f32, i32, u32) -> f32",
    "shfl.sync.idx.b32 {d}, {x}, {source}, 0x1f, {mask};",
    section="9.7.9.6",
    convergent=True,
)
def shfl_idx_f32(x, source, mask):
    """The value that lane `source` brings; every lane of `mask` must come."""
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
    """1 if some lane brings another number than 0; every lane of `mask` must come."""
    return int(any(exchange("vote.sync.any", int(x), mask)))


@instruction(
    "(i32, u32) -> u32",
    "{ .reg .pred own; setp.ne.s32 own, {x}, 0; vote.sync.ballot.b32 {d}, own, {mask}; }",
    section="9.7.13.9",
    convergent=True,
)
def vote_ballot(x, mask):
    """A bit for each lane, whether it brings another number than 0; every lane of `mask` must come."""
    return sum(1 << lane for lane, value in enumerate(exchange("vote.sync.ballot", int(x), mask)) if value)


def _from(name, x, source, mask):
    value = exchange(name, x, mask)[source]
    if value is None:
        raise RuntimeError(f"{name}: lane {current().lane} reads lane {source}, which is not in {mask:#010x}")
    return value


@instruction("() -> void", "barrier.cluster.arrive.release.aligned;", section="9.7.13.4", convergent=True)
def barrier_cluster_arrive():
    """Say that this thread has come to the cluster's barrier, and go on."""
    thread = current()
    thread.arrival = thread.scheduler.cluster_barrier.arrive(thread.scheduler)


@instruction("() -> void", "barrier.cluster.arrive.relaxed.aligned;", section="9.7.13.4", convergent=True)
def barrier_cluster_arrive_relaxed():
    """The same, which makes nothing visible that this thread wrote, and waits for nothing that it has under way."""
    thread = current()
    thread.arrival = thread.scheduler.cluster_barrier.arrive(thread.scheduler)


@instruction("() -> void", "barrier.cluster.wait.acquire.aligned;", section="9.7.13.4", convergent=True)
def barrier_cluster_wait():
    """Wait until every thread of the cluster has come; what they wrote to shared memory before is then visible."""
    thread = current()
    if thread.arrival is None:
        raise RuntimeError("barrier.cluster.wait: this thread has not come to the cluster's barrier")
    thread.scheduler.wait(thread.arrival)
    thread.in_cluster = True


@instruction("() -> i32", "mov.u32 {d}, %cluster_ctarank;", section="10.16", pure=True)
def cluster_ctarank():
    """This block's number in its cluster."""
    return current().block.rank


@instruction("(u32) -> void", "bar.warp.sync {mask};", section="9.7.13.2", convergent=True)
def bar_warp_sync(mask):
    """Wait for the lanes of `mask`; what they wrote is then visible to one another."""
    exchange("bar.warp.sync", None, mask)


@instruction("(i32, i32) -> void", "bar.sync {number}, {threads};", section="9.7.13.1", convergent=True)
def bar_sync(number, threads):
    """Wait for `threads` threads, in whole warps, at the block's barrier 1 to 15; what they wrote is then visible."""
    thread = current()
    thread.block.named_barrier(number, threads).wait(thread.scheduler)


@instruction("(i32, i32) -> void", "bar.arrive {number}, {threads};", section="9.7.13.1", convergent=True)
def bar_arrive(number, threads):
    """Count this thread at the block's barrier 1 to 15, for `threads` threads with those that wait, and go on."""
    thread = current()
    thread.block.named_barrier(number, threads).pass_by(thread.scheduler)
