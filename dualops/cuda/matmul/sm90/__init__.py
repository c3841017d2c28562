"""matmul's rung sm90: the products that it supports, their tiles, and the launches of both directions.

persistent.py   the kernel: persistent blocks with a producer and warpgroups that multiply
split.py        for few tiles with long sums: each block of a cluster computes a part of a sum
slices.py       the sum of a tile, in both kernels, and accurate float32 sums
output.py       bias and activation of a tile's sums, and their stores
parts.py        copies of factors whose layout or dtype tensor cores can't read, before the product
boxed.py        the factors and results that can be loaded and stored as boxes
config.py       tiles; arguments.py: the kernels' arguments
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ....spec import ArrayMeta, Problem
from ...launch.device import Device
from ...launch.step import Step
from ...launch.tensor_map import ROUNDED, Mapped
from ...tile.boxes import box_shape
from ...tile.epilogue import NEAR, output_box
from ...tile.warpgroup import ROWS
from ..product import Axis, Bias, Product, Result, needs_tensor_cores, variant
from ..tiled import Rung, writing
from .arguments import Extent, Sm90Variant, To
from .boxed import MOST, FactorBoxes, factor_boxes, other_axes, result_mapped
from .config import Sm90Config, configs
from .parts import Ready, ready
from .persistent import build_product
from .slices import tiles_of
from .split import build_split_product

TYPES = ("bfloat16", "float16")


class Boxed(NamedTuple):
    """A product of this rung: its factors' boxes, and its kernel's compile-time values."""

    product: Product
    a: FactorBoxes
    b: FactorBoxes
    others: tuple[Axis, ...]
    found: Sm90Variant
    row_out: int  # `found.out` if results are stored row by row

    def variant_of(self, config: Sm90Config) -> Sm90Variant:
        """Return the compile-time values of this Config's kernel. A split sum is stored row by row."""
        return self.found._replace(out=self.row_out) if config.splits > 1 else self.found

    def stored(self, config: Sm90Config) -> str:
        """Return which of the results "y" and "z" are stored as boxes."""
        found = self.variant_of(config)
        return "" if found.out else "yz"[: 1 + found.product.preactivation]

    def name(self, which: str) -> str:
        """Return the name in steps of the map of "y", "z", "a" or "b"."""
        return f"{self.product.names[0]}: {which}_map"

    def maps(self, config: Sm90Config, metas: Mapping[str, ArrayMeta]) -> dict[str, Mapped]:
        """Return its tensor maps by those names."""
        dtype, tiles = self.found.product.dtype, tiles_of(config, self.a.major, self.b.major)
        dtype = dtype if self.found.short else ROUNDED
        sharing = (config.cluster.of_a, config.cluster.of_b)
        made = {
            self.name(which): factor.mapped(dtype, box_shape(tile, shared), tile.span, which)
            for which, factor, tile, shared in zip("ab", (self.a, self.b), tiles, sharing, strict=True)
        }
        for which in self.stored(config):
            mapped = result_mapped(self.product, which, metas, output_box(config.block_n, config.itemsize))
            assert mapped is not None  # `boxed` has checked it
            made[self.name(which)] = mapped
        return made

    def step(self, config: Sm90Config) -> Step:
        """Return the launch of the product."""
        product = self.product
        y, z, _, _, bias = product.names
        sizes = (product.batches, self.others[0].size, product.rounds, product.m.size, product.n.size, product.k.size)
        y_map, z_map = (self.name(which) if which in self.stored(config) else 0 for which in "yz")
        results = (
            Result(y, tuple(axis.y for axis in self.others[:2]), product.m.y, product.n.y),
            Result(z, tuple(axis.z for axis in self.others[:2]), product.m.z, product.n.z),
        )
        to = To(y_map, z_map, *results, Bias(bias, product.bias_stride))
        args = (self.name("a"), self.name("b"), to, Extent(*sizes, self.a.steps, self.b.steps))
        found, tiles = self.variant_of(config), config.tiles(product)
        if config.splits > 1:
            return Step(build_split_product(config, found), (tiles * config.splits,), args, config.shared_bytes)
        return Step(build_product(config, found), (tiles,), args, config.shared_bytes, resident=True)


def boxed(product: Product, p: Problem, metas: Mapping[str, ArrayMeta]) -> Boxed | None:
    """Return a product as this rung computes it, None if it can't."""
    a, b, others = factor_boxes(product, "a", metas), factor_boxes(product, "b", metas), other_axes(product)
    if a is None or b is None or others is None or product.m.size > MOST or product.n.size > MOST:
        return None
    if needs_tensor_cores(p) and (a.major, b.major) != ("k", "k"):
        return None
    found = variant(product, p)
    results = "yz" if found.preactivation else "y"
    as_boxes = all(result_mapped(product, which, metas, output_box(ROWS, p.itemsize)) for which in results)
    row_out = writing(product, found, metas, NEAR)
    same = found._replace(batch_axes=1, outer_axes=0)  # the kernel depends on the number of `others` only
    parts = needs_tensor_cores(p) and p.precision == "3xtf32"
    kernel_of = Sm90Variant(same, a.major, b.major, len(others), 0 if as_boxes else row_out, parts)
    return Boxed(product, a, b, others, kernel_of, row_out)


def _boxed(product: Product, p: Problem, metas: Mapping[str, ArrayMeta]) -> tuple[Ready, Boxed]:
    """Return the product with the copies of factors that tensor cores need, and as this rung computes it."""
    made = ready(product, p, metas)
    found = boxed(made.product, p, made.metas)
    assert found is not None  # it has a Config
    return made, found


def _configs(
    product: Product, p: Problem, metas: Mapping[str, ArrayMeta], device: Device
) -> Iterator[tuple[Sm90Config, str]]:
    """Yield tiles for a product, best first; none if this rung can't compute it."""
    made = ready(product, p, metas)
    if product.k.size and product.rounds and boxed(made.product, p, made.metas):
        yield from configs(made.product, device, p.precision if needs_tensor_cores(p) else None)


def product_steps(product: Product, p: Problem, metas: Mapping[str, ArrayMeta], config: Sm90Config) -> list[Step]:
    """Return the launches that compute a product, none for an empty one."""
    if not config.tiles(product):
        return []
    made, found = _boxed(product, p, metas)
    return [*(each.step() for each in made.copies), found.step(config)]


def product_maps(product: Product, p: Problem, metas: Mapping[str, ArrayMeta], config: Sm90Config) -> dict[str, Mapped]:
    """Return the tensor maps of its launch."""
    if not config.tiles(product):
        return {}
    made, found = _boxed(product, p, metas)
    return found.maps(config, made.metas)


def product_workspace(
    product: Product, p: Problem, metas: Mapping[str, ArrayMeta], config: Sm90Config
) -> dict[str, ArrayMeta]:
    """Return the arrays for the copies of factors."""
    made = ready(product, p, metas)
    return {each.name: made.metas[each.name] for each in made.copies} if config.tiles(product) else {}


def _serves(problem: Problem, device: Device) -> bool:
    return (problem.dtype in TYPES or needs_tensor_cores(problem)) and device.has_wgmma


RUNG = Rung("sm90", _configs, product_steps, product_maps, product_workspace, _serves)
