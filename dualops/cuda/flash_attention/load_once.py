"""What is copied to shared memory once in a block: an mbarrier that counts the thread that copies, and its bytes.

    producer                                    readers
    once.expect(full)                           once.wait(full)
    tile.load(smem, 0, ..., full)               ...

Its mbarrier is told to all by a pipeline's `start`.
"""

from __future__ import annotations

from functools import cache

from ..compiler.backend import Members, Noun, cuda, noun, u64, verb
from ..ptx.mbarrier import mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_cta

Once = Noun  # what `load_once` makes


@cache
@noun
def load_once(nbytes: int) -> Members:
    """The verbs for so many bytes."""

    @verb
    def barrier():
        """Return full, in shared memory; once in a kernel, by all threads."""
        return cuda.shared.array(1, u64)

    @verb
    def init(full):
        """Initialize the barrier; by one thread, before a pipeline's `start`."""
        mbarrier_init(full, 0, 1)

    @verb
    def expect(full):
        """Expect the bytes; by the thread that copies."""
        mbarrier_arrive_expect_tx(full, 0, nbytes)

    @verb
    def wait(full):
        """Wait until the bytes are there."""
        mbarrier_wait_cta(full, 0, 0)

    return locals()
