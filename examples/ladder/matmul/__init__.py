"""matmul as a ladder: each step is a kernel with one idea more than the one before. README.md goes up, step by step.

    thread_an_element   a thread an element of y, which reads a row of a and a column of b       naive.py
    shared_tiles        a block a tile of y, of slices in shared memory                          tiles.py
    register_tiles      a thread a tile of y in registers                                        tiles.py
    tensor_cores        a warp a tile of y: mma.sync multiplies, ldmatrix reads                  warps.py
    copies_ahead        several slices are on their way (cp.async) while one is multiplied       warps.py
    boxes               a warpgroup multiplies out of shared memory (wgmma), one thread loads    warpgroups.py
                        boxes (TMA)
    roles               warps that load, and warps that multiply                                 warpgroups.py
    persistent          a block makes one tile after another                                     sm90/
    clusters            blocks send one another what they share                                  sm90/

For learning, tests and benchmarks: `run_step("tensor_cores", a, b)` on contiguous a [M, K] and b [K, N] of bfloat16,
forward only, wherever kernels run. What `dualops.cuda.matmul` takes instead goes on from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from dualops.cuda.launch.device import Device
from dualops.cuda.launch.maps import Mapped
from dualops.cuda.launch.operation import Operation
from dualops.cuda.launch.plans import Choice
from dualops.cuda.launch.step import Step
from dualops.cuda.matmul import naive, sm90, tiled
from dualops.cuda.matmul.product import Product, variant
from dualops.cuda.matmul.sm80_config import Sm80Config
from dualops.cuda.matmul.sm90.config import Sm90Config
from dualops.cuda.matmul.tiled import MOST_BLOCKS, Rung, block_count
from dualops.cuda.tile.boxes import Cluster
from dualops.spec import ArrayMeta, Problem, matmul as SPEC

from .tiles import DTYPE, TilesConfig, build_tiles
from .warpgroups import build_boxes, build_roles
from .warps import build_warps

MULTIPLE = 8  # elements of 16 bytes, which all steps but the first load at once
HOPPER = Sm90Config(consumers=2, block_n=256, stages=4, store_n=128)

Metas = Mapping[str, ArrayMeta]
# of a step's Config
Launches = Callable[[Product, Problem, Metas, Any], list[Step]]
Maps = Callable[[Product, Problem, Metas, Any], Mapping[str, Mapped]]


# --- launches ------------------------------------------------------------------------------------


def _elements(product: Product, p: Problem, metas: Metas, config: None) -> list[Step]:
    return naive.product_steps(product, variant(product, p))


def _tiles(build: Callable[..., Any], product: Product, p: Problem, metas: Metas, config: Any) -> list[Step]:
    """A kernel of (y, a, b, M, N, K), a block a tile."""
    args = ("y", "a", "b", product.m.size, product.n.size, product.k.size)
    return [Step(build(config), (block_count(product, config),), args, config.shared_bytes(DTYPE))]


def _boxes(build: Callable[..., Any], product: Product, p: Problem, metas: Metas, config: Sm90Config) -> list[Step]:
    """A kernel of the maps of a, b and y and M, N, K, a block a tile."""
    args = (*sm90.product_maps(product, p, metas, config), product.m.size, product.n.size, product.k.size)
    return [Step(build(config), (config.tiles(product),), args, config.shared_bytes)]


# --- all steps -----------------------------------------------------------------------------------


class LadderStep(NamedTuple):
    """A step: what is new in it, its Config, on what device and how it is launched."""

    idea: str
    config: Any
    launches: Launches
    served: Callable[[Device], bool] = lambda device: True
    maps: Maps = lambda *_: {}

    def configs(self, product: Product, p: Problem, metas: Metas, device: Device) -> Iterator[tuple[Any, str]]:
        """Its Config, if it does such a product."""
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
    "thread_an_element": LadderStep("a thread an element: all comes from memory", None, _elements),
    "shared_tiles": LadderStep(
        "a block a tile: what it loads to shared memory is used 32 times",
        TilesConfig(lanes=32, rows=1, columns=1, block_k=32),
        partial(_tiles, build_tiles),
    ),
    "register_tiles": LadderStep(
        "a thread a tile: what it reads from shared memory is used 8 times",
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
        "the next slices come while one is multiplied",
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
        "warps that load, and warps that multiply",
        HOPPER,
        partial(_boxes, build_roles),
        _on_hopper,
        sm90.product_maps,
    ),
    "persistent": LadderStep(
        "a block makes one tile after another", HOPPER, sm90.product_steps, _on_hopper, sm90.product_maps
    ),
    "clusters": LadderStep(
        "two blocks send each other what they share",
        replace(HOPPER, cluster=Cluster(2, 1)),
        sm90.product_steps,
        _on_hopper,
        sm90.product_maps,
    ),
}


def choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """The steps that do the problem: a plain product of matrices of bfloat16 that lie row by row, without gaps."""
    metas = {**problem.arrays, **results}
    beside = (problem.transpose_a, problem.transpose_b, problem.activation, problem.precision)
    if any(beside) or metas.keys() != {"a", "b", "y"} or problem.dtype != DTYPE:
        return
    if all(len(meta.shape) == 2 and meta.is_row_major for meta in metas.values()):
        for name, step in STEPS.items():
            yield from tiled.forward_choices(step.rung(name), problem, results, device)


# the steps are rungs of an operation of its own, with matmul's validator, plans and errors
forward = Operation(replace(SPEC, name="matmul_ladder", rungs=tuple(STEPS)), rungs=(choices,))


def run_step(name: str, a: Any, b: Any, out: Any = None, stream: Any = None) -> Any:
    """a @ b by the step `name` of STEPS.

    a [M, K], b [K, N]: contiguous device arrays of bfloat16 (in the simulator NumPy arrays); out, stream and what is
    returned: as for `dualops.cuda.matmul`. `dualops.cuda.plan("matmul_ladder", a, b, kernel=name)` says how it is
    launched.
    Raises ValueError for an unknown step, NotImplementedError where the step does not do the product: all but the first
    need N and K that are multiples of 8, tensor_cores and copies_ahead compute capability 8.0, those after them 9.0.
    """
    return forward((a, b, None), (False, False, None, None, False), out, name, stream)
