"""Attention's whole gradient in one kernel of the sm80 rung, and what makes rows of its dq."""

from __future__ import annotations

from typing import Any

import pytest

from dualops.cuda import device
from dualops.cuda.flash_attention.sm80.dq_finish import build_dq_finish
from dualops.cuda.flash_attention.sm80.fused import build_fused
from dualops.cuda.flash_attention.sm80.fused_config import fused_configs
from dualops.cuda.flash_attention.sm80.fused_launch import finish_bytes
from dualops.cuda.flash_attention.sm80.reading import GradientVectors
from tests.cuda.compile.attention import names, variant_of
from tests.cuda.compile.ptx import sound

WHOLE, MIXED = GradientVectors(8, 8, 8, 8), GradientVectors(4, 2, 1, 8)
# three stages where there is room for them, else two; a group's heads do not ascend
CASES: list[Any] = [
    ("sm_90a", 128, (), 1, WHOLE),
    ("sm_90a", 128, ("causal", "sinks"), 1, WHOLE),
    ("sm_80", 128, (), 1, WHOLE),
    ("sm_80", 128, ("causal",), 1, MIXED),
    ("sm_100a", 64, ("causal",), 1, WHOLE),
    ("sm_90a", 64, ("sinks",), 1, MIXED),
    ("sm_80", 64, ("causal",), 4, WHOLE),
]


@pytest.mark.parametrize(("arch", "D", "options", "group", "vectors"), CASES)
def test_each_config(arch, D, options, group, vectors):
    found, aligned = variant_of(D, D, *options), vectors is WHOLE
    room = device.known(arch).shared_memory_per_block
    fitting = [
        config
        for config, _ in fused_configs(D, D, names(found), group)
        if config.shared_bytes(D, D) + config.statistics_bytes <= room
    ]
    report = sound(build_fused(fitting[0], found, vectors, aligned, aligned), arch, fitting[0].shared_bytes(D, D))
    assert report.static_shared <= fitting[0].statistics_bytes
    if group == 1:
        sound(build_dq_finish(fitting[0], found, aligned), arch, finish_bytes(D))


@pytest.mark.parametrize("arch", ["sm_86", "sm_89", "sm_120"])
def test_who_has_too_little_shared_memory(arch):
    room = device.known(arch).shared_memory_per_block
    assert all(config.shared_bytes(D, D) > room for D in (64, 128) for config, _ in fused_configs(D, D, []))


def test_others_have_two_kernels():
    assert not [*fused_configs(96, 96, []), *fused_configs(128, 64, []), *fused_configs(64, 64, ["softcap"])]
