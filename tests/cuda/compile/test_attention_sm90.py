"""attention's sm90 rung by each kind of its Configs and with each option: the COMPILE list has but a few of them."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dualops.cuda.compiler.backend import Kernel
from dualops.cuda.flash_attention.arguments import Variant
from dualops.cuda.flash_attention.block_masks import build_lists, build_states, build_states_by_keys
from dualops.cuda.flash_attention.sm90.bias_tile_scheduler import Broadcast
from dualops.cuda.flash_attention.sm90.config import MOST_BYTES, configs, padded, short_config
from dualops.cuda.flash_attention.sm90.dbias import build_dbias
from dualops.cuda.flash_attention.sm90.dbias_sums import build_dbias_sum
from dualops.cuda.flash_attention.sm90.dkv import build_dkv
from dualops.cuda.flash_attention.sm90.dkv_config import (
    DkvApartConfig,
    DkvConfig,
    FusedConfig,
    dkv_configs,
    fused_configs,
)
from dualops.cuda.flash_attention.sm90.dkv_split import build_dkv_split
from dualops.cuda.flash_attention.sm90.dq import build_dq
from dualops.cuda.flash_attention.sm90.dq_config import dbias_configs, dq_configs
from dualops.cuda.flash_attention.sm90.dq_split import build_dq_split_f32
from dualops.cuda.flash_attention.sm90.dq_sums import build_dq_convert
from dualops.cuda.flash_attention.sm90.float32 import gradient_configs, thirds_configs
from dualops.cuda.flash_attention.sm90.forward import build_forward
from dualops.cuda.flash_attention.sm90.fused import build_fused
from dualops.cuda.flash_attention.sm90.to_bf16x3 import build_thirds
from dualops.cuda.tile.warpgroup import ROWS
from dualops.spec.attention import UserFunction
from tests.cuda.compile.attention import names, read_documents, variant_of
from tests.cuda.compile.ptx import ptx_of, sound

ARCH = "sm_90a"
ROOM = 227 * 1024  # Hopper's shared memory
DENSE = Broadcast(row=False, column=False)
# what a case builds: the Config's tile, and kernels with their bytes of shared memory
Built = tuple[Any, list[tuple[Kernel, int]]]


def _forward(found: Variant, stored: str, boxes: bool) -> Built:
    widths = found.D, found.Dv
    ((config, _),) = configs(*widths, names(found), bias_in_boxes=boxes)
    assert config.bias_stages == boxes
    return config.block_kv, [(build_forward(config, found, True, stored), config.shared_bytes(*widths))]


def _few_queries(found: Variant, stored: str, boxes: bool) -> Built:
    config, _ = short_config(found.D, found.Dv, names(found), group=8)
    ways = (config, replace(config, serial=True)) if found.varlen else (config,)
    room = config.shared_bytes(found.D, found.Dv)
    return config.block_kv, [(build_forward(way, found, True, ""), room) for way in ways]


def _forward_f32(found: Variant, stored: str, boxes: bool) -> Built:
    widths = padded(found.D), padded(found.Dv)
    ((config, _),) = thirds_configs(*widths, names(found))
    return config.block_kv, [(build_forward(config, found, True, ""), config.shared_bytes(*widths))]


def _dq(found: Variant, stored: str, boxes: bool) -> Built:
    widths = padded(found.D), padded(found.Dv)
    config, _ = next(dq_configs(*widths, names(found), boxes, varlen=found.varlen))
    assert config.bias_stages == boxes
    kernel = build_dq(config, found, stored)
    assert not boxes or "ldmatrix" in ptx_of(kernel, ARCH)  # a bias in boxes is read by matrices
    return config.block_kv, [(kernel, config.shared_bytes(*widths))]


def _dkv(found: Variant, stored: str, boxes: bool) -> Built:
    """Of varlen also packed."""
    widths = padded(found.D), padded(found.Dv)
    ((config, _),) = dkv_configs(*widths, names(found), boxes)
    wide, build = max(widths) > 128, build_dkv if max(widths) <= 128 else build_dkv_split
    assert isinstance(config, DkvApartConfig if wide else DkvConfig) and (config.bias is not None) == boxes
    room = config.shared_bytes(*widths)
    return config.block_q, [(build(config, found, stored, stored, packed), room) for packed in {False, found.varlen}]


def _gradient_f32(found: Variant, stored: str, boxes: bool) -> Built:
    widths = found.D, found.Dv
    (dq, dkv), _ = gradient_configs(*widths, names(found))
    if max(widths) > 64:
        kernels: list[Kernel] = [build_dq_split_f32(dq, found), build_dkv_split(dkv, found)]
    else:
        kernels = [build_dq(dq, found, ""), build_dkv(dkv, found, "", "")]
    rooms = dq.shared_bytes(*widths), dkv.shared_bytes(*widths)
    return (dq.block_kv, dkv.block_q), [*zip(kernels, rooms, strict=True)]


def _fused(found: Variant, stored: str, boxes: bool) -> Built:
    widths = padded(found.D), padded(found.Dv)
    ((config, _),) = fused_configs(*widths, names(found), boxes, varlen=found.varlen)
    kernel, room = build_fused(config, found, stored, stored), config.shared_bytes(*widths)
    assert sound(kernel, ARCH, room).static_shared <= config.slack and room + config.slack <= ROOM
    return config.block_q, [(build_dq_convert(config, found, stored), 2 * ROWS * widths[0])]


def _dbias(one: Broadcast, dtype: str) -> Callable[[Variant, str, bool], Built]:
    def build(found: Variant, stored: str, boxes: bool) -> Built:
        widths = padded(found.D), padded(found.Dv)
        config, _ = next(dbias_configs(*widths, MOST_BYTES, names(found)))
        kernel, room = build_dbias(config, found, one, dtype, one == DENSE), config.shared_bytes(*widths)
        report = sound(kernel, ARCH, room)
        assert report.static_shared + report.dynamic_shared <= ROOM
        return config.block_kv, []

    return build


# tile: keys or queries of a tile, which are as many as registers are left for. All but boxes is varlen
Rows = list[tuple[Any, ...]]  # (tile, D, Dv, options[, how results are stored])
FORWARD: Rows = [
    (128, 64, 64, "causal", "vectors"),
    (128, 128, 128, "causal"),
    (128, 128, 128, "softcap"),
    (128, 128, 128, "alibi_slopes"),
    (96, 128, 128, "score_mod"),
    (112, 128, 128, "bias"),
    (128, 128, 128, "dropout_p"),
    (64, 128, 128, "alibi_slopes key_padding_mask sinks"),
    (48, 128, 128, "bias dropout_p"),
    (32, 128, 128, "everything"),
    # wide heads: V in slices of 128, 192, 256 and 256 columns, and with what reads in slices of 128
    (112, 192, 128, "causal", "vectors"),
    (96, 192, 192, "causal"),
    (80, 256, 512, "causal", "elements"),
    (48, 256, 256, "alibi_slopes"),
    (48, 256, 256, "dropout_p"),
    (32, 192, 128, "everything"),
    # block masks: what a mask_mod needs of registers is free when it is asked, so that tiles are as wide as without
    (128, 64, 64, "blocks:woven"),
    (128, 128, 128, "causal blocks:causal_documents"),
    (128, 128, 128, "blocks:read_documents"),
    (64, 128, 128, "score_mod blocks:documents"),
    (32, 128, 128, "bias blocks:documents"),
    (64, 256, 256, "blocks:causal_documents"),
    (32, 256, 256, "softcap blocks:causal_documents"),
]
FEW_QUERIES: Rows = [
    (128, 128, 128, "causal", "vectors"),
    (64, 128, 128, "bias"),
    (64, 128, 128, "dropout_p"),  # a head a tile
    (64, 128, 128, "dropout_p", "vectors"),
    (64, 256, 512, "causal", "vectors"),
    (32, 128, 128, "everything"),
]
DQ: Rows = [
    (128, 64, 64, "causal", "elements"),
    (128, 128, 128, ""),
    (128, 128, 128, "causal"),
    (128, 128, 128, "causal", "vectors"),
    (128, 96, 40, "window sinks", "vectors"),
    (128, 128, 128, "softcap causal"),
    (112, 128, 128, "softcap", "vectors"),
    (128, 128, 128, "alibi_slopes"),
    (128, 128, 128, "score_mod", "vectors"),
    (128, 128, 128, "mask_mod"),
    (128, 128, 128, "key_padding_mask"),
    (112, 128, 128, "bias"),
    (96, 128, 128, "bias softcap causal"),
    (96, 128, 128, "alibi_slopes key_padding_mask sinks"),
    (96, 128, 128, "score_mod mask_mod", "vectors"),
    (80, 128, 128, "dropout_p"),
    (64, 128, 128, "dropout_p softcap causal", "vectors"),
    (48, 128, 128, "everything"),
    (128, 128, 128, "blocks:woven"),
    (64, 128, 128, "score_mod blocks:documents"),
    (64, 128, 128, "bias blocks:documents"),
    # wide heads
    (48, 256, 256, "causal"),
    (48, 256, 256, "causal", "vectors"),
    (80, 192, 192, ""),
    (96, 192, 128, "causal"),
    (64, 128, 256, ""),
    (48, 256, 256, "bias softcap causal"),
    (32, 256, 256, "bias dropout_p softcap alibi_slopes"),
]
DKV: Rows = [
    (64, 128, 128, ""),
    (64, 128, 128, "causal", "vectors"),
    (64, 96, 72, "causal window sinks", "elements"),
    (96, 64, 64, "causal"),
    (32, 128, 128, "softcap"),
    (32, 128, 128, "bias"),
    (48, 128, 128, "score_mod"),
    (48, 128, 128, "dropout_p"),
    (64, 128, 128, "alibi_slopes", "vectors"),
    (64, 128, 128, "key_padding_mask"),
    (64, 128, 128, "mask_mod"),
    (64, 64, 64, "softcap"),
    (64, 64, 64, "bias"),
    (64, 64, 64, "dropout_p"),
    (32, 128, 128, "alibi_slopes key_padding_mask"),
    (32, 128, 128, "score_mod mask_mod"),
    (32, 128, 128, "bias dropout_p"),
    (16, 128, 128, "everything"),
    (64, 128, 128, "causal blocks:documents"),
    (32, 64, 64, "score_mod blocks:woven"),
    # wide heads: as many queries as shared memory has room for, or as registers that the options leave
    (48, 256, 256, "causal"),
    (48, 256, 256, "causal", "vectors"),
    (80, 256, 64, ""),
    (80, 40, 256, "causal sinks", "elements"),
    (48, 256, 256, "alibi_slopes"),
    (48, 256, 256, "dropout_p"),
    (48, 256, 256, "bias"),
    (32, 256, 256, "softcap causal"),
    (32, 256, 256, "score_mod mask_mod"),
    (32, 256, 256, "bias dropout_p softcap alibi_slopes"),
    (64, 192, 128, "causal blocks:woven"),
    (32, 256, 256, "dropout_p blocks:documents"),
]
FUSED: Rows = [
    (64, 128, 128, ""),
    (64, 128, 128, "causal"),
    (64, 96, 72, "causal sinks"),
    (64, 100, 60, "causal", "elements"),
    (128, 64, 64, "causal"),
    (128, 48, 60, "causal sinks", "elements"),
    *((64, 128, 128, f"causal {option}") for option in ("alibi_slopes", "softcap", "dropout_p", "key_padding_mask")),
    (64, 128, 128, "causal sinks alibi_slopes key_padding_mask dropout_p"),
    (64, 128, 128, "causal sinks softcap key_padding_mask"),
    (64, 100, 128, "sinks softcap", "elements"),
    (128, 64, 64, "causal softcap"),
    (128, 64, 64, "causal sinks dropout_p"),
    (64, 128, 128, "causal mask_mod"),
    (128, 64, 64, "causal mask_mod"),
    (128, 64, 64, "score_mod"),
    (64, 128, 128, "score_mod:tanh_softcap"),
    (64, 128, 128, "score_mod:tanh_softcap causal"),
]
IN_BOXES: dict[str, Rows] = {  # a bias; for dq and dkv it takes no registers of its own
    "forward": [(128, 64, 64, "bias"), (128, 128, 128, "bias causal sinks")],
    "dq": [(128, 64, 64, "bias"), (128, 128, 128, "bias"), (80, 128, 128, "bias softcap causal")],
    "dkv": [
        (64, 128, 128, "causal bias"),
        (64, 64, 64, "bias"),
        (32, 128, 128, "bias dropout_p"),
        (32, 128, 128, "bias softcap"),
        (16, 128, 128, "everything"),
    ],
    "fused": [(64, 128, 128, "bias"), (64, 128, 72, "causal sinks bias")],
}
FORWARD_F32: Rows = [
    (64, 64, 64, "causal"),
    (32, 64, 64, "bias"),
    (32, 128, 64, "window sinks", "vectors"),
    (16, 128, 128, "score_mod"),
    (16, 128, 128, "bias dropout_p softcap alibi_slopes"),
    (16, 64, 64, "everything"),
    (32, 64, 64, "blocks:documents"),
]
GRADIENT_F32: Rows = [
    ((64, 64), 64, 64, "causal"),
    ((32, 32), 64, 64, "bias score_mod sinks"),
    ((32, 16), 64, 64, "everything"),
    ((48, 48), 128, 128, "causal"),
    ((48, 48), 64, 128, "bias softcap dropout_p"),
    ((48, 48), 128, 64, "everything"),
    ((48, 48), 128, 128, "causal softcap", "vectors"),
    ((32, 32), 128, 128, "blocks:documents"),
]
# with many options dP takes its registers when these have given theirs back, and there are fewer keys
DBIAS: Rows = [
    (128, 128, 128, "bias"),
    (128, 128, 128, "bias softcap causal"),
    (128, 128, 128, "bias alibi_slopes sinks"),
    (128, 128, 128, "bias dropout_p"),
    (128, 128, 128, "bias score_mod mask_mod"),
    (128, 128, 128, "bias score_mod mask_mod dropout_p"),
    (112, 96, 40, "everything"),
    (128, 192, 128, "bias"),
    (64, 256, 256, "bias softcap causal"),
]
ONE_ROW, ONE_COLUMN = Broadcast(row=True, column=False), Broadcast(row=False, column=True)


def cases() -> Iterator[Any]:
    """(build, row, dtype, whether the bias comes in boxes), with an id."""
    of: dict[str, Any] = {"forward": _forward, "dq": _dq, "dkv": _dkv, "fused": _fused}
    tables: list[tuple[str, Any, Rows, str]] = [
        *((name, of[name], rows, "bfloat16") for name, rows in zip(of, (FORWARD, DQ, DKV, FUSED), strict=True)),
        ("few queries", _few_queries, FEW_QUERIES, "bfloat16"),
        ("forward float32", _forward_f32, FORWARD_F32, "float32"),
        ("gradient float32", _gradient_f32, GRADIENT_F32, "float32"),
        ("dbias", _dbias(DENSE, "bfloat16"), DBIAS, "bfloat16"),
        ("dbias", _dbias(DENSE, "float16"), [(128, 64, 64, "bias")], "float16"),
        ("parts of dbias", _dbias(DENSE, "float32"), [(128, 64, 64, "bias")], "float16"),
        ("dbias, one row", _dbias(ONE_ROW, "float32"), [(128, 128, 128, "bias key_padding_mask causal")], "bfloat16"),
        ("dbias, one column", _dbias(ONE_COLUMN, "float32"), [(128, 128, 128, "bias")], "bfloat16"),
        ("dbias, one", _dbias(Broadcast(True, True), "float32"), [(128, 128, 128, "bias causal")], "bfloat16"),
    ]
    for name, build, rows, dtype in tables:
        for row in rows:
            yield pytest.param(build, row, dtype, False, id=f"{name}: {row}")
    for name, rows in IN_BOXES.items():
        for row in rows:
            yield pytest.param(of[name], row, "bfloat16", True, id=f"{name}, bias in boxes: {row}")


@pytest.mark.parametrize(("build", "row", "dtype", "boxes"), cases())
def test_each_config(build, row, dtype, boxes):
    (tile, D, Dv, options), (stored,) = row[:4], row[4:] or ("boxes",)
    found = variant_of(D, Dv, options, dtype, varlen=stored != "boxes" and build is not _fused)
    chosen, kernels = build(found, stored, boxes)
    assert chosen == tile
    for kernel, room in kernels:
        sound(kernel, ARCH, room)


def test_sequences_in_one_kernel():
    found = variant_of(128, 128, "causal sinks", varlen=True)
    tile, _ = _fused(found, "vectors", False)
    assert tile == 64 and not [*fused_configs(128, 128, ["score_mod"], varlen=True)]


@pytest.mark.parametrize(
    ("config", "D"),
    [
        (DkvConfig(2, 48, 3), 128),
        (DkvConfig(2, 64, 4, overlap=False), 128),
        (DkvConfig(2, 64, 4), 64),
        (FusedConfig(dq_places=1), 128),
    ],
)
def test_others_that_may_be_measured(config, D):
    fused = isinstance(config, FusedConfig)
    found, build = variant_of(D, D, "" if fused else "causal"), build_fused if fused else build_dkv
    sound(build(config, found, "boxes", "boxes"), ARCH, config.shared_bytes(D, D))


def test_options_that_registers_do_not_do_for():
    assert not list(thirds_configs(128, 128, names(variant_of(128, 128, "everything", "float32"))))
    assert not list(dkv_configs(256, 256, names(variant_of(256, 256, "everything"))))
    with pytest.raises(ValueError, match="options with slopes, expected an exact one"):
        build_dkv_split(DkvApartConfig(48, 3), variant_of(256, 256, "softcap"), "boxes", "boxes")


@pytest.mark.parametrize("lanes", [1, 32])
def test_sums_of_parts_of_dbias(lanes):
    sound(build_dbias_sum("bfloat16", lanes), ARCH)


@pytest.mark.parametrize("aligned", [True, False])
def test_copies_of_float32(aligned):
    assert sound(build_thirds(100, aligned), ARCH).registers <= 128


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
