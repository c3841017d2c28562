"""Asynchronous bulk copies; mbarriers and groups track their completion (sm_90 and later).

An mbarrier tracks copies to shared memory. Copies from shared memory are in groups of the thread that starts them. For
boxes of arrays see `tma`.

The twins delay copies on purpose. A copy to shared memory lands only when no thread can run, and its destination is NaN
from the moment it is issued. So a thread that reads before the barrier's phase has ended, or that releases a stage
before it has read it, sees NaN. A copy from shared memory reads until its thread waits for it, and does not see writes
of threads without `fence_proxy_async`.
"""

from __future__ import annotations

import numpy as np

from ..simulator import Late, Store, current, stores
from .asm import instruction


@instruction(
    "(shared[i32], global[i64], u32, shared[i32]) -> void",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{to}], [{x}], {nbytes}, [{bar}];",
    section="9.7.9.25.4.1",
)
def cp_async_bulk(to, to_index, x, index, nbytes, bar, bar_index):
    """Start copying `nbytes` (a multiple of 16, both ends aligned to 16) from global to shared memory."""
    thread, index, to_index, nbytes = current(), int(index), int(to_index), int(nbytes)
    count = nbytes // x.data.itemsize
    if nbytes % 16 or (x.data.ctypes.data + index * x.data.itemsize) % 16 or to_index * to.data.itemsize % 16:
        raise IndexError(f"cp.async.bulk of {nbytes} bytes from {x.name}[{index}]: not in multiples of 16 bytes")
    for pointer, first in ((x, index), (to, to_index)):
        if not 0 <= first <= first + count <= pointer.size:
            pointer.astray(f"copied as {count} elements", first)
    memory, start = thread.block.memory, thread.block.memory.address(to, to_index)
    memory.copied(start, np.full(nbytes, 0xFF, np.uint8))
    barrier = thread.block.mbarrier(bar.key, bar_index, copies=True)

    def land(scheduler):
        memory.copied(start, x.data[index : index + count].view(np.uint8))
        barrier.complete(scheduler, nbytes)

    thread.scheduler.in_flight.append(land)
    thread.scheduler.pass_by()


@instruction(
    "(global[i64], shared[i32], u32) -> void",
    "cp.async.bulk.global.shared::cta.bulk_group [{y}], [{source}], {nbytes};",
    section="9.7.9.25.4.1",
)
def cp_async_bulk_store(y, index, source, source_index, nbytes):
    """Start copying `nbytes` from shared to global memory; in the thread's next group."""
    there, late = _out(y, int(index), source, int(source_index), int(nbytes))
    there.view(np.uint8)[:] = 0xFF

    def land(data):
        there[:] = data.view(there.dtype)

    stores().groups[-1].append(Store(late, land))


@instruction(
    "(global[i64], shared[i32], u32) -> void",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{y}], [{source}], {nbytes};",
    section="9.7.9.25.4.2",
)
def cp_reduce_async_bulk_add_f32(y, index, source, source_index, nbytes):
    """Start adding `nbytes` of floats in shared memory to those in global memory; in the thread's next group."""
    there, late = _out(y, int(index), source, int(source_index), int(nbytes))

    def land(data):
        there.view(np.float32)[:] += data.view(np.float32)

    stores().groups[-1].append(Store(late, land))


def _out(y, index, source, source_index, nbytes):
    """Return the destination of a copy, and its source."""
    count = nbytes // y.itemsize
    if nbytes % 16 or (y.address + index * y.itemsize) % 16 or source_index * source.itemsize % 16:
        raise IndexError(f"cp.async.bulk of {nbytes} bytes to {y.name}[{index}]: not in multiples of 16 bytes")
    for pointer, first, size in ((y, index, count), (source, source_index, nbytes // source.itemsize)):
        if not 0 <= first <= first + size <= pointer.size:
            pointer.astray(f"copied as {size} elements", first)
    memory = current().block.memory
    start = memory.address(source, source_index)
    return y.data[index : index + count], Late(memory, np.arange(start, start + nbytes))


@instruction("() -> void", "cp.async.bulk.commit_group;", section="9.7.9.25.6.1")
def cp_async_bulk_commit_group():
    """Put this thread's copies from shared memory that are in no group yet into a new group, which may be empty."""
    stores().commit()


@instruction("(imm[0..63]) -> void", "cp.async.bulk.wait_group {pending};", section="9.7.9.25.6.2")
def cp_async_bulk_wait_group(pending):
    """Wait until all groups of this thread except the latest `pending` are written."""
    stores().wait(pending)


@instruction("(imm[0..63]) -> void", "cp.async.bulk.wait_group.read {pending};", section="9.7.9.25.6.2")
def cp_async_bulk_wait_group_read(pending):
    """Wait until these groups have read shared memory, so that it may be overwritten."""
    stores().wait_read(pending)


_ST_ASYNC = (
    "{ .reg .b32 there, bell; "
    "mapa.shared::cluster.u32 there, {to}, {rank}; mapa.shared::cluster.u32 bell, {bar}, {rank}; "
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.%s [there], {{a}, {b}}, [bell]; }"
)


@instruction("(shared[i32], i32, f32, f32, shared[i32]) -> void", _ST_ASYNC % "f32", section="9.7.9.12")
def st_async_v2_f32(to, index, rank, a, b, bar, bar_index):
    """Start writing two floats into block `rank`'s shared array; its mbarrier counts 8 bytes."""
    _store_later(to, index, rank, (a, b), bar, bar_index)


@instruction("(shared[i32], i32, f64, f64, shared[i32]) -> void", _ST_ASYNC % "f64", section="9.7.9.12")
def st_async_v2_f64(to, index, rank, a, b, bar, bar_index):
    """Start writing two doubles into block `rank`'s shared array; its mbarrier counts 16 bytes."""
    _store_later(to, index, rank, (a, b), bar, bar_index)


def _store_later(to, index, rank, values, bar, bar_index):
    thread = current()
    if len(thread.block.cluster) < 2:
        raise RuntimeError("st.async: an illegal instruction in a kernel that was launched without a cluster")
    if rank != thread.block.rank and not thread.in_cluster:
        raise RuntimeError(f"st.async to block {rank} of the cluster before barrier.cluster.wait: it may not run yet")
    block = thread.block.cluster[rank]
    barrier = block.mbarrier(bar.key, bar_index, copies=True)
    array = block.shared_array(to.key, to.size, to.data.dtype)
    if not 0 <= index <= index + 2 <= array.size:
        array.astray("written as 2 elements", index)
    array.data[index : index + 2].view("u1")[:] = 0xFF

    def land(scheduler):
        array.data[index : index + 2] = values
        barrier.complete(scheduler, 2 * array.data.itemsize)

    thread.scheduler.in_flight.append(land)


@instruction("() -> void", "fence.proxy.async.shared::cta;", section="9.7.13.4")
def fence_proxy_async():
    """Make writes to shared memory that this thread sees visible to products and copies that start after this.

    If another thread starts them, a barrier must follow the fence.
    """
    current().block.memory.fence()
