"""attention's sm90 rung by each of its Configs: the COMPILE list has but a few of them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from dualops.cuda.compile import compile_kernel
from dualops.cuda.flash_attention.arguments import variant
from dualops.cuda.flash_attention.blocks import build_lists, build_states
from dualops.cuda.flash_attention.sm90.config import configs, padded, short_config
from dualops.cuda.flash_attention.sm90.forward import build_forward
from dualops.spec import OPERATORS, ArrayMeta
from dualops.spec.attention import UserFunction
from dualops.spec.attention.cases import bent, documents, woven
from dualops.spec.meta import contiguous_strides
from tests.cuda.compile.ptx import ptx_of

WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256), (128, 256), (256, 512))
OPTIONS = ("", "causal", "softcap", "alibi_slopes", "bias", "dropout_p")
TOGETHER = ("", "causal", "score_mod", "bias")  # with a block mask


def found_for(D: int, Dv: int, option: str, operator: str, mask_mod: Any = None):
    """What a kernel is built for; with a mask_mod also for its block mask."""
    spec, varlen = OPERATORS[operator], operator.endswith("varlen")

    def meta(*shape: int, dtype: str = "bfloat16") -> ArrayMeta:
        return ArrayMeta(shape, dtype, contiguous_strides(shape), "cuda:0", 1024)

    around = (256, 2) if varlen else (1, 2, 256)
    arrays = {"q": meta(*around, D), "k": meta(*around, D), "v": meta(*around, Dv)}
    if varlen:
        arrays |= {f"cu_seqlens_{side}": meta(3, dtype="int32") for side in "qk"}
    params = {param.name: param.default for param in spec.params}
    more = {"alibi_slopes": meta(2, dtype="float32"), "bias": meta(256, 256), "seed": meta(dtype="int64")}
    given = {"causal": True, "softcap": 3.0, "dropout_p": 0.1, "score_mod": bent}
    arrays |= {name: more[name] for name in (option, "seed" * (option == "dropout_p")) if name in more}
    params |= {option: given[option]} if option in given else {}
    params |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 256) if varlen else {}
    if mask_mod is not None:
        params["mask_mod"] = mask_mod
        arrays["block_mask"] = meta(1, 1, 2, 3, dtype="int32")
    return variant(spec.bind(arrays, params))


CASES: list[Any] = [
    *((WIDTHS[1], option, "flash_attention", "boxes") for option in OPTIONS),
    *((widths, "causal", "flash_attention", "boxes") for widths in (WIDTHS[0], *WIDTHS[2:])),
    *((widths, "causal", "flash_attention_varlen", "vectors") for widths in WIDTHS[:4]),
    *((widths, "bias", "flash_attention", "boxes") for widths in WIDTHS[2:4]),
    *((widths, "causal", "flash_attention_varlen", "elements") for widths in WIDTHS[:3]),
    *((WIDTHS[3], option, "flash_attention", "boxes") for option in ("alibi_slopes", "dropout_p")),
]


@pytest.mark.parametrize(
    ("widths", "option", "operator", "stored"),
    CASES,
)
def test_each_config(widths, option, operator, stored):
    D, Dv = map(padded, widths)
    found = found_for(widths[0], widths[1], option, operator)
    for config, _ in configs(D, Dv, [each.name for each, _ in found.having.variants]):
        made = build_forward(config, found, True, stored)
        report = compile_kernel(made, "sm_90a", config.shared_bytes(D, widths[1])).report
        assert report.allowed and not report.complaints, report
        assert not report.stack_bytes and not report.spill_bytes, report


@pytest.mark.parametrize(
    ("widths", "option", "operator"),
    [
        *((WIDTHS[1], option, "flash_attention") for option in ("", "bias", "dropout_p")),
        (WIDTHS[0], "causal", "flash_attention_varlen"),
        (WIDTHS[2], "causal", "flash_attention"),
        *((WIDTHS[3], option, "flash_attention") for option in ("causal", "bias", "alibi_slopes")),
        (WIDTHS[5], "causal", "flash_attention_varlen"),
    ],
)
def test_few_queries(widths, option, operator):
    D, Dv = map(padded, widths)
    found = found_for(widths[0], widths[1], option, operator)
    config, _ = short_config(D, Dv, [each.name for each, _ in found.having.variants], group=8)
    report = compile_kernel(build_forward(config, found, True, ""), "sm_90a", config.shared_bytes(D, widths[1])).report
    assert report.allowed and not report.complaints, report
    assert not report.stack_bytes and not report.spill_bytes, report


IDS = np.arange(16384, dtype=np.int32) // 700


def causal_documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i // 1000 == j // 1000) & (j <= i)


def read_documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (IDS[i] == IDS[j]) & (j <= i)


@pytest.mark.parametrize(
    ("widths", "option", "mask_mod"),
    [
        *((WIDTHS[1], option, documents) for option in TOGETHER),
        *((widths, "", causal_documents) for widths in WIDTHS),
        (WIDTHS[1], "", woven),
        (WIDTHS[1], "", read_documents),
    ],
)
def test_block_masks(widths, option, mask_mod):
    """What a mask_mod needs of registers is free when it is asked, so that tiles are as wide as without."""
    D, Dv = map(padded, widths)
    found = found_for(widths[0], widths[1], option, "flash_attention", mask_mod)
    for config, _ in configs(D, Dv, [each.name for each, _ in found.having.variants]):
        assert option not in ("", "causal") or max(D, Dv) > 128 or config.block_kv == 128
        report = compile_kernel(
            build_forward(config, found, True, "boxes"), "sm_90a", config.shared_bytes(D, Dv)
        ).report
        assert report.allowed and not report.complaints, report
        assert not report.stack_bytes and not report.spill_bytes, report


def test_an_array_that_is_read_is_there_once():
    """In global memory: constant memory ends at 64 KB, and a function reads at all places where it is inlined."""
    text = ptx_of(build_states(UserFunction(read_documents, ("b", "h", "i", "j"))), "sm_90a")
    assert re.findall(r"^\.(\w+) \.align (\d+) \.b8 array_\w+\[(\d+)\]", text, re.MULTILINE) == [
        ("global", "4", "65536")
    ]
    assert "ld.global.nc.u32" in text and ".const" not in text


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_what_makes_block_masks(arch):
    for made in (build_lists(), build_states(UserFunction(read_documents, ("b", "h", "i", "j")))):
        report = compile_kernel(made, arch, 0).report
        assert report.allowed and not report.complaints and not report.stack_bytes, report
