"""Order threads' accesses before those of asynchronous units."""

from __future__ import annotations

from ..simulator import current
from .asm import instruction


@instruction("() -> void", "fence.proxy.async.shared::cta;", section="9.7.13.4")
def fence_proxy_async():
    """Make writes to shared memory that this thread sees visible to products and copies that start after this.

    If another thread starts them, a barrier must follow the fence.
    """
    current().block.memory.fence()
