"""matmul: its Configs on both rungs, and the work of their kernels. Each product of a gradient is ranked by itself."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import partial

from ..cuda.matmul import sm80, sm90
from ..cuda.matmul.gradient import gradient_metas, gradient_products
from ..cuda.matmul.product import Product as Matrices, forward_product
from ..cuda.matmul.sm80_config import Sm80Config
from ..cuda.matmul.sm90.config import LEAST_SPLIT, MEET, SLACK, TILES, Sm90Config
from ..cuda.matmul.sm90.parts import ready
from ..spec import ArrayMeta, Problem
from .architectures import Architecture
from .candidates import Candidate, Part
from .model import BEYOND, Work, estimate_of
from .steps import STEP, Product, Softmax, resident, warp_step, warpgroup_step

NONE = Softmax(0, 0.0)
SECONDS = 1e-12  # of what matmul/sm90/config.py counts in


def products_of(
    p: Problem, backward: bool, gpu: Architecture
) -> Iterator[tuple[str, Matrices, Mapping[str, ArrayMeta]]]:
    """Return the products to rank, with the arrays' layouts: one for forward, each wanted one for a gradient.

    Raises NotImplementedError for what the model does not know.
    """
    if p.dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"{p.spec.name}: no estimates for {p.dtype}, expected bfloat16 or float16")
    if backward and (p.activation or "bias" in p.arrays):
        raise NotImplementedError(f"{p.spec.name}: no estimates of gradients with bias or activation")
    if backward:
        metas = gradient_metas(p, p.outputs(p.spec.gradients))
        found = [(name, each, metas) for name, each in gradient_products(p, p.outputs(p.spec.gradients)).items()]
    else:
        metas = {**p.arrays, **p.outputs()}
        found = [("y", forward_product(p, metas), metas)]
    for name, each, metas in found:
        if not (each.batches and each.m.size and each.n.size and each.k.size):
            raise NotImplementedError(f"{p.spec.name}: no estimates of an empty product")
        if gpu.device.has_wgmma and ready(each, p, metas).copies:
            raise NotImplementedError(
                f"{p.spec.name}: no estimates where a factor is copied first: rows that are no "
                "multiple of 16 bytes, or sizes past what boxes reach"
            )
        yield name, each, metas


def candidates(
    name: str, each: Matrices, p: Problem, metas: Mapping[str, ArrayMeta], gpu: Architecture, rungs: Container[str]
) -> Iterator[Candidate]:
    """Every Config that the GPU has room for, for one product, of the rungs that do the problem."""
    if "sm90" in rungs:
        for config, _ in TILES:
            if config.shared_bytes + SLACK > gpu.shared_per_block or not _may_split(config, each):
                continue
            steps = partial(sm90.product_steps, each, p, metas, config)
            estimate = estimate_of(sm90_work(config, each, p.dtype, gpu), gpu)
            yield Candidate("sm90", (Part(name, config),), estimate, config.shared_bytes, steps)
    for config, _ in sm80.configs(each, p, metas, gpu.device):
        steps = partial(sm80.product_steps, each, p, metas, config)
        estimate = estimate_of(sm80_work(config, each, p.dtype, gpu), gpu)
        yield Candidate("sm80", (Part(name, config),), estimate, config.shared_bytes(p.dtype), steps)


def _may_split(config: Sm90Config, each: Matrices) -> bool:
    return config.splits == 1 or (each.rounds == 1 and each.k.size // config.splits >= LEAST_SPLIT)


def sm90_work(config: Sm90Config, each: Matrices, dtype: str, gpu: Architecture) -> Work:
    """Of matmul/sm90: both factors from shared memory. What comes before and after a tile's sum was measured, so that
    no step is counted twice; blocks that split a sum meet in the end.
    """
    product = Product(config.block_m, config.block_n, config.block_k, True)
    steps = -(-each.rounds * each.k.size // (config.block_k * config.splits))
    return Work(
        warpgroup_step(gpu, dtype, (product,), NONE, config.stage_bytes),
        0,
        {steps: config.tiles(each)},
        product_bytes(each),
        copied_bytes=config.stage_bytes,
        ahead=config.stages - 1,
        fills=0,
        beyond=BEYOND + (MEET * SECONDS if config.splits > 1 else 0),
        sharing=config.splits,
    )


def sm80_work(config: Sm80Config, each: Matrices, dtype: str, gpu: Architecture) -> Work:
    """Of matmul/sm80.py: a barrier for each slice."""
    product = Product(config.block_m, config.block_n, config.block_k, True)
    steps, stage_bytes = -(-each.rounds * each.k.size // config.block_k), config.itemsize * config.stage
    return Work(
        warp_step(gpu, ((product, (config.warp_m, config.warp_n)),), NONE, stage_bytes),
        STEP,
        {steps: sm80.block_count(each, config)},
        product_bytes(each),
        blocks=resident(gpu, config.shared_bytes(dtype), config.min_blocks),
        copied_bytes=stage_bytes,
        ahead=config.num_stages - 1,
        fills=0,
    )


def product_flops(each: Matrices) -> int:
    return 2 * each.batches * each.rounds * each.m.size * each.n.size * each.k.size


def product_bytes(each: Matrices) -> int:
    """Both factors and the result of 16 bits, each once; a factor that is broadcast is there once."""
    a = each.m.size * each.k.size * _places(each, "a")
    b = each.n.size * each.k.size * _places(each, "b")
    return 2 * (a + b + each.batches * each.m.size * each.n.size)


def _places(each: Matrices, which: str) -> int:
    """Matrices of a factor."""
    count = 1
    for axis in (*each.batch, *each.outer):
        count *= axis.size if getattr(axis, which) else 1
    return count
