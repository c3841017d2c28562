"""Attention's whole gradient in one kernel of the sm80 rung, and what makes rows of its dq, on Hopper."""

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

ARCH = "sm_90a"
WHOLE, MIXED = GradientVectors(8, 8, 8, 8), GradientVectors(4, 2, 1, 8)
# heads of a group do not ascend
CASES: list[Any] = [
    (128, (), 1, WHOLE),
    (128, ("causal", "sinks"), 1, WHOLE),
    (128, ("causal",), 1, MIXED),
    (64, ("causal",), 1, WHOLE),
    (64, ("sinks",), 1, MIXED),
    (64, ("causal",), 4, WHOLE),
]


@pytest.mark.parametrize(("D", "options", "group", "vectors"), CASES)
def test_each_variant(D, options, group, vectors):
    found, aligned = variant_of(D, D, *options), vectors is WHOLE
    ((config, _),) = fused_configs(D, D, names(found), group)
    report = sound(build_fused(config, found, vectors, aligned, aligned), ARCH, config.shared_bytes(D, D))
    assert report.static_shared <= config.statistics_bytes
    assert config.shared_bytes(D, D) + config.statistics_bytes <= device.known(ARCH).shared_memory_per_block
    sound(build_dq_finish(config, found, aligned), ARCH, finish_bytes(D))


def test_others_have_two_kernels():
    assert not [*fused_configs(96, 96, []), *fused_configs(128, 64, []), *fused_configs(64, 64, ["softcap"])]
