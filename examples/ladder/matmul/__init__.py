"""matmul as a ladder: each step is a kernel with one idea more than the previous one (dualops/cuda/matmul/README.md).

    thread_an_element   one thread per element of y, from a row of a and a column of b              matmul/naive.py
    shared_tiles        one block per tile of y, from slices in shared memory                    tiles.py
    register_tiles      one thread per tile of y in registers                                        tiles.py
    tensor_cores        one warp per tile of y: mma.sync multiplies, ldmatrix reads                  warps.py
    copies_ahead        several slices are in flight (cp.async) while one is multiplied          warps.py
    boxes               a warpgroup multiplies out of shared memory (wgmma), one thread loads    warpgroups.py
                        boxes (TMA)
    roles               warps that load, and warps that multiply                                 warpgroups.py
    persistent          a block computes one tile after another                                  matmul/sm90
    clusters            blocks send each other slices that they share                            matmul/sm90

For learning, tests and benchmarks: `run_step("tensor_cores", a, b)` on contiguous a [M, K] and b [K, N] of bfloat16,
forward only, wherever kernels run. The production kernels of `dualops.cuda.matmul` continue from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from dualops.cuda.launch.device import Device
from dualops.cuda.launch.operation import Operation
from dualops.cuda.launch.plans import Choice
from dualops.cuda.launch.step import Step
from dualops.cuda.launch.tensor_map import Mapped
from dualops.cuda.matmul import naive, sm90
from dualops.cuda.matmul.product import Product, variant
from dualops.cuda.matmul.sm80 import Sm80Config
from dualops.cuda.matmul.sm90.config import Sm90Config
from dualops.cuda.matmul.tiled import MOST_BLOCKS, Rung, block_count
from dualops.cuda.tile.boxes import Cluster
from dualops.spec import ArrayMeta, Problem, matmul as SPEC

from .tiles import DTYPE, TilesConfig, build_tiles
from .warpgroups import build_boxes, build_roles
from .warps import build_warps

MULTIPLE = 8  # elements in 16 bytes, the size of a load in all steps except the first
HOPPER = Sm90Config(consumers=2, block_n=256, stages=4, store_n=128)

Metas = Mapping[str, ArrayMeta]
# of a step's Config
Launches = Callable[[Product, Problem, Metas, Any], list[Step]]
Maps = Callable[[Product, Problem, Metas, Any], Mapping[str, Mapped]]


# --- launches ------------------------------------------------------------------------------------


def _elements(product: Product, p: Problem, metas: Metas, config: None) -> list[Step]:
    return naive.product_steps(product, variant(product, p))


def _tiles(build: Callable[..., Any], product: Product, p: Problem, metas: Metas, config: Any) -> list[Step]:
    """Return the launch of a kernel of (y, a, b, M, N, K), one block per tile."""
    args = ("y", "a", "b", product.m.size, product.n.size, product.k.size)
    return [Step(build(config), (block_count(product, config),), args, config.shared_bytes(DTYPE))]


def _boxes(build: Callable[..., Any], product: Product, p: Problem, metas: Metas, config: Sm90Config) -> list[Step]:
    """Return the launch of a kernel of the maps of a, b and y and M, N, K, one block per tile."""
    args = (*sm90.product_maps(product, p, metas, config), product.m.size, product.n.size, product.k.size)
    return [Step(build(config), (config.tiles(product),), args, config.shared_bytes)]


# --- all steps -----------------------------------------------------------------------------------


class LadderStep(NamedTuple):
    """A step: its idea, its Config, its launches, the devices that it runs on, and its tensor maps."""

    idea: str
    config: Any
    launches: Launches
    served: Callable[[Device], bool] = lambda device: True
    maps: Maps = lambda *_: {}

    def configs(self, product: Product, p: Problem, metas: Metas, device: Device) -> Iterator[tuple[Any, str]]:
        """Yield its Config, if it can compute the product."""
        if self.served(device) and (self.config is None or self._has_whole_vectors(product, p, metas, device)):
            yield self.config, self.idea

    def _has_whole_vectors(self, product: Product, p: Problem, metas: Metas, device: Device) -> bool:
        """Whether rows are whole vectors, and everything fits."""
        aligned = not any(metas[name].pointer % 16 for name in "yab")
        whole = product.k.size > 0 and not (product.n.size % MULTIPLE or product.k.size % MULTIPLE)
        return aligned and whole and product.m.size < 2**30 and block_count(product, self.config) <= MOST_BLOCKS

    def rung(self, name: str) -> Rung:
        return Rung(name, self.configs, self.launches, self.maps)


def _on_tensor_cores(device: Device) -> bool:
    return device.has_mma_bf16


def _on_hopper(device: Device) -> bool:
    return device.has_wgmma


STEPS: dict[str, LadderStep] = {
    "thread_an_element": LadderStep("one thread per element: all operands come from memory", None, _elements),
    "shared_tiles": LadderStep(
        "one block per tile: each load to shared memory is used 32 times",
        TilesConfig(lanes=32, rows=1, columns=1, block_k=32),
        partial(_tiles, build_tiles),
    ),
    "register_tiles": LadderStep(
        "one thread per tile: each read of shared memory is used 8 times",
        TilesConfig(lanes=16, rows=8, columns=8, block_k=16),
        partial(_tiles, build_tiles),
    ),
    "tensor_cores": LadderStep(
        "a warp multiplies by mma.sync",
        Sm80Config(2, 2, 64, 64, block_k=64, num_stages=1, min_blocks=2),
        partial(_tiles, build_warps),
        _on_tensor_cores,
    ),
    "copies_ahead": LadderStep(
        "the next slices are copied while one is multiplied",
        Sm80Config(2, 2, 64, 64, block_k=64, num_stages=3, min_blocks=2),
        partial(_tiles, build_warps),
        _on_tensor_cores,
    ),
    "boxes": LadderStep(
        "a warpgroup multiplies out of shared memory, one thread loads boxes",
        HOPPER,
        partial(_boxes, build_boxes),
        _on_hopper,
        sm90.product_maps,
    ),
    "roles": LadderStep(
        "warps that load, and warps that multiply", HOPPER, partial(_boxes, build_roles), _on_hopper, sm90.product_maps
    ),
    "persistent": LadderStep(
        "a block computes one tile after another", HOPPER, sm90.product_steps, _on_hopper, sm90.product_maps
    ),
    "clusters": LadderStep(
        "two blocks send each other the slices that they share",
        replace(HOPPER, cluster=Cluster(2, 1)),
        sm90.product_steps,
        _on_hopper,
        sm90.product_maps,
    ),
}


def choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the steps for a plain product of row-major bfloat16 matrices without gaps."""
    metas = {**problem.arrays, **results}
    options = (problem.transpose_a, problem.transpose_b, problem.activation, problem.precision)
    if any(options) or metas.keys() != {"a", "b", "y"} or problem.dtype != DTYPE:
        return
    if all(len(meta.shape) == 2 and meta.is_row_major for meta in metas.values()):
        for name, step in STEPS.items():
            yield from step.rung(name).forward_choices(problem, results, device)


# the steps are rungs of a separate operation, with matmul's validator, plans and errors
forward = Operation(replace(SPEC, name="matmul_ladder", rungs=tuple(STEPS)), rungs=(choices,))


def run_step(name: str, a: Any, b: Any, out: Any = None, stream: Any = None) -> Any:
    """Compute a @ b by the step `name` of STEPS.

    a [M, K], b [K, N]: contiguous device arrays of bfloat16 (in the simulator NumPy arrays). out, stream and the result
    are those of `dualops.cuda.matmul`. `dualops.cuda.plan("matmul_ladder", a, b, kernel=name)` shows the launch.
    Raises ValueError for an unknown step, NotImplementedError if the step can't compute the product. All steps except
    the first need N and K that are multiples of 8. tensor_cores and copies_ahead need compute capability 8.0, those
    after them 9.0.
    """
    return forward((a, b, None), (False, False, None, None, False), out, name, stream)
