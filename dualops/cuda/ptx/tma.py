"""TMA copies of boxes between an array, described by a tensor map, and shared memory (sm_90 and later).

Coordinates are those of the box's first element; the array's last axis comes first. Parts outside of the array are
loaded as zeros and not stored; an mbarrier counts the bytes of whole boxes. A stored box must not begin before the
array: an H200 reports an illegal instruction. Loaded boxes may begin there, and stored boxes may end after the array.

In the simulator, a load lands as late as possible, and its destination is NaN until then. A store reads as late as
`cp_async_bulk_wait_group_read` allows, and writes as late as `cp_async_bulk_wait_group` allows (`async_copy`).

Maps are parameters of the kernel, `backend.tensor_map`.
"""

from __future__ import annotations

import inspect

from ..simulator import Late, Store, current, stores, tensor_map_at
from .asm import family, instruction

RANKS = (2, 3, 4, 5)


@family(rank=RANKS, multicast=(False, True))
def cp_async_bulk_tensor(rank, multicast=False):
    """Start loading a box. multicast: load it into all blocks of the cluster whose bits `mask` has.

    It has the same address in each block's shared memory, and the mbarrier at the same address counts the bytes.
    """
    more = ".multicast::cluster" if multicast else ""
    boxed, names = _coordinates(rank)
    kinds = ", ".join(["i32"] * rank)

    def load(to, to_index, tensor_map, *rest):
        """Load the whole box, including zeros."""
        coordinates, (bar, bar_index, *masks) = rest[:rank], rest[rank:]
        thread = current()
        ranks = [thread.block.rank]
        if multicast:
            ranks = _ranks(thread, masks[0])
        found = _usable(tensor_map, rank)
        places = found.places(thread.block.memory.address(to, to_index))
        barriers = [thread.block.cluster[r].mbarrier(bar.key, bar_index, copies=True) for r in ranks]
        memories = [thread.block.cluster[r].memory for r in ranks]
        for memory in memories:
            if memory.has_unfenced(places):
                raise RuntimeError("a box is loaded over what threads wrote, without fence.proxy.async in between")
            memory.write_by_unit(places, 0xFF)

        def land(scheduler):
            data = found.load(coordinates)
            for memory, barrier in zip(memories, barriers, strict=True):
                memory.write_by_unit(places, data)
                barrier.complete(scheduler, found.nbytes)

        thread.scheduler.in_flight.append(land)
        thread.scheduler.pass_by()

    parameters = ["to", "to_index", "tensor_map", *names, "bar", "bar_index", *(["mask"] if multicast else [])]
    return instruction(
        f"(shared[i32], i64, {kinds}, shared[i32]{', u16' if multicast else ''}) -> void",
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes{more} "
        f"[{{to}}], [{{tensor_map}}, {boxed}], [{{bar}}]{', {mask}' if multicast else ''};",
        section="9.7.9.25.5.2",
        name=f"cp_async_bulk_tensor_{rank}d" + ("_multicast" if multicast else ""),
    )(_named(load, parameters))


@family(rank=RANKS)
def cp_async_bulk_tensor_store(rank):
    """Start storing a box from shared memory; it belongs to the thread's next group."""
    boxed, names = _coordinates(rank)

    def store(tensor_map, *rest):
        """Store the part of the box that is in the array."""
        coordinates, (source, index) = rest[:rank], rest[rank:]
        memory, found = current().block.memory, _usable(tensor_map, rank)
        if min(coordinates) < 0:
            raise RuntimeError(f"a box is stored from {tuple(map(int, coordinates))} on, before its array begins")
        late = Late(memory, found.places(memory.address(source, index)))
        found.forget(coordinates)
        stores().groups[-1].append(Store(late, lambda data: found.store(coordinates, data)))

    return instruction(
        f"(i64, {', '.join(['i32'] * rank)}, shared[i32]) -> void",
        f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [{{tensor_map}}, {boxed}], [{{source}}];",
        section="9.7.9.25.5.2",
        name=f"cp_async_bulk_tensor_{rank}d_store",
    )(_named(store, ["tensor_map", *names, "source", "source_index"]))


@instruction("(i64) -> void", "prefetch.tensormap [{tensor_map}];", section="9.7.9.15")
def prefetch_tensormap(tensor_map):
    """Prefetch a tensor map."""
    tensor_map_at(tensor_map)


def _coordinates(rank):
    """Return the list of coordinates in the text, and their names."""
    names = [f"c{i}" for i in range(rank)]
    return "{" + ", ".join(f"{{{name}}}" for name in names) + "}", names


def _named(twin, names):
    """Return a twin whose parameters have these names."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    twin.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return twin


def _usable(address, rank):
    """Return the tensor map at an address. Raises RuntimeError if the block may not use it in this way."""
    found = tensor_map_at(address)
    if len(found.box) != rank:
        raise RuntimeError(f"{rank} coordinates for a tensor map of {len(found.box)} axes")
    return found


def _ranks(thread, mask):
    """Return the blocks of a mask's bits. Raises RuntimeError if they may not run yet, or do not exist."""
    if not thread.in_cluster:
        raise RuntimeError("a box is sent to the cluster before barrier.cluster.wait: its blocks may not run yet")
    mask, size = int(mask), len(thread.block.cluster)
    if not 0 < mask < 1 << size:
        raise RuntimeError(f"a box is sent to the blocks of {mask:#06x}, in a cluster of {size}")
    return [r for r in range(size) if mask >> r & 1]
