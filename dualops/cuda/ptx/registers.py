"""Move registers between the warpgroups of a block (sm_90a).

The twins count registers. A block begins with all registers of an SM, in equal parts. A warp that wants more waits
until others have released enough. So the twins are right for kernels with one block on an SM, for which these
instructions exist.
"""

from __future__ import annotations

from ..simulator import WARP, current
from .asm import instruction

_SIDE = {1: "fewer", -1: "more"}


@instruction(
    "(imm[24..256:8]) -> void", "setmaxnreg.dec.sync.aligned.u32 {count};", section="9.7.19.5", convergent=True
)
def setmaxnreg_dec(count):
    """Keep `count` registers per thread, and release the others for setmaxnreg_inc. For all warps of a warpgroup."""
    _change("setmaxnreg.dec", count, -1)


@instruction(
    "(imm[24..256:8]) -> void", "setmaxnreg.inc.sync.aligned.u32 {count};", section="9.7.19.5", convergent=True
)
def setmaxnreg_inc(count):
    """Wait until enough registers are free for each thread to have `count`. For all warps of a warpgroup."""
    _change("setmaxnreg.inc", count, 1)


def _change(name, count, way):
    """Change the count of a warp's registers, by lane 0: after the whole warpgroup has arrived, or before it
    continues."""
    thread = current()
    pool = thread.block.registers
    meeting = pool.warpgroup(thread.warp // 4, f"{name} {count}")
    if way < 0:
        meeting.wait(thread.scheduler)
    if thread.lane == 0:
        have = pool.counts.get(thread.warp, pool.first)
        if way * (count - have) < 0:
            text = f"warp {thread.warp} has {have} registers per thread, expected {count} or {_SIDE[way]}"
            raise RuntimeError(f"{name}: {text}")
        while pool.free < WARP * (count - have):
            thread.scheduler.wait(pool.more)
        pool.counts[thread.warp] = count
        pool.give(thread.scheduler, WARP * (have - count))
    if way > 0:
        meeting.wait(thread.scheduler)
