"""attention's sm90 rung by each kind of its Configs and with each option: the COMPILE list has but a few of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dualops.cuda.flash_attention.block_masks import build_lists, build_states, build_states_by_keys
from dualops.cuda.flash_attention.sm90.config import configs, short_config
from dualops.cuda.flash_attention.sm90.forward import build_forward
from dualops.spec.attention import UserFunction
from dualops.spec.attention.cases import EVERYTHING, documents, woven
from tests.cuda.compile.attention import names, variant_of
from tests.cuda.compile.ptx import ptx_of, sound

ARCH = "sm_90a"
# keys of a tile, which are as many as registers are left for beside the options and a slice of Dv
CASES: list[Any] = [
    (128, 64, 64, ("causal",), "vectors"),
    (128, 128, 128, ("causal",), "boxes"),
    (128, 128, 128, ("softcap",), "boxes"),
    (128, 128, 128, ("alibi_slopes",), "boxes"),
    (96, 128, 128, ("score_mod",), "boxes"),
    (112, 128, 128, ("bias",), "boxes"),
    (128, 128, 128, ("dropout_p",), "boxes"),
    (64, 128, 128, ("alibi_slopes", "key_padding_mask", "sinks"), "boxes"),
    (48, 128, 128, ("bias", "dropout_p"), "boxes"),
    (32, 128, 128, tuple(EVERYTHING), "boxes"),
    # wide heads: V in slices of 128, 192, 256 and 256 columns, and with what reads in slices of 128
    (112, 192, 128, ("causal",), "vectors"),
    (96, 192, 192, ("causal",), "boxes"),
    (80, 256, 512, ("causal",), "elements"),
    (48, 256, 256, ("alibi_slopes",), "boxes"),
    (48, 256, 256, ("dropout_p",), "boxes"),
    (32, 192, 128, tuple(EVERYTHING), "boxes"),
]


@pytest.mark.parametrize(("keys", "D", "Dv", "options", "stored"), CASES)
def test_each_config(keys, D, Dv, options, stored):
    """As boxes, and of varlen as vectors or elements."""
    found = variant_of(D, Dv, *options, varlen=stored != "boxes")
    ((config, _),) = configs(D, Dv, names(found))
    assert config.block_kv == keys
    sound(build_forward(config, found, True, stored), ARCH, config.shared_bytes(D, Dv))


@pytest.mark.parametrize(("D", "options"), [(64, ("bias",)), (128, ("bias", "causal", "sinks"))])
def test_a_bias_in_boxes(D, options):
    found = variant_of(D, D, *options)
    ((config, _),) = configs(D, D, names(found), bias_in_boxes=True)
    assert (config.block_kv, config.bias_stages) == (128, 1)
    sound(build_forward(config, found, True, "boxes"), ARCH, config.shared_bytes(D, D))


@pytest.mark.parametrize(
    ("keys", "D", "Dv", "options", "varlen"),
    [
        (128, 128, 128, ("causal",), True),
        (64, 128, 128, ("bias",), False),
        (64, 128, 128, ("dropout_p",), False),  # a head a tile
        (64, 128, 128, ("dropout_p",), True),
        (64, 256, 512, ("causal",), True),
        (32, 128, 128, tuple(EVERYTHING), False),
    ],
)
def test_few_queries(keys, D, Dv, options, varlen):
    found = variant_of(D, Dv, *options, varlen=varlen)
    config, _ = short_config(D, Dv, names(found), group=8)
    assert config.block_kv == keys
    for way in (config, replace(config, serial=True)) if varlen else (config,):
        sound(build_forward(way, found, True, ""), ARCH, config.shared_bytes(D, Dv))


IDS = np.arange(16384, dtype=np.int32) // 700


def causal_documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i // 1000 == j // 1000) & (j <= i)


def read_documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (IDS[i] == IDS[j]) & (j <= i)


@pytest.mark.parametrize(
    ("keys", "D", "Dv", "options", "mask_mod"),
    [
        (128, 64, 64, (), woven),
        (128, 128, 128, ("causal",), causal_documents),
        (128, 128, 128, (), read_documents),
        (64, 128, 128, ("score_mod",), documents),
        (32, 128, 128, ("bias",), documents),
        (64, 256, 256, (), causal_documents),
        (32, 256, 256, ("softcap",), causal_documents),
    ],
)
def test_block_masks(keys, D, Dv, options, mask_mod):
    """What a mask_mod needs of registers is free when it is asked, so that tiles are as wide as without."""
    found = variant_of(D, Dv, *options, blocks_of=mask_mod)
    ((config, _),) = configs(D, Dv, names(found))
    assert config.block_kv == keys
    sound(build_forward(config, found, True, "boxes"), ARCH, config.shared_bytes(D, Dv))


def test_an_array_that_is_read_is_there_once():
    """In global memory: constant memory ends at 64 KB, and a function reads at all places where it is inlined."""
    text = ptx_of(build_states(UserFunction(read_documents, ("b", "h", "i", "j"))), ARCH)
    assert re.findall(r"^\.(\w+) \.align (\d+) \.b8 array_\w+\[(\d+)\]", text, re.MULTILINE) == [
        ("global", "4", "65536")
    ]
    assert "ld.global.nc.u32" in text and ".const" not in text


@pytest.mark.parametrize("arch", ["sm_80", ARCH])
def test_what_makes_block_masks(arch):
    asks = build_states(UserFunction(read_documents, ("b", "h", "i", "j")))
    for made in (asks, build_states_by_keys(variant_of(64, 64, "causal").having), build_lists()):
        sound(made, arch)
