"""Mutants that are no worse than the kernel, and why. Listed here and dead is an error, as is a survivor."""

from __future__ import annotations

import re

# (the mutant as it is printed, without the line, a pattern): why nothing is wrong with it
HARMLESS = {
    r".*ring(_backward)? .*ring\.acquire > mbarrier_wait_cta: the next mbarrier": "stages are filled in turn, and the "
    "last but one waits for the last: a round begins when all of the round before is released: late, not wrong",
    r".*ring(_backward)? .*ring\.release > mbarrier_arrive: the next mbarrier": "the first stage is then freed by the "
    "last: a round begins when all of the round before is released: late, not wrong",
    r"softmax_ring_backward ring\.wait > mbarrier_wait_cta#2: left out": "a row that was read once stays: "
    "the second wait is over before it begins, and tells the stage",
    r"norm_ring ring\.release > bar_warp_sync: left out": "the lanes meet in the shuffles of their sums between their "
    "last read and the release",
    r"retention_recurrent syncthreads#1: left out": "what the next tokens overwrite was read before the block met for "
    "the parts of the sums, and these are written again after it meets for the tokens",
}
# kernels that hold a verb which waits and do not come to it, whatever they are built for
NEVER = {"norm_long_rows_backward": "one row a block at a time: its sums have one owner, and nobody to meet"}


def reason(kernel: str, told: str) -> str | None:
    """Why the mutant of a kernel is harmless, None if it is not."""
    return next((why for pattern, why in HARMLESS.items() if re.fullmatch(pattern, f"{kernel} {told}")), None)
