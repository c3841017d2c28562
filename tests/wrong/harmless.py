"""Mutants that are no worse than the kernel, and why. Listed here and dead is an error, as is a survivor."""

from __future__ import annotations

import re

# (the mutant as it is printed, without the line, a pattern; after `case: ` in that problem alone): why nothing is wrong
HARMLESS = {
    r"softmax_ring_backward ring\.wait > mbarrier_wait_cta#2: left out": "a row that was read once stays: "
    "the second wait is over before it begins, and tells the stage",
    r"norm_ring ring\.release > bar_warp_sync: left out": "the lanes meet in the shuffles of their sums between their "
    "last read and the release",
    r"retention_recurrent syncthreads#1: left out": "what the next tokens overwrite was read before the block met for "
    "the parts of the sums, and these are written again after it meets for the tokens",
    r"flash_attention_(sm90 register_mma\.add > wgmma_fence#1|(dq_sm90 warpgroup_mma\.start > warpgroup_mma\.issue > "
    r"wgmma_fence#[23]|dkv_sm90 warpgroup_mma\.start > warpgroup_mma\.issue > wgmma_fence#2|"
    r"fused_sm90 register_mma\.add > wgmma_fence#2)): left out": "Q @ K.T, K @ Q.T or dS @ K was started just before "
    "it, behind a fence of its own, and no register was touched in between",
    r"flash_attention_(fused|dkv)_sm90 companion\.leave > bar_warp_sync: left out": "products, which all lanes "
    "issue, lie between what they read and the release: the barrier says so to the memory model",
    r"flash_attention_dkv_sm90 thirds: register_mma\.wait > wgmma_wait_group_n64#2: left out": "sums of parts "
    "were waited for and collected in the loop: nothing is under way there",
    r"flash_attention_fused_sm90 pipeline\.claim > mbarrier_wait_cta: the next mbarrier": "of two stages it waits "
    "for the tile before, which is released without it, and after the one that was in this stage",
    r"flash_attention_fused_sm90 warpgroup_mma\.wait > wgmma_wait_group_n64#1: left out": "nothing is under way there: "
    "it tells the assembler that dq's registers are free",
    r"flash_attention_fused_sm90 warpgroup_mma\.start > warpgroup_mma\.issue > wgmma_commit#3: left out": "dq's "
    "product is then of the group of dk's, which is waited for with it",
    r"flash_attention_(dq_)?sm90 ((boxes|thirds): pipeline\.release#4|.* over Q: pipeline\.release#5): i \+ 1": "Q has "
    "one stage, which a release finds by any number",
}
# kernels that hold a verb which waits and do not come to it, whatever they are built for
NEVER = {"norm_long_rows_backward": "one row a block at a time: its sums have one owner, and nobody to meet"}


def reason(kernel: str, case: str, told: str) -> str | None:
    """Why the mutant of a kernel is harmless in a problem, None if it is not."""
    names = f"{kernel} {told}", f"{kernel} {case}: {told}"
    return next((why for pattern, why in HARMLESS.items() if any(re.fullmatch(pattern, name) for name in names)), None)
