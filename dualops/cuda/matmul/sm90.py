"""matmul on Hopper's tensor cores: factors that can be loaded as boxes, of 16 bits, or float32 in a `precision`.

Products of a warpgroup (wgmma) read both factors from shared memory and run beside the threads, so that threads have
little to do: one loads, the others start products and wait for them. A block stays on its SM and makes one tile
[BLOCK_M, BLOCK_N] of the result after another.

    producer, one thread                                   consumers, a warpgroup for each 64 rows of the tile
    for each of the block's tiles:                         for each of the block's tiles:
        for each slice of BLOCK_K along the sum:               for each slice:
    1       acquire a stage                                3       wait for the stage
    2       load a [BLOCK_M, BLOCK_K] and                  4       acc [64, BLOCK_N] += a @ b
            b [BLOCK_K, BLOCK_N] into it                   5       release the stage of the slice before
                                                           6   y = act(acc + bias), which is copied out of shared
                                                               memory while the next tile begins

While consumers are at 6, the producer fills all stages with the next tile's slices. Blocks of a cluster make tiles
above or beside one another: each loads a part of what they share and sends it to the others, so that L2 is asked for
less. The order of tiles keeps in L2 what blocks share (`schedule`). A result that can't be stored as boxes goes row by
row. Where a result has fewer tiles than the GPU has SMs, the sum of each is split (sm90_split.py).

The sum of a slice's products is float32, added up inside of the tensor cores. Bit-equal from run to run: an element is
summed in one order, whichever block makes it.

float32 is multiplied as tf32, 32 steps of the sum in the place of 64, and along the sum alone: a factor that does not
lie so, or can't be loaded as boxes, is copied first (`parts`). "tf32": products look at the first 11 bits of mantissa
and would cut off the rest; loads round it away on their way, at no cost. "3xtf32": every factor is copied first, as its
numbers' two parts side by side, and a slice is three products of parts. Sums are made of pieces (`pieces`).

Shared memory: stages * ITEMSIZE * BLOCK_K * (BLOCK_M + BLOCK_N) bytes, and ITEMSIZE * BLOCK_M * STORE_N for the result
on its way. Registers: BLOCK_N / 2 of acc, as many again where there are pieces, and about 60; the producer's warpgroup
gives its own to the consumers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ...spec import ArrayMeta, Problem
from ..backend import Kernel, builds, cuda, f32, i32, kernel, u8, u32
from ..device import Device
from ..maps import ROUNDED, Mapped
from ..plans import Choice, Choices
from ..step import Step
from ..tile.boxes import Corner, begin_maps, box_shape
from ..tile.epilogue import NEAR, output_box
from ..tile.roles import roles
from ..tile.schedule import schedule
from ..tile.warpgroup import ROWS, my_warpgroup
from . import tiled
from .boxed import MOST, FactorBoxes, factor_boxes, other_axes, result_mapped
from .parts import Ready, ready
from .product import Axis, Product, Result, needs_tensor_cores, variant
from .sm90_arguments import Extent, Sm90Variant, To, argument_types, other_coordinates
from .sm90_config import Sm90Config, configs
from .sm90_output import box_results, row_results
from .sm90_slices import slices_of, tiles_of
from .sm90_split import build_split_product
from .tiled import Rung, writing

TYPES = ("bfloat16", "float16")


@builds
def build_product(config: Sm90Config, found: Sm90Variant) -> Kernel:
    """matmul_sm90(a_map, b_map, to, extent)."""
    slices = slices_of(config, found)
    pipe, role = slices.pipe, roles(config.consumers)
    walk, axes = schedule(config.group, config.cluster), other_coordinates(found.others)
    output = (row_results if found.out else box_results)(config, found)

    @kernel(*argument_types(found), threads=role.threads, cluster=config.cluster.blocks)
    def matmul_sm90(a_map, b_map, to, extent):
        smem, floats = cuda.shared.array(0, u8, alignment=1024), cuda.shared.array(0, f32, alignment=1024)
        barriers = pipe.barriers()
        M, N = extent.M, extent.N
        m_blocks = (M + (config.block_m - 1)) // config.block_m
        n_blocks = (N + (config.block_n - 1)) // config.block_n
        count = u32((extent.K + (config.block_k - 1)) // config.block_k)
        tiles = walk.numbers(extent.batches, m_blocks, n_blocks)
        warpgroup = my_warpgroup()
        if cuda.threadIdx.x == 0:
            pipe.init(barriers)
        begin_maps((a_map, b_map), 1)
        output.begin(to, 3)
        pipe.start()
        tile, i = walk.first(), u32(0)
        if warpgroup == config.consumers:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                while tile < tiles:
                    at = walk.position(tile, m_blocks, n_blocks)
                    m0, n0 = i32(at.m_block * config.block_m), i32(at.n_block * config.block_n)
                    for r in range(extent.rounds):
                        a_others = axes.factor(extent, extent.a_steps, at.batch, r)
                        b_others = axes.factor(extent, extent.b_steps, at.batch, r)
                        corners = (Corner(m0, i32(0), a_others), Corner(n0, i32(0), b_others))
                        i = slices.load(smem, barriers, (a_map, b_map), corners, i, count)
                    tile = u32(tile + walk.step())
        else:
            role.consume()
            acc = slices.fragment()  # [64, BLOCK_N]
            while tile < tiles:
                at = walk.position(tile, m_blocks, n_blocks)
                m0, n0 = i32(at.m_block * config.block_m) + ROWS * warpgroup, i32(at.n_block * config.block_n)
                output.start(floats, to, n0, N)
                i = slices.multiply(acc, smem, barriers, warpgroup, i, u32(count * extent.rounds))
                pipe.release(barriers, i)
                i = pipe.next(i)
                tile = u32(tile + walk.step())
                output.store(smem, floats, to, acc, Corner(m0, n0, axes.result(extent, at.batch)), M, N)
            output.finish()
        pipe.leave()

    return matmul_sm90


# --- choices -------------------------------------------------------------------------------------


class Boxed(NamedTuple):
    """A product that this rung does: its factors' boxes, and what its kernel is built for."""

    product: Product
    a: FactorBoxes
    b: FactorBoxes
    others: tuple[Axis, ...]
    found: Sm90Variant
    row_out: int  # `found.out` where results go row by row

    def variant_of(self, config: Sm90Config) -> Sm90Variant:
        """What this Config's kernel is built for: a sum that is split is added up row by row."""
        return self.found._replace(out=self.row_out) if config.splits > 1 else self.found

    def stored(self, config: Sm90Config) -> str:
        """Which of the results "y" and "z" are stored as boxes."""
        found = self.variant_of(config)
        return "" if found.out else "yz"[: 1 + found.product.preactivation]

    def name(self, which: str) -> str:
        """What steps call the map of "y", "z", "a" or "b"."""
        return f"{self.product.names[0]}: {which}_map"

    def maps(self, config: Sm90Config, metas: Mapping[str, ArrayMeta]) -> dict[str, Mapped]:
        """Its tensor maps, by those names."""
        dtype, tiles = self.found.product.dtype, tiles_of(config, self.a.major, self.b.major)
        dtype = dtype if self.found.short else ROUNDED
        sharing = (config.cluster.of_a, config.cluster.of_b)
        made = {
            self.name(which): factor.mapped(dtype, box_shape(tile, shared), tile.span, which)
            for which, factor, tile, shared in zip("ab", (self.a, self.b), tiles, sharing, strict=True)
        }
        for which in self.stored(config):
            mapped = result_mapped(self.product, which, metas, output_box(config.block_n, config.itemsize))
            assert mapped is not None  # `boxed` found that it can be
            made[self.name(which)] = mapped
        return made

    def step(self, config: Sm90Config) -> Step:
        """Its launch."""
        product = self.product
        y, z, _, _, bias = product.names
        sizes = (product.batches, self.others[0].size, product.rounds, product.m.size, product.n.size, product.k.size)
        y_map, z_map = (self.name(which) if which in self.stored(config) else 0 for which in "yz")
        results = (
            Result(y, tuple(axis.y for axis in self.others[:2]), product.m.y, product.n.y),
            Result(z, tuple(axis.z for axis in self.others[:2]), product.m.z, product.n.z),
        )
        to = To(y_map, z_map, *results, bias, product.bias_stride)
        args = (self.name("a"), self.name("b"), to, Extent(*sizes, self.a.steps, self.b.steps))
        found, tiles = self.variant_of(config), config.tiles(product)
        if config.splits > 1:
            return Step(build_split_product(config, found), (tiles * config.splits,), args, config.shared_bytes)
        return Step(build_product(config, found), (tiles,), args, config.shared_bytes, resident=True)


