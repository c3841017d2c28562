"""matmul: its Configs on both rungs, and the work of their kernels. Each product of a gradient is ranked by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod

from ..cuda.launch.plans import Choice
from ..cuda.matmul import sm80, sm90
from ..cuda.matmul.gradient import gradient_metas, gradient_products
from ..cuda.matmul.product import Product as Matrices, forward_product
from ..cuda.matmul.sm80 import Sm80Config
from ..cuda.matmul.sm90.config import LEAST_SPLIT, MEET, SLACK, TILES, Sm90Config
from ..cuda.matmul.sm90.parts import ready
from ..spec import ArrayMeta, Problem
from .architectures import Architecture
from .candidates import Candidate, Part, Ranking, rank
from .model import BEYOND, STEP, Product, Work, estimate_of, units

SECONDS = 1e-12  # in the unit of matmul/sm90/config.py, a picosecond


def rankings(p: Problem, backward: bool, gpu: Architecture, choices: Sequence[Choice]) -> Iterator[Ranking]:
    """Rank the Configs that fit on the GPU: of the product, or of each product of the gradient.

    Raises NotImplementedError for a problem whose cost the model does not know.
    """
    op = p.spec.name
    if p.dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"{op}: no estimates for {p.dtype}, expected bfloat16 or float16")
    if backward and (p.activation or "bias" in p.arrays):
        raise NotImplementedError(f"{op}: no estimates of gradients with bias or activation")
    results, own = p.outputs(p.spec.gradients if backward else p.spec.outputs), choices[0].config
    metas = gradient_metas(p, results) if backward else {**p.arrays, **results}
    products = gradient_products(p, results) if backward else {"y": forward_product(p, metas)}
    for each in products.values():
        if gpu.device.has_wgmma and ready(each, p, metas).copies:
            raise NotImplementedError(
                f"{op}: no estimates where a factor is copied first: rows that are not a "
                "multiple of 16 bytes, or sizes past what boxes reach"
            )
    for (name, each), taken in zip(products.items(), own if backward else (own,), strict=True):
        found = [*_candidates(name, each, p, metas, gpu, any(choice.rung == "sm90" for choice in choices))]
        found.sort(key=lambda candidate: candidate.configs != (taken,))
        flops = 2 * each.batches * each.rounds * each.m.size * each.n.size * each.k.size
        yield rank(f"backward, {name}" if backward else "forward", flops, product_bytes(each), found)


def _candidates(
    name: str, each: Matrices, p: Problem, metas: Mapping[str, ArrayMeta], gpu: Architecture, hopper: bool
) -> Iterator[Candidate]:
    for config, _ in TILES if hopper else ():
        may_split = config.splits == 1 or (each.rounds == 1 and each.k.size // config.splits >= LEAST_SPLIT)
        if may_split and config.shared_bytes + SLACK <= gpu.device.shared_memory_per_block:
            steps = partial(sm90.product_steps, each, p, metas, config)
            yield Candidate("sm90", (Part(name, config),), estimate_of(sm90_work(config, each, gpu), gpu), steps)
    for config, _ in sm80.configs(each, p, metas, gpu.device):
        steps = partial(sm80.product_steps, each, p, metas, config)
        yield Candidate("sm80", (Part(name, config),), estimate_of(sm80_work(config, each, gpu), gpu), steps)


def sm90_work(config: Sm90Config, each: Matrices, gpu: Architecture) -> Work:
    """Return the work of matmul/sm90: it reads both factors from shared memory. Blocks that split a sum add their parts
    at the end.
    """
    return Work(
        units(gpu, [Product(config.block_m, config.block_n, config.block_k, True)], moved_bytes=config.stage_bytes),
        0,
        {-(-each.rounds * each.k.size // (config.block_k * config.splits)): config.tiles(each) * config.splits},
        product_bytes(each),
        copied_bytes=config.stage_bytes,
        ahead=config.stages - 1,
        beyond=BEYOND + MEET * SECONDS * (config.splits > 1),
    )


def sm80_work(config: Sm80Config, each: Matrices, gpu: Architecture) -> Work:
    """Return the work of matmul/sm80.py, with a barrier per slice."""
    product, copied = Product(config.block_m, config.block_n, config.block_k, True), config.itemsize * config.stage
    return Work(
        units(gpu, [product], moved_bytes=copied, warp=(config.warp_m, config.warp_n)),
        STEP,
        {-(-each.rounds * each.k.size // config.block_k): sm80.block_count(each, config)},
        product_bytes(each),
        config.min_blocks,
        copied,
        config.num_stages - 1,
    )


def product_bytes(each: Matrices) -> int:
    """Return the bytes of both factors and the result in 16 bits, each once. A factor that is broadcast counts once
    too.
    """
    a, b = (prod(axis.size for axis in (*each.batch, *each.outer) if getattr(axis, which)) for which in "ab")
    m, n, k = each.m.size, each.n.size, each.k.size
    return 2 * (a * m * k + b * n * k + each.batches * m * n)
