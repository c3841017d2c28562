"""Barriers in shared memory that count threads and the bytes of copies (sm_90 and later)."""

from __future__ import annotations

from ..simulator import MBarrier, current
from .asm import instruction


@instruction("(shared[i32], u32) -> void", "mbarrier.init.shared::cta.b64 [{bar}], {count};", section="9.7.13.15.9")
def mbarrier_init(bar, index, count):
    """Initialize an mbarrier whose phases need `count` arrivals."""
    current().block.mbarriers[bar.key, index] = MBarrier(f"mbarrier {index}", count)


@instruction("() -> void", "fence.mbarrier_init.release.cluster;", section="9.7.13.4")
def fence_mbarrier_init():
    """Make initialised mbarriers visible to the cluster and to copies; a barrier of the threads must follow."""
    for barrier in current().block.mbarriers.values():
        barrier.fenced = True


@instruction("(shared[i32]) -> void", "mbarrier.arrive.shared::cta.b64 _, [{bar}];", section="9.7.13.15.13")
def mbarrier_arrive(bar, index):
    """Count this thread in the current phase."""
    thread = current()
    if thread.block.mbarrier(bar.key, index).arrive(thread.scheduler):
        thread.scheduler.pause()  # waiting work, such as a stage's next copy, runs before this thread continues


@instruction(
    "(shared[i32], u32) -> void",
    "{ .reg .b32 there; mapa.shared::cluster.u32 there, {bar}, {rank}; "
    "mbarrier.arrive.shared::cluster.b64 _, [there]; }",
    section="9.7.13.15.13",
)
def mbarrier_arrive_cluster(bar, index, rank):
    """Count this thread in the current phase of the same mbarrier in block `rank` of the cluster.

    Use it after reads of shared memory. It does not make this thread's writes visible to the other block; that would
    need a fence for the whole GPU.
    """
    thread = current()
    if rank != thread.block.rank and not thread.in_cluster:
        raise RuntimeError(f"mbarrier.arrive in block {rank} before barrier.cluster.wait: it may not run yet")
    if thread.block.cluster[rank].mbarrier(bar.key, index).arrive(thread.scheduler):
        thread.scheduler.pause()


@instruction(
    "(shared[i32], u32) -> void",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{bar}], {nbytes};",
    section="9.7.13.15.13",
)
def mbarrier_arrive_expect_tx(bar, index, nbytes):
    """Count this thread's arrival, and let the phase also wait for `nbytes` bytes of copies."""
    thread = current()
    thread.block.mbarrier(bar.key, index).arrive(thread.scheduler, nbytes)


_WAIT = (
    "{ .reg .pred done; "
    "WAIT_${:uid}: mbarrier.try_wait.parity.acquire.%s.shared::cta.b64 done, [{bar}], {parity}; "
    "@done bra DONE_${:uid}; bra WAIT_${:uid}; DONE_${:uid}: }"
)


@instruction("(shared[i32], u32) -> void", _WAIT % "cluster", section="9.7.13.15.16")
def mbarrier_wait(bar, index, parity):
    """Wait for the end of the phase of this parity: 0 for the first, then 1, then 0, ..."""
    _wait(bar, index, parity)


@instruction("(shared[i32], u32) -> void", _WAIT % "cta", section="9.7.13.15.16")
def mbarrier_wait_cta(bar, index, parity):
    """The same, for data that only this block has written or copied. `mbarrier_wait` also invalidates L1."""
    _wait(bar, index, parity)


def _wait(bar, index, parity):
    thread = current()
    barrier = thread.block.mbarrier(bar.key, index)
    while barrier.phase & 1 == parity:
        thread.scheduler.wait(barrier.event)
    thread.scheduler.come_back()
