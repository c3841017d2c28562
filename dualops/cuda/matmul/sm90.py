"""matmul on Hopper's tensor cores: 16-bit factors that can be loaded as boxes.

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
less. A result to which more is done than rounding, or that can't be stored as boxes, goes row by row. The order of
tiles keeps in L2 what blocks share (`schedule`).

The sum of a slice's products is float32, added up inside of the tensor cores. Bit-equal from run to run: an element is
summed in one order, whichever block makes it.

Shared memory: stages * 2 * BLOCK_K * (BLOCK_M + BLOCK_N) bytes, and 2 * BLOCK_M * STORE_N for the result on its way.
Registers: BLOCK_N / 2 of acc and about 60; the producer's warpgroup gives its own to the consumers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ..backend import Kernel, Namespace, builds, cuda, f32, i32, i64, kernel, pointer, types, u8, u32, verb
from ..device import Device
from ..maps import ROUNDED, Mapped
from ..plans import Choice, Choices
from ..step import Step
from ..tile.boxes import Corner, begin_map, box_shape, box_tile
from ..tile.epilogue import NEAR, box_output, output_box, row_output
from ..tile.pipeline import pipeline
from ..tile.roles import roles
from ..tile.schedule import schedule
from ..tile.storage import storage
from ..tile.swizzle import Operand
from ..tile.warpgroup import ROWS, my_warpgroup, warpgroup_mma
from . import tiled
from .boxed import MOST, FactorBoxes, factor_boxes, other_axes, result_mapped, tile_of
from .parts import Ready, ready
from .pieces import sums_of_pieces
from .product import Axis, Product, Result, Variant, needs_tensor_cores, variant
from .sm90_config import Sm90Config, configs
from .tiled import Results, Rung, finishing, writing

TYPES = ("bfloat16", "float16")


class Sm90Variant(NamedTuple):
    """What a kernel is built for beside its Config. a, b: the contiguous axis of each factor, "k" or "mn"."""

    product: Variant
    a: str
    b: str
    others: int  # axes of a factor's map beside its own two
    out: int  # elements of a row of the results that are stored at once; 0 where they are stored as boxes
    split: bool = False  # factors are parts of float32 (`parts`)


class Extent(NamedTuple):
    """How large a product is. steps of a factor: 1 along the map's other axes that it has, 0 where it is broadcast."""

    batches: Any
    inner: Any  # of these, how many lie along the inner batch axis
    rounds: Any  # products of matrices that an element is the sum of
    M: Any
    N: Any
    K: Any
    a_steps: tuple[Any, ...]
    b_steps: tuple[Any, ...]


class OtherAxes(Namespace):
    """Coordinates along a map's axes beside rows and columns."""

    factor: Callable[..., Any]  # (extent, steps, batch, r) -> a tuple of them, in product number r
    result: Callable[..., Any]  # (extent, batch) -> a tuple
    begin: Callable[..., Any]  # (result, coordinates) -> where its matrix begins


