"""What is copied to shared memory once in a block: an mbarrier that counts the thread that copies, and its bytes.

    producer                                    readers
    once.expect(full)                           once.wait(full)
    tile.load(smem, 0, ..., full)               ...

Its mbarrier is told to all by a pipeline's `start`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ..backend import Namespace, cuda, u64, verb
from ..ptx.mbarrier import mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_cta


class Once(Namespace):
    """The verbs."""

    barrier: Callable[..., object]  # () -> full, in shared memory; once in a kernel, by all threads
    init: Callable[..., None]  # (full): by one thread, before a pipeline's `start`
    expect: Callable[..., None]  # (full): by the thread that copies
    wait: Callable[..., None]  # (full): until the bytes are there


@cache
def copied_once(nbytes: int) -> Once:
    """The verbs for so many bytes."""

    @verb
    def barrier():
        return cuda.shared.array(1, u64)

    @verb
    def init(full):
        mbarrier_init(full, 0, 1)

    @verb
    def expect(full):
        mbarrier_arrive_expect_tx(full, 0, nbytes)

    @verb
    def wait(full):
        mbarrier_wait_cta(full, 0, 0)

    return Once(barrier=barrier, init=init, expect=expect, wait=wait)
