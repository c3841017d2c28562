"""What orders accesses of one kind before those of another: threads', asynchronous units', readers of tensor maps'."""

from __future__ import annotations

from ..simulator import current, tensor_map_at
from .asm import instruction


@instruction("() -> void", "fence.proxy.async.shared::cta;", section="9.7.13.4")
def fence_proxy_async():
    """What this thread knows to be written to shared memory is seen by products and copies that begin from now on.

    They are begun behind a barrier where other threads begin them.
    """
    current().block.memory.fence()


@instruction("(i64) -> void", "fence.proxy.tensormap::generic.acquire.gpu [{tensor_map}], 128;", section="9.7.13.4")
def fence_proxy_tensormap(tensor_map):
    """A tensor map in global memory may be used by this block's copies from now on."""
    current().block.units.setdefault("tensor maps", set()).add(tensor_map_at(tensor_map).address)