def boxed(product: Product, p: Problem, metas: Mapping[str, ArrayMeta]) -> Boxed | None:
    """None for a product that this rung doesn't do."""
    a, b, others = factor_boxes(product, "a", metas), factor_boxes(product, "b", metas), other_axes(product)
    if a is None or b is None or others is None or product.m.size > MOST or product.n.size > MOST:
        return None
    if needs_tensor_cores(p) and (a.major, b.major) != ("k", "k"):
        return None
    found = variant(product, p)
    results = "yz" if found.preactivation else "y"
    as_boxes = all(result_mapped(product, which, metas, output_box(ROWS, p.itemsize)) for which in results)
    row_out = writing(product, found, metas, NEAR)
    same = found._replace(batch_axes=1, outer_axes=0)  # of axes the kernel knows `others` alone
    parts = needs_tensor_cores(p) and p.precision == "3xtf32"
    kernel_of = Sm90Variant(same, a.major, b.major, len(others), 0 if as_boxes else row_out, parts)
    return Boxed(product, a, b, others, kernel_of, row_out)


def _ready(product: Product, p: Problem, metas: Mapping[str, ArrayMeta]) -> tuple[Ready, Boxed | None]:
    """The product on the copies of factors that tensor cores need, if this rung does it then."""
    made = ready(product, p, metas)
    return made, boxed(made.product, p, made.metas)


