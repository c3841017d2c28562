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

While consumers are at 6, the producer fills all stages with the next tile's slices. Two blocks of a cluster make tiles
above one another; each loads half of b and sends it to both, so that L2 is asked for 3/4 or 2/3 as much. Results that
can't be stored as boxes are stored element by element. The order of tiles keeps in L2 what blocks share (`schedule`).

The sum of a slice's products is float32, added up inside of the tensor cores. Bit-equal from run to run: an element is
summed in one order, whichever block makes it.

Shared memory: stages * 2 * BLOCK_K * (BLOCK_M + BLOCK_N) bytes, and 2 * BLOCK_M * STORE_N for the result on its way.
Registers: BLOCK_N / 2 of acc and about 60; the producer's warpgroup gives its own to the consumers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem
from ..arrays import cdiv
from ..backend import Kernel, Namespace, builds, cuda, i32, i64, kernel, pointer, types, u8, u32, verb
from ..device import Device
from ..maps import Mapped
from ..plans import Choice
from ..step import Step
from ..tile.boxes import Corner, begin_map, box_shape, box_tile
from ..tile.epilogue import box_output, output_box, places
from ..tile.pipeline import pipeline
from ..tile.roles import roles
from ..tile.schedule import schedule
from ..tile.storage import storage
from ..tile.swizzle import Operand
from ..tile.warpgroup import ROWS, my_warpgroup, warpgroup_mma
from .activations import activation
from .boxed import FactorBoxes, factor_boxes, other_axes, result_mapped, tile_of
from .product import Product, Variant, forward_product, variant

TYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Sm90Config:
    """A block's tile has 64 rows for each of `consumers` warpgroups, and block_n columns."""

    consumers: int
    block_n: int
    stages: int
    store_n: int  # columns of the result that are on their way at once
    cluster: int = 1  # blocks that share b
    block_k: int = 64
    group: int = 8  # tiles above one another whose blocks run side by side

    @cached_property
    def block_m(self) -> int:
        return ROWS * self.consumers

    @cached_property
    def stage_bytes(self) -> int:
        return 2 * self.block_k * (self.block_m + self.block_n)

    @cached_property
    def output_at(self) -> int:
        """Where the result's place begins, behind the stages."""
        return self.stages * self.stage_bytes

    @cached_property
    def shared_bytes(self) -> int:
        return self.output_at + 2 * self.block_m * self.store_n


class Sm90Variant(NamedTuple):
    """What a kernel is built for beside its Config. a, b: the contiguous axis of each factor, "k" or "mn"."""

    product: Variant
    a: str
    b: str
    others: int  # axes of a factor's map beside its own two
    boxed: bool  # the result, and the preactivation, are stored as boxes


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

    if others == 1:
        return OtherAxes(factor=one, result=one_of_result)
    return OtherAxes(factor=three, result=two_of_result)


class Finish(Namespace):
    """What comes upon a sum."""

    add_bias: Callable[..., None]  # (acc, bias, stride, n0, N)
    activate: Callable[..., None]  # (acc)


def _finish(found: Variant, columns: int) -> Finish:
    bias_mem, act = storage(found.bias_dtype or found.dtype), activation(found.activation, storage(found.dtype).number)
    place, blocks = places(found.dtype, columns), columns // 8

    @verb
    def add_bias(acc, bias, stride, n0, N):
        for j in range(blocks):
            for e in range(2):
                n = n0 + place.column(j) + e
                if n < N:
                    value = bias_mem.load(bias, i64(n) * stride)
                    acc[4 * j + e] += value
                    acc[4 * j + 2 + e] += value

    @verb
    def activate(acc):
        for j in range(blocks):
            for e in range(4):
                acc[4 * j + e] = act.value(acc[4 * j + e])

    return Finish(add_bias=add_bias, activate=activate)


def tiles_of(config: Sm90Config, a_major: str, b_major: str) -> tuple[Operand, Operand]:
    """A stage's tiles of a and b."""
    return tile_of(a_major, config.block_m, config.block_k), tile_of(b_major, config.block_n, config.block_k)


@builds
def build_product(config: Sm90Config, found: Sm90Variant) -> Kernel:
    """matmul_sm90(y_map, z_map, a_map, b_map, y, z, y_strides, z_strides, bias, bias_stride, extent)."""
    a_operand, b_operand = tiles_of(config, found.a, found.b)
    a_tile = box_tile(a_operand, 0, found.others)
    b_tile = box_tile(b_operand, config.stages * a_operand.nbytes, found.others, config.cluster)
    pipe = pipeline(config.stages, config.stage_bytes, 4 * config.consumers, config.cluster)
    mma = warpgroup_mma(found.product.dtype, a_operand, b_operand)
    role, walk, axes = roles(config.consumers), schedule(config.group, config.cluster), _other_axes(found.others)
    result_axes = 1 if found.others == 1 else 2
    output = box_output(found.product.dtype, config.block_n, config.output_at, config.store_n, result_axes)
    place, finish = places(found.product.dtype, config.block_n), _finish(found.product, config.block_n)
    product = found.product
    array = pointer(storage(product.dtype).element)
    strides = types.UniTuple(i64, 4)
    extent_type = types.NamedTuple((*[i32] * 6, *[types.UniTuple(i32, found.others)] * 2), Extent)
    bias_type = pointer(storage(product.bias_dtype or product.dtype).element)

    @kernel(
        *[i64] * 4, array, array, strides, strides, bias_type, i64, extent_type, threads=role.threads, cluster=config.cluster
    )
    def matmul_sm90(y_map, z_map, a_map, b_map, y, z, y_strides, z_strides, bias, bias_stride, extent):
        smem = cuda.shared.array(0, u8, alignment=1024)
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
            if found.boxed:
                output.begin(y_map)
                if product.preactivation:
                    output.begin(z_map)
            acc = mma.fragment()  # [64, BLOCK_N]
            total = u32(slices * extent.rounds)
            while tile < tiles:
                at = walk.position(tile, m_blocks, n_blocks)
                m0, n0 = i32(at.m_block * config.block_m) + ROWS * warpgroup, i32(at.n_block * config.block_n)
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

                if product.has_bias:
                    finish.add_bias(acc, bias, bias_stride, n0, N)
                corner = Corner(m0, n0, axes.result(extent, at.batch))
                if product.preactivation:
                    if found.boxed:
                        output.store(smem, z_map, acc, corner)
                    else:
                        place.store(z, z_strides, acc, corner, M, N)
                finish.activate(acc)
                if found.boxed:
                    output.store(smem, y_map, acc, corner)
                else:
                    place.store(y, y_strides, acc, corner, M, N)
            if found.boxed:
                output.finish()
        pipe.leave()

    return matmul_sm90