def _other_axes(others: int) -> OtherAxes:
    @verb
    def one(extent, steps, batch, r):
        return (i32(batch) * steps[0],)

    @verb
    def one_of_result(extent, batch):
        return (i32(batch),)

    @verb
    def three(extent, steps, batch, r):
        inner, outer = i32(u32(batch) % u32(extent.inner)), i32(u32(batch) // u32(extent.inner))
        return (inner * steps[0], outer * steps[1], i32(r) * steps[2])

    @verb
    def two_of_result(extent, batch):
        return (i32(u32(batch) % u32(extent.inner)), i32(u32(batch) // u32(extent.inner)))

    @verb
    def begin(result, coordinates):
        at = i64(0)
        for axis in range(len(coordinates)):
            at += coordinates[axis] * result.batch[axis]
        return at

    if others == 1:
        return OtherAxes(factor=one, result=one_of_result, begin=begin)
    return OtherAxes(factor=three, result=two_of_result, begin=begin)


def tiles_of(config: Sm90Config, a_major: str, b_major: str) -> tuple[Operand, Operand]:
    """A stage's tiles of a and b."""
    depth, nbytes = config.block_k, config.itemsize
    return tile_of(a_major, config.block_m, depth, nbytes), tile_of(b_major, config.block_n, depth, nbytes)


@builds
def build_product(config: Sm90Config, found: Sm90Variant) -> Kernel:
    """matmul_sm90(y_map, a_map, b_map, y, z, bias, bias_stride, extent)."""
    product, cluster = found.product, config.cluster
    a_operand, b_operand = tiles_of(config, found.a, found.b)
    a_tile = box_tile(a_operand, 0, found.others, cluster.of_a)
    b_tile = box_tile(b_operand, config.stages * a_operand.nbytes, found.others, cluster.of_b)
    pipe = pipeline(config.stages, config.stage_bytes, 4 * config.consumers, cluster.blocks)
    mma = warpgroup_mma(product.dtype, a_operand, b_operand, found.split)
    pieces = sums_of_pieces(config.piece, pipe, mma, a_tile, b_tile)
    role, walk, axes = roles(config.consumers), schedule(config.group, cluster), _other_axes(found.others)
    result_axes = min(found.others, 2)
    boxes = box_output(product.dtype, config.block_n, config.output_at, config.store_n, result_axes)
    finish = finishing(product, NEAR, max(found.out, 1), short=product.dtype in TYPES).finish
    rows = row_output(config.block_n, config.output_at, config.itemsize * config.store_n // 4, finish)
    as_boxes = found.out == 0

    array = pointer(storage(product.dtype).element)
    result = types.NamedTuple((array, types.UniTuple(i64, result_axes), i64, i64), Result)
    bias_type = pointer(storage(product.bias_dtype or product.dtype).element)
    extent_type = types.NamedTuple((*[i32] * 6, *[types.UniTuple(i32, found.others)] * 2), Extent)

    @kernel(*(i64, i64, i64, result, result, bias_type, i64, extent_type), threads=role.threads, cluster=cluster.blocks)
    def matmul_sm90(y_map, a_map, b_map, y, z, bias, bias_stride, extent):
        smem, floats = cuda.shared.array(0, u8, alignment=1024), cuda.shared.array(0, f32, alignment=1024)
        barriers = pipe.barriers()
        M, N = extent.M, extent.N
        m_blocks = (M + (config.block_m - 1)) // config.block_m
        n_blocks = (N + (config.block_n - 1)) // config.block_n
        slices = u32((extent.K + (config.block_k - 1)) // config.block_k)
        tiles = walk.numbers(extent.batches, m_blocks, n_blocks)
        warpgroup = my_warpgroup()
        if cuda.threadIdx.x == 0:
            pipe.init(barriers)
        pipe.start()
        tile, i = walk.first(), u32(0)
        if warpgroup == config.consumers:
            role.produce()
            if cuda.threadIdx.x % 128 == 0:
                begin_map(a_map)
                begin_map(b_map)
                while tile < tiles:
                    at = walk.position(tile, m_blocks, n_blocks)
                    m0, n0 = i32(at.m_block * config.block_m), i32(at.n_block * config.block_n)
                    for r in range(extent.rounds):
                        a_others = axes.factor(extent, extent.a_steps, at.batch, r)
                        b_others = axes.factor(extent, extent.b_steps, at.batch, r)
                        end = u32(i + slices)
                        k0 = i32(0)
                        while i != end:
                            stage = pipe.acquire(barriers, i)
                            a_tile.load(smem, stage, a_map, Corner(m0, k0, a_others), barriers.full)
                            b_tile.load(smem, stage, b_map, Corner(n0, k0, b_others), barriers.full)
                            i = pipe.next(i)
                            k0 = i32(k0 + config.block_k)
                    tile = u32(tile + walk.step())
        else:
            role.consume()
            if as_boxes:
                boxes.begin(y_map)
            acc = mma.fragment()  # [64, BLOCK_N]
            total = u32(slices * extent.rounds)
            while tile < tiles:
                at = walk.position(tile, m_blocks, n_blocks)
                m0, n0 = i32(at.m_block * config.block_m) + ROWS * warpgroup, i32(at.n_block * config.block_n)
                if config.piece:
                    i = pieces.add_up(acc, smem, barriers, i, total, warpgroup)
                else:
                    stage = pipe.wait(barriers, i)
                    mma.start(acc, smem, a_tile.at(stage), b_tile.at(stage), warpgroup)
                    last = u32(i + total - 1)
                    while i != last:
                        i = pipe.next(i)
                        stage = pipe.wait(barriers, i)
                        mma.add(acc, smem, a_tile.at(stage), b_tile.at(stage), warpgroup)
                        mma.wait_but_one(acc)
                        pipe.release(barriers, i - 1)
                    mma.wait(acc)
                    pipe.release(barriers, i)
                    i = pipe.next(i)
                tile = u32(tile + walk.step())

                others = axes.result(extent, at.batch)
                if as_boxes:
                    boxes.store(smem, y_map, acc, Corner(m0, n0, others))
                else:
                    y_begin, z_begin = axes.begin(y, others), axes.begin(z, others)
                    results = Results(y, z, y_begin, z_begin, bias, bias_stride, N)
                    rows.store(floats, acc, Corner(m0, n0, others), M, results)
            if as_boxes:
                boxes.finish()
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

    def name(self, which: str) -> str:
        """What steps call the map of "y", "a" or "b"."""
        return f"{self.product.names[0]}: {which}_map"

    def maps(self, config: Sm90Config, metas: Mapping[str, ArrayMeta]) -> dict[str, Mapped]:
        """Its tensor maps, by those names."""
        dtype, tiles = self.found.product.dtype, tiles_of(config, self.a.major, self.b.major)
        dtype = dtype if dtype in TYPES else ROUNDED
        sharing = (config.cluster.of_a, config.cluster.of_b)
        made = {
            self.name(which): factor.mapped(dtype, box_shape(tile, shared), tile.span, which)
            for which, factor, tile, shared in zip("ab", (self.a, self.b), tiles, sharing, strict=True)
        }
        if not self.found.out:
            mapped = result_mapped(self.product, metas, output_box(config.block_n, config.itemsize))
            assert mapped is not None  # `boxed` found that it can be
            made[self.name("y")] = mapped
        return made

    def step(self, config: Sm90Config) -> Step:
        """Its launch."""
        product = self.product
        y, z, _, _, bias = product.names
        sizes = (product.batches, self.others[0].size, product.rounds, product.m.size, product.n.size, product.k.size)
        args = (
            *map(self.name, "yab"),
            Result(y, tuple(axis.y for axis in self.others[:2]), product.m.y, product.n.y),
            Result(z, tuple(axis.z for axis in self.others[:2]), product.m.z, product.n.z),
            bias,
            product.bias_stride,
            Extent(*sizes, self.a.steps, self.b.steps),
        )
        grid = (config.tiles(product),)
        return Step(build_product(config, self.found), grid, args, config.shared_bytes, resident=True)


def boxed(product: Product, p: Problem, metas: Mapping[str, ArrayMeta]) -> Boxed | None:
    """None for a product that this rung doesn't do."""
    a, b, others = factor_boxes(product, "a", metas), factor_boxes(product, "b", metas), other_axes(product)
    if a is None or b is None or others is None or product.m.size > MOST or product.n.size > MOST:
        return None
    if p.dtype not in TYPES and (a.major, b.major) != ("k", "k"):
        return None
    found = variant(product, p)
    plain = not (found.has_bias or found.activation or found.preactivation)
    if plain and result_mapped(product, metas, output_box(ROWS, p.itemsize)) is not None:
        out = 0
    else:
        out = writing(product, found, metas, NEAR)
    same = found._replace(batch_axes=1, outer_axes=0)  # of axes the kernel knows `others` alone
    split = p.dtype not in TYPES and p.precision == "3xtf32"
    return Boxed(product, a, b, others, Sm90Variant(same, a.major, b.major, len(others), out, split))


def _ready(product: Product, p: Problem, metas: Mapping[str, ArrayMeta]) -> tuple[Ready, Boxed | None]:
    """The product on the copies of factors that tensor cores need, if this rung does it then."""
    made = ready(product, p, metas)
    return made, boxed(made.product, p, made.metas)


def _configs(
    product: Product, p: Problem, metas: Mapping[str, ArrayMeta], device: Device
) -> Iterator[tuple[Sm90Config, str]]:
    """Tiles for a product that this rung does, best first."""
    made, found = _ready(product, p, metas)
    if product.k.size and product.rounds and found:
        yield from configs(made.product, device, p.precision if p.dtype not in TYPES else None)


def _boxed(product: Product, p: Problem, metas: Mapping[str, ArrayMeta]) -> tuple[Ready, Boxed]:
    made, found = _ready(product, p, metas)
    assert found is not None  # there was a Config for it
    return made, found


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