def _boxed(product: Product, p: Problem, metas: Mapping[str, ArrayMeta]) -> tuple[Ready, Boxed]:
    made, found = _ready(product, p, metas)
    assert found is not None  # there was a Config for it
    return made, found


def _configs(
    product: Product, p: Problem, metas: Mapping[str, ArrayMeta], device: Device
) -> Iterator[tuple[Sm90Config, str]]:
    """Tiles for a product that this rung does, best first."""
    made, found = _ready(product, p, metas)
    if product.k.size and product.rounds and found:
        yield from configs(made.product, device, p.precision if needs_tensor_cores(p) else None)


def product_steps(product: Product, p: Problem, metas: Mapping[str, ArrayMeta], config: Sm90Config) -> list[Step]:
    """The launches that make a product, if there is anything to make."""
    if not config.tiles(product):
        return []
    made, found = _boxed(product, p, metas)
    return [*(each.step() for each in made.copies), found.step(config)]


def product_maps(product: Product, p: Problem, metas: Mapping[str, ArrayMeta], config: Sm90Config) -> dict[str, Mapped]:
    """The tensor maps of its launch."""
    if not config.tiles(product):
        return {}
    made, found = _boxed(product, p, metas)
    return found.maps(config, made.metas)


def product_workspace(
    product: Product, p: Problem, metas: Mapping[str, ArrayMeta], config: Sm90Config
) -> dict[str, ArrayMeta]:
    """The copies."""
    made = ready(product, p, metas)
    return {each.name: made.metas[each.name] for each in made.copies} if config.tiles(product) else {}


RUNG = Rung("sm90", _configs, product_steps, product_maps, product_workspace)


def _choices(forward: bool) -> Choices:
    """Tiles for products that can be loaded as boxes, best first; of a gradient, where all its products are so."""
    choices = tiled.forward_choices if forward else tiled.backward_choices

    def found(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
        if (problem.dtype in TYPES or needs_tensor_cores(problem)) and device.has_wgmma:
            yield from choices(RUNG, problem, results, device)

    return found


forward_choices, backward_choices = _choices(True), _choices(False)
