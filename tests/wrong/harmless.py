"""Mutants that are no worse than the kernel, and why. Listed here and dead is an error, as is a survivor."""

import re

# (the mutant as it is printed, without the line, a pattern; after `case: ` in that problem alone): why nothing is wrong
HARMLESS = {
    r"softmax_ring(_backward)? cluster of [12]: ring\.wait > mbarrier_wait_cta#2: "
    r"left out": "a row that was read once stays: the second wait is over before it begins, and tells the stage",
    r"(norm_ring a warp a row: ring_rows\.(send|merge): i|softmax_rows_backward gradient_operator\.keep > "
    r"in_block\.sum_of_row: row_round) \+ 1": "a warp has its row alone and sends nothing; or a block has one "
    "row, which may have either of two slots",
    r"(norm_ring ring\.release > bar_warp_sync|flash_attention_dq_sm80 syncthreads#2): left out": "the lanes meet in "
    "the shuffles of their sums between their last read and the release; or a block without tiles stores zeros where "
    "other warps still read Q, which they then do not use: racecheck alone sees it",
    r"(flash_attention_(sm90 .*add_previous > .*register_mma\.add > wgmma_fence|dq_sm90 .*\.tile > "
    r"warpgroup_mma\.start > warpgroup_mma\._issue > wgmma_fence#[23]|(dkv|fused)_sm90 .*warpgroup_mma\.start > "
    r"warpgroup_mma\._issue > wgmma_fence#2|fused_sm90 .*add_dk > register_mma\.add > wgmma_fence|"
    r"dbias_sm90 keys stay: .*_start_d_probs > warpgroup_mma\.start > "
    r"warpgroup_mma\._issue > wgmma_fence)|retention_wide_sm90 "
    r"warpgroup_mma\.start > warpgroup_mma\._issue > wgmma_fence#2): left out": "Q @ K.T, K @ Q.T or dS @ K was "
    "started just before it, behind a fence of its own, and no register was touched in between",
    r"((flash_attention_(fused|dkv)|retention(_wide)?)_sm90 (.*\.release > )?second_barrier\.leave > "
    r"bar_warp_sync|retention_sm90 (dlog_decay: )?decay_tables\.release > bar_warp_sync(#[12])?|"
    r"flash_attention_dkv_split_sm90 .*(dv_tile > .*|dk_tile > )second_barrier\.leave > bar_warp_sync(#2)?): left "
    r"out": "products, which all lanes "
    "issue, lie between what they read and the release: the barrier says so to the memory model",
    r"retention_sm90 d?log_decay: diagonal_residual\.add > mma_m16n8k16_f32_bf16#[12]: "
    r"left out": "it is no step "
    "of the protocol: it adds what rounding took, by which test_retention_sm90.py has heads that forget at once",
    r"retention_wide_sm90 halves: box_output\.store_all > bar_sync#[12]: the number of another barrier": "who hands "
    "over waits meanwhile until all of it has been taken, and comes to its own barrier after that",
    r"flash_attention_dkv_sm90 thirds: dkv_tiles\.finish > register_mma\.wait > wgmma_wait_group_n64: left out": "sums "
    "of parts "
    "were waited for and collected in the loop: nothing is in flight there",
    r"flash_attention_dkv_split_sm90 .*q_loads\.fetch > places\.claim > mbarrier_wait_cta: one mbarrier for "
    "all": "of two stages it waits for the first, whose tile is released after lse and delta of the one behind it have "
    "been read",
    r"flash_attention_dkv_split_sm90 .*hand_probs > places\.claim > mbarrier_wait_cta#1: (left out|"
    r"one mbarrier for all|the next mbarrier)": "it is the first filling's: all places are empty",
    r"(flash_attention_dkv_split_sm90 (.*hand_probs > places\.claim > mbarrier_wait_cta#2|"
    r".*dk_tile > second_barrier\.leave > bar_warp_sync#1)|retention_wide_sm90 halves: "
    r"places\.claim > mbarrier_wait_cta|"
    r"flash_attention_(dq_)?sm90 a bias in boxes: .*loaded\.load > pipeline\.acquire > mbarrier_wait_cta#1): left "
    r"out": "of two stages, one is filled again when P of that tile and of the next has been read: so a place of two "
    "is free when the tile that fills it is there; one place of one stage, too, as no element is recomputed there; "
    "and K's or dq's V's stage when the bias of the tile that it had is released, with its product over, of V in the "
    "simulator alone: the other problems show that the wait is needed",
    r"flash_attention_dkv_split_sm90 .*dk_tile > pipeline\.wait > mbarrier_wait_cta(#1: left out|#2: (left out|"
    r"one mbarrier for "
    "all))": "who has dk reads Q after P, and that was made of Q",
    r"flash_attention_dkv_split_sm90 some rows see nothing: .*d[kv]_tile > warpgroup_mma\.(start > "
    r"warpgroup_mma\._issue > wgmma_commit#2|wait > wgmma_wait_group_n16#3): left out": "nothing overlaps dv's "
    "and dk's products "
    "there: one wait is for all",
    r"flash_attention_dkv_split_sm90 some rows see nothing: .*(dv_tile > second_barrier\.wait#1: i \+ 1|"
    r"(dv_tile > second_barrier\.wait|dk_tile > (pipeline\.wait|.*take_probs > places\.take)) > "
    r"mbarrier_wait_cta#1: the next mbarrier)": "each block has a second tile there, which comes after the first",
    r"flash_attention_dkv_split_sm90 .*d[kv]_tile > register_mma\.add > wgmma_fence: left out": "K @ Q.T or V @ dO.T "
    "was started "
    "just before it, behind a fence of its own, and no register was touched in between",
    r"(flash_attention_(dkv(_split(_f32)?)?|fused)_sm90 (.* > )?q_loads\.copy > second_barrier\.expect|"
    r"flash_attention_(dq_)?sm90 ((boxes|thirds|a bias in boxes|.* over Q): pipeline\.release|"
    r"a bias in boxes: .*_stages\.release( > pipeline\.release)?#[12])|"
    r"retention_sm90 (pipeline\.release#1|dlog_decay: (pipeline\.release#[23]|"
    r"second_barrier\.expect#3|decay_tables\.release( > places\.free)?#[12])|"
    r"decay_tables\.(put > places\.hand|release( > places\.free)?))|"
    r"flash_attention_dq_split_f32_sm90 (pipeline\.(release|skip( > pipeline\.release)?)|"
    r".*dq_tile > pipeline\.release#[12]|.*(places\.hand|warpgroup_exchange\.leave( > .*free)?))|"
    r"flash_attention_dkv_split_f32_sm90 .*(dv_tile_of_parts > pipeline\.release#2|"
    r"dk_tile_of_parts > pipeline\.release#[12]|"
    r"(places\.hand|warpgroup_exchange\.leave( > .*free)?))|"
    r"retention_wide_sm90 (pipeline\.release#1|halves.*: (pipeline\.release#2|second_barrier\.expect|"
    r"(warpgroup_exchange\.free( > places\.free)?|places\.hand)))): i \+ 1|softmax_cluster_rows(_backward)? "
    r"_parts_in_cluster\.init > mbarrier_init: one "
    r"mbarrier for all|flash_attention_(dq_split_f32_sm90 .*dq_tile > pipeline\.release > mbarrier_arrive#2|"
    r"dkv_split_f32_sm90 "
    r".*dk_tile_of_parts > pipeline\.release > mbarrier_arrive#2): the next mbarrier": "there is one stage, or one "
    "place, found by any "
    "number; or one row, which has the first of two mbarriers; or two stages, of which the first is filled again when "
    "the second's tile is over, and the second after it",
}
# kernels that hold a verb which waits and do not come to it, whatever they are built for
NEVER = {"norm_long_rows_backward": "one row a block at a time: its sums have one owner, and nobody to meet"}


def reason(kernel: str, case: str, mutant: str) -> str | None:
    """Why the mutant of a kernel is harmless in a problem, None if it is not."""
    names = f"{kernel} {mutant}", f"{kernel} {case}: {mutant}"
    return next((why for pattern, why in HARMLESS.items() if any(re.fullmatch(pattern, name) for name in names)), None)
