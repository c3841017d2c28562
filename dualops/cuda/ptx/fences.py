"""What orders accesses of one kind before those of another: threads' and asynchronous units'."""

from __future__ import annotations

from ..simulator import current
from .asm import instruction


@instruction("() -> void", "fence.proxy.async.shared::cta;", section="9.7.13.4")
def fence_proxy_async():
    """What this thread knows to be written to shared memory is seen by products and copies that begin from now on.

    They are begun behind a barrier where other threads begin them.
    """
    current().block.memory.fence()
