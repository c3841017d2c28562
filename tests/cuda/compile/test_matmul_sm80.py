"""matmul's rung on tensor cores, built as for a GPU: every Config keeps its sums in registers."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest

from dualops.cuda.launch import device
from dualops.cuda.matmul.loading import Reading
from dualops.cuda.matmul.product import Variant
from dualops.cuda.matmul.sm80 import PARTS_TILES, TF32_TILES, TILES, Build, Sm80Config, build_product, fits
from tests.cuda.compile.ptx import ptx_of, sound

CONFIGS = [config for config, _ in TILES]
FORWARD = Variant("float16", "float32", "gelu", preactivation=True, batch_axes=2)
BACKWARD, SUMMED = Variant("bfloat16", batch_axes=2), Variant("bfloat16", batch_axes=2, outer_axes=2)
WIDE = [Reading("depth", 8), Reading("row", 8), Reading("row", 8)]
NARROW = [Reading(along, vector) for vector in (4, 2) for along in ("depth", "row")]
BY_ELEMENTS = [Reading("row", 1), Reading("depth", 1)]


def name_of(config: Sm80Config) -> str:
    return f"{config.block_m}x{config.block_n}x{config.block_k}"


def builds() -> Iterator[Any]:
    """Each Config with two of the variants of a product: in both directions, and with elements that threads copy.

    These two, architectures and ways to read come in turns.
    """
    archs, wide, narrow, by_elements = cycle(device.ARCHITECTURES), cycle(WIDE), cycle(NARROW), cycle(BY_ELEMENTS)
    kinds = [
        (FORWARD, wide, 8),
        (BACKWARD, wide, 8),
        (FORWARD, wide, 1),
        (SUMMED, narrow, 1),
        (FORWARD, by_elements, 8),
    ]
    for number, config in enumerate(CONFIGS):
        for variant, sides, out in (kinds[number % len(kinds)], kinds[(number + 2) % len(kinds)]):
            build = Build(variant, next(sides), next(sides), out)
            here = [arch for arch in device.ARCHITECTURES if fits(config, build, device.known(arch))]
            if here:
                arch = next(arch for arch in archs if arch in here)
                words = (f"{side.along}{side.vector}" for side in (build.a_reading, build.b_reading))
                yield pytest.param(config, build, arch, id="-".join((name_of(config), arch, *words)))


def float_builds() -> Iterator[Any]:
    """Each Config of float32 with one of the variants of a product, in turns, too."""
    linear, summed = FORWARD._replace(dtype="float32"), SUMMED._replace(dtype="float32")
    wide, archs = (Reading("depth", 4), Reading("row", 4)), cycle(device.ARCHITECTURES)
    kinds = (
        Build(linear, *wide, 4),
        Build(summed, Reading("row", 4), Reading("depth", 2), 4),
        Build(linear, Reading("row", 1), Reading("depth", 1), 1),
    )
    for number, config in enumerate([config for config, _ in (*TF32_TILES, *PARTS_TILES)]):
        build = kinds[number % 3] if config.sums <= 64 else kinds[0]
        here = [arch for arch in device.ARCHITECTURES if fits(config, build, device.known(arch))]
        arch = next(arch for arch in archs if arch in here)
        words = (f"{side.along}{side.vector}" for side in (build.a_reading, build.b_reading))
        kind = "3xtf32" if config.piece else "tf32"
        yield pytest.param(config, build, arch, id="-".join((kind, name_of(config), arch, *words)))


@pytest.mark.parametrize(("config", "build", "arch"), [*builds(), *float_builds()])
def test_a_config_keeps_its_sums_in_registers(config, build, arch):
    report = sound(build_product(config, *build), arch, config.shared_bytes(build.variant.dtype))
    assert config.sums < report.registers <= 65536 // (config.threads * config.min_blocks), report
    assert report.static_shared == 0


@pytest.mark.parametrize(("along_a", "along_b"), [("depth", "row"), ("row", "depth")], ids=["nn", "tt"])
def test_instructions(along_a, along_b):
    """A slice: as many products as there are, each factor loaded once a step, transposed if it lies so."""
    config = CONFIGS[-1]
    kernel = build_product(config, Variant("bfloat16"), Reading(along_a, 8), Reading(along_b, 8), 8)
    text = ptx_of(kernel, "sm_90a")
    assert ".local" not in text and ".f64" not in text
    found = Counter(
        re.findall(r"mma\.sync|ldmatrix\S*\.trans|ldmatrix|cp\.async\.cg|cp\.async\.ca|st\.global\S*v4", text)
    )
    products = config.warp_m // 16 * (config.warp_n // 8)
    assert found["mma.sync"] == config.steps * products
    loads = (config.steps + 1) * config.warp_m // 16  # and the first slice's first step
    assert found["ldmatrix"] == found["ldmatrix.sync.aligned.m8n8.x4.trans"] == loads
    copies = (config.block_m + config.block_n) * config.block_k // 8 // config.threads
    assert found["cp.async.cg"] == config.num_stages * copies and not found["cp.async.ca"]
    assert found["st.global.cs.v4"] >= 1
