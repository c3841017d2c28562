"""The epilogue of matmul's sm90 rung: y = act(sum + bias), rounded, to memory.

A warpgroup stores its sums, [64, BLOCK_N], one part of the columns after the other: it writes them from registers to
boxes in shared memory, and the TMA stores these while it works on the next part or tile. Results that can't be stored
as boxes are stored row by row.
"""

from __future__ import annotations

from collections.abc import Callable

from ...compiler.backend import Members, Namespace, cuda, f32, i32, i64, noun, verb
from ...tile.boxes import prefetch_maps
from ...tile.epilogue import NEAR, BoxOutput, box_output, row_output
from ...tile.storage import storage
from ...tile.warpgroup import my_warpgroup
from ..activations import activation
from ..product import Variant
from ..tiled import finishing
from .arguments import Sm90Variant, results_of
from .config import Sm90Config


class Output(Namespace):
    """The verbs, called by all threads of the consumer warpgroups."""

    begin: Callable[..., None]  # (to, warp): by all threads of the block; see `prefetch_maps`
    start: Callable[..., None]  # (floats, to, n0, N): before a tile's sum; floats: all shared memory as an array of f32
    store: Callable[..., None]  # (smem, floats, to, acc, corner, M, N): after a tile's sum
    finish: Callable[..., None]  # (): after the last tile


def box_results(config: Sm90Config, found: Sm90Variant) -> Output:
    """Return the verbs for results that are stored as boxes."""
    product = found.product
    boxes = box_output(product.dtype, config.block_n, config.output_at, config.places, found.result_axes)
    bias = bias_row(config, product, boxes)
    act = activation(product.activation, f32, short=found.short)
    results = 1 + product.preactivation  # results per part

    @verb
    def begin(to, warp):
        if product.preactivation:
            prefetch_maps((to.y_map, to.z_map), warp)
        else:
            prefetch_maps((to.y_map,), warp)

    @verb
    def start(floats, to, n0, N):
        if product.has_bias:
            bias.load(floats, to, n0, N)

    @verb
    def store(smem, floats, to, acc, corner, M, N):
        values = boxes.fragment()
        part = i32(0)
        while part < boxes.parts:
            boxes.acquire()
            boxes.take(values, acc, part)
            if product.has_bias:
                bias.add(values, floats, part)
            if product.preactivation:
                boxes.store(smem, to.z_map, values, corner, part, results * part)
                boxes.acquire()
            for e in range(boxes.size):
                values[e] = act.value(values[e])
            boxes.store(smem, to.y_map, values, corner, part, results * part + (results - 1))
            part = boxes.next(part)

    return Output.from_locals(locals(), finish=boxes.finish)


@noun
def bias_row(config: Sm90Config, product: Variant, boxes: BoxOutput) -> Members:
    """Return the verbs for a tile's part of the bias. Each warpgroup has its own copy in shared memory.

    `load` may overwrite it while a tile's sum is computed: the warpgroup has passed a barrier since it read the bias of
    the previous tile.
    """
    mem = storage(product.bias_dtype or product.dtype)
    first, columns = config.bias_at // 4, config.block_n

    @verb
    def load(floats, to, n0, N):
        """Load the bias of the tile whose columns begin at n0."""
        mine = i32(first + my_warpgroup() * columns)
        for c in range(0, columns, 128):
            column = i32(c + cuda.threadIdx.x % 128)
            if column < columns:
                n = i64(n0 + column)
                floats[mine + column] = f32(mem.load(to.bias.data, n * to.bias.stride)) if n < N else f32(0)

    @verb
    def add(values, floats, part):
        """Add the bias to a part of the sums, after a barrier of the warpgroup."""
        column = i32(first + my_warpgroup() * columns + part * boxes.columns + 2 * (cuda.threadIdx.x % 4))
        for pair in range(boxes.columns // 8):
            for e in range(2):
                own = floats[column + 8 * pair + e]
                values[4 * pair + e] += own
                values[4 * pair + 2 + e] += own

    return locals()


def row_results(config: Sm90Config, found: Sm90Variant) -> Output:
    """Return the verbs for results of which `found.out` elements of a row are stored at once."""
    finish_columns = finishing(found.product, NEAR, found.out, short=found.short).finish
    rows = row_output(config.block_n, config.output_at, config.store_n * config.itemsize // 4, finish_columns)

    @verb
    def begin(to, warp):
        pass

    @verb
    def start(floats, to, n0, N):
        pass

    @verb
    def finish():
        pass

    @verb
    def store(smem, floats, to, acc, corner, M, N):
        rows.store(floats, acc, corner, M, results_of(to, corner, N))

    return Output.from_locals(locals())