# --- choices -------------------------------------------------------------------------------------

# Tiles, and how fast they are beside the first
TILES = (
    (Sm90Config(2, 256, 4, 128, cluster=2), 1.0),
    (Sm90Config(2, 256, 4, 128), 0.97),
    (Sm90Config(2, 128, 6, 128), 0.85),
    (Sm90Config(2, 64, 8, 64), 0.55),
    (Sm90Config(1, 64, 8, 64), 0.4),
)


class Launch(NamedTuple):
    """How a product is done by this rung: its factors' boxes, and what its kernel is built for."""

    product: Product
    a: FactorBoxes
    b: FactorBoxes
    found: Sm90Variant

    def maps(self, config: Sm90Config, metas: Mapping[str, ArrayMeta], prefix: str) -> dict[str, Mapped]:
        """Its tensor maps, by names that begin with `prefix`."""
        dtype, tiles = self.found.product.dtype, tiles_of(config, self.a.major, self.b.major)
        clusters = {"a": 1, "b": config.cluster}
        made = {
            prefix + f"{which}_map": factor.mapped(dtype, box_shape(tile, clusters[which]), tile.span, which)
            for which, factor, tile in zip("ab", (self.a, self.b), tiles, strict=True)
        }
        if self.found.boxed:
            for which in "yz" if self.found.product.preactivation else "y":
                mapped = result_mapped(self.product, which, metas, output_box(config.block_n))
                assert mapped is not None  # `launch_of` found that all of them can be
                made[prefix + f"{which}_map"] = mapped
        return made

    def steps(self, config: Sm90Config, prefix: str) -> list[Step]:
        """Its launch."""
        product, others = self.product, other_axes(self.product)
        assert others is not None
        strides = {
            which: (getattr(product.m, which), getattr(product.n, which), *(getattr(axis, which) for axis in around))
            for which in "yz"
            for around in [(*others[:2], others[0])[:2]]
        }
        y, z, _, _, bias = product.names
        extent = Extent(
            product.batches, others[0].size, product.rounds, product.m.size, product.n.size, product.k.size,
            self.a.steps, self.b.steps,
        )  # fmt: skip
        maps = tuple(prefix + f"{which}_map" for which in "yzab")
        args = (*maps, y, z, strides["y"], strides["z"], bias, product.bias_stride, extent)
        blocks = config.cluster * product.batches * cdiv(cdiv(product.m.size, config.block_m), config.cluster)
        grid = (blocks * cdiv(product.n.size, config.block_n),)
        return [Step(build_product(config, self.found), grid, args, config.shared_bytes, resident=True)]


def launch_of(product: Product, p: Problem, metas: Mapping[str, ArrayMeta]) -> Launch | None:
    """None for a product that this rung doesn't do."""
    if p.dtype not in TYPES or not product.k.size or not product.rounds:
        return None
    a, b, others = factor_boxes(product, "a", metas), factor_boxes(product, "b", metas), other_axes(product)
    if a is None or b is None or others is None or not (product.m.size < 2**31 and product.n.size < 2**31):
        return None
    found = variant(product, p)
    results = "yz" if found.preactivation else "y"
    boxed = all(result_mapped(product, which, metas, output_box(64)) is not None for which in results)
    # of a product, the kernel is built for what `Sm90Variant` says of its axes
    same = found._replace(batch_axes=1, outer_axes=0)
    return Launch(product, a, b, Sm90Variant(same, a.major, b.major, len(others), boxed))


def configs(launch: Launch, device: Device) -> Iterator[tuple[Sm90Config, str]]:
    """Tiles for a product, best first: by the work of the busiest SM, whole tiles counted, and the speed of the tile."""
    product, found = launch.product, []
    for config, speed in TILES:
        m_blocks, n_blocks = cdiv(product.m.size, config.block_m), cdiv(product.n.size, config.block_n)
        tiles = product.batches * cdiv(m_blocks, config.cluster) * config.cluster * n_blocks
        if tiles < 2**31 and config.shared_bytes + SLACK <= device.shared_memory_per_block:
            work = cdiv(tiles, device.sms) * config.block_m * config.block_n / speed
            found.append((work, config, f"{config.block_m} x {config.block_n} a block, {tiles} tiles"))
    for _, config, reason in sorted(found, key=lambda each: each[0]):
        yield config, reason


SLACK = 1024  # bytes of shared memory that the mbarriers take, and what lies between them and the stages


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Tiles for a product that can be loaded as boxes, best first."""
    if not device.has_wgmma:
        return
    metas = {**problem.arrays, **results}
    launch = launch_of(forward_product(problem, metas), problem, metas)
    if launch is None:
        return
    for config, reason in configs(launch, device):
        yield Choice("sm90", config, reason, partial(launch.steps, config, ""), maps=launch.maps(config, metas, ""))
