"""matmul: its Configs on both rungs, and the work of their kernels. Each product of a gradient is ranked by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod

from ..cuda.launch.plans import Choice
from ..cuda.matmul import sm80, sm90
from ..cuda.matmul.gradient import gradient_metas, gradient_products
from ..cuda.matmul.product import Product as Matrices, forward_product
from ..cuda.matmul.sm80_config import Sm80Config
from ..cuda.matmul.sm90.config import LEAST_SPLIT, MEET, SLACK, TILES, Sm90Config
from ..cuda.matmul.sm90.parts import ready
from ..spec import ArrayMeta, Problem
from .architectures import Architecture
from .candidates import Candidate, Part, Ranking, rank
from .model import BEYOND, STEP, Product, Work, estimate_of, units

SECONDS = 1e-12  # of what matmul/sm90/config.py counts in


Named = tuple[str, Matrices, Mapping[str, ArrayMeta]]


def products_of(p: Problem, backward: bool, gpu: Architecture) -> Iterator[Named]:
    """Yield the products to rank, with the arrays' layouts: one for forward, each wanted one for a gradient.

    Raises NotImplementedError for what the model does not know.
    """
    op = p.spec.name
    if p.dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"{op}: no estimates for {p.dtype}, expected bfloat16 or float16")
    if backward and (p.activation or "bias" in p.arrays):
        raise NotImplementedError(f"{op}: no estimates of gradients with bias or activation")
    if backward:
        metas = gradient_metas(p, p.outputs(p.spec.gradients))
        products = gradient_products(p, p.outputs(p.spec.gradients))
    else:
        metas = {**p.arrays, **p.outputs()}
        products = {"y": forward_product(p, metas)}
    for name, each in products.items():
        if not (each.batches and each.m.size and each.n.size and each.k.size):
            raise NotImplementedError(f"{op}: no estimates of an empty product")
        if gpu.device.has_wgmma and ready(each, p, metas).copies:
            raise NotImplementedError(
                f"{op}: no estimates where a factor is copied first: rows that are no "
                "multiple of 16 bytes, or sizes past what boxes reach"
            )
        yield name, each, metas


def rankings(
    p: Problem, products: Iterable[Named], title: str, gpu: Architecture, choices: Sequence[Choice]
) -> Iterator[Ranking]:
    """Rank every Config that the GPU has room for, for each product, of the rungs that do the problem."""
    rungs, taken = {choice.rung for choice in choices}, choices[0].config
    for place, (name, each, metas) in enumerate(products):
        found = []
        for config, _ in TILES if "sm90" in rungs else ():
            may_split = config.splits == 1 or (each.rounds == 1 and each.k.size // config.splits >= LEAST_SPLIT)
            if may_split and config.shared_bytes + SLACK <= gpu.device.shared_memory_per_block:
                found.append(("sm90", config, sm90_work(config, each, gpu), sm90.product_steps))
        for config, _ in sm80.configs(each, p, metas, gpu.device):
            found.append(("sm80", config, sm80_work(config, each, gpu), sm80.product_steps))
        own = taken[place] if isinstance(taken, tuple) else taken
        found.sort(key=lambda way: way[1] != own)
        candidates = (
            Candidate(rung, (Part(name, config),), estimate_of(work, gpu), partial(steps, each, p, metas, config))
            for rung, config, work, steps in found
        )
        flops = 2 * each.batches * each.rounds * each.m.size * each.n.size * each.k.size
        yield rank(title if name == "y" else f"{title}, {name}", flops, product_bytes(each), candidates)


def sm90_work(config: Sm90Config, each: Matrices, gpu: Architecture) -> Work:
    """Of matmul/sm90: both factors from shared memory. Blocks that split a sum meet in the end."""
    product, splits = Product(config.block_m, config.block_n, config.block_k, True), config.splits
    return Work(
        units(gpu, [product], moved_bytes=config.stage_bytes),
        0,
        {_steps(each, config.block_k * splits): config.tiles(each) * splits},
        product_bytes(each),
        copied_bytes=config.stage_bytes,
        ahead=config.stages - 1,
        beyond=BEYOND + MEET * SECONDS * (splits > 1),
    )


def sm80_work(config: Sm80Config, each: Matrices, gpu: Architecture) -> Work:
    """Of matmul/sm80.py: a barrier for each slice."""
    product, copied = Product(config.block_m, config.block_n, config.block_k, True), config.itemsize * config.stage
    return Work(
        units(gpu, [product], moved_bytes=copied, warp=(config.warp_m, config.warp_n)),
        STEP,
        {_steps(each, config.block_k): sm80.block_count(each, config)},
        product_bytes(each),
        config.min_blocks,
        copied,
        config.num_stages - 1,
    )


def _steps(each: Matrices, depth: int) -> int:
    return -(-each.rounds * each.k.size // depth)


def product_bytes(each: Matrices) -> int:
    """Return the bytes of both factors and the result in 16 bits, each once, also a factor that is broadcast."""
    a, b = (prod(axis.size for axis in (*each.batch, *each.outer) if getattr(axis, which)) for which in "ab")
    m, n, k = each.m.size, each.n.size, each.k.size
    return 2 * (a * m * k + b * n * k + each.batches * m * n)
