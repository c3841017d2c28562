"""The gradient of attention's sm80 rung by each of its Configs, on the architectures in turns; with options by the one
that a call takes.
"""

from __future__ import annotations

from typing import Any

import pytest

from dualops.cuda.flash_attention.sm80.config import Sm80DkvConfig, Sm80DqConfig, dkv_configs, dq_configs
from dualops.cuda.flash_attention.sm80.dkv import build_dkv
from dualops.cuda.flash_attention.sm80.dq import build_dq
from dualops.cuda.flash_attention.sm80.rows import GradientVectors
from dualops.cuda.launch import device
from tests.cuda.compile.attention import names, variant_of
from tests.cuda.compile.ptx import ptx_of, sound

WHOLE, SINGLE, MIXED = GradientVectors(8, 8, 8, 8), GradientVectors(1, 1, 1, 1), GradientVectors(4, 2, 1, 8)
MANY = ("bias", "dropout_p", "score_mod", "mask_mod")
# the widest heads that a Config is for, with and without options; each way to read and to write
CASES: list[Any] = [
    ("sm_80", 128, 128, (), False, WHOLE),
    ("sm_86", 128, 128, ("causal", "window", "sinks"), False, WHOLE),
    ("sm_89", 128, 128, ("bias",), False, WHOLE),
    ("sm_100a", 128, 128, ("dropout_p",), False, WHOLE),
    ("sm_120", 128, 128, ("score_mod",), False, WHOLE),
    ("sm_80", 128, 128, ("softcap",), False, WHOLE),
    ("sm_90a", 128, 128, ("key_padding_mask",), False, WHOLE),
    ("sm_90a", 128, 128, ("causal",), True, SINGLE),
    ("sm_86", 128, 128, ("alibi_slopes",), True, MIXED),
    ("sm_80", 128, 64, MANY, False, WHOLE),
    ("sm_90a", 64, 128, MANY, False, SINGLE),
    ("sm_89", 64, 128, ("causal",), False, WHOLE),
    ("sm_100a", 32, 24, ("causal",), True, MIXED),
]


@pytest.mark.parametrize(("arch", "D", "Dv", "options", "varlen", "vectors"), CASES)
def test_each_config(arch, D, Dv, options, varlen, vectors):
    found, aligned = variant_of(D, Dv, *options, varlen=varlen), vectors is WHOLE
    room = device.known(arch).shared_memory_per_block
    dq = [config for config, _ in dq_configs(D, Dv, names(found))]
    taken = [config for config in dq if config.min_blocks * config.shared_bytes(D, Dv) <= room]
    for config in taken[: 1 if options else None]:
        report = sound(build_dq(config, found, vectors, aligned), arch, config.shared_bytes(D, Dv))
        assert report.registers <= 65536 // (config.threads * config.min_blocks), (config, report)
    dkv = [config for config, _ in dkv_configs(D, Dv, names(found))]
    fitting = [config for config in dkv if config.shared_bytes(D, Dv) + config.statistics_bytes <= room]
    for config in fitting[: 1 if options else None]:
        sound(build_dkv(config, found, vectors, aligned, aligned), arch, config.shared_bytes(D, Dv))
    assert taken and fitting


def test_every_architecture_is_built_for():
    assert {arch for arch, *_ in CASES} == set(device.ARCHITECTURES)


def test_what_registers_do_not_suffice_for_is_simts():
    assert not list(dkv_configs(128, 128, ["softcap", "bias"]))
    assert list(dkv_configs(64, 64, MANY)) and not list(dkv_configs(64, 64, [*MANY, "softcap"]))
    assert not list(dkv_configs(136, 64, []))
    assert not list(dq_configs(64, 136, []))


def test_instructions():
    """A tile: products, each right factor loaded once for each; left factors once, or again for each tile."""
    text = ptx_of(build_dq(Sm80DqConfig(1, 64), variant_of(64, 64), WHOLE, True), "sm_80")
    assert ".local" not in text and ".f64" not in text
    assert text.count("mma.sync") == 3 * (64 // 16) * (64 // 8)
    assert text.count("ldmatrix.sync.aligned.m8n8.x4.trans") == 16
    assert text.count("ldmatrix.sync.aligned.m8n8.x4.shared") == 2 * 16 + 2 * 4  # K, V; Q, dO
    text = ptx_of(build_dkv(Sm80DkvConfig(2, 32), variant_of(64, 64), WHOLE, True, True), "sm_80")
    assert ".local" not in text and ".f64" not in text
    assert text.count("mma.sync") == 4 * (64 // 16) * (32 // 8)
    assert text.count("ldmatrix.sync.aligned.m8n8.x4.trans") == 2 * 8  # dO, Q
    assert text.count("ldmatrix.sync.aligned.m8n8.x4.shared") == 2 * (8 + 4)  # Q and K, dO and V
