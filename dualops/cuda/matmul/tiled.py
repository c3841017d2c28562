"""Shared by the rungs that compute tiles of the result.

It has the order of tiles, the epilogue, layouts, and the launches of both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, Protocol

from ...spec import ArrayMeta, Problem
from ..compiler.backend import Kernel, Members, cuda, i64, kept_noun, u32, verb
from ..launch.arrays import cdiv
from ..launch.device import Device
from ..launch.plans import Choice
from ..launch.step import Step
from ..launch.tensor_map import Mapped
from ..tile.storage import storage
from .activations import activation
from .gradient import column_sums_steps, dz_steps, gradient_metas, gradient_products, gradient_workspace, partial_sums
from .loading import Reading
from .product import Axis, Bias, Product, Result, Variant, arguments, forward_product

GROUP_M = 8  # rows of tiles in a group, whose blocks run one after the other
MOST_BLOCKS = 2**31 - 1


class TiledConfig(Protocol):
    """The members of such a rung's Config."""

    @cached_property
    def block_m(self) -> int: ...
    @cached_property
    def block_n(self) -> int: ...
    def shared_bytes(self, dtype: str) -> int: ...
    def columns(self, dtype: str) -> int: ...  # neighbouring columns of the result that a thread writes


# --- in kernels ----------------------------------------------------------------------------------


@cache
def block_order(block_m: int, block_n: int) -> Callable[..., Any]:
    """Return the verb (M, N) -> batch, first row, first column of the block's tile.

    Blocks that share rows of a or columns of b run one after another, so that these are still in L2.
    """

    @verb
    def of_block(M, N):
        # a division in 32 bits takes a tenth of the time
        m_blocks = u32((M + block_m - 1) // block_m)
        n_blocks = u32((N + block_n - 1) // block_n)
        tiles, group_tiles = u32(m_blocks * n_blocks), u32(GROUP_M * n_blocks)
        tile = u32(cuda.blockIdx.x)
        batch, tile = tile // tiles, u32(tile % tiles)
        group, tile = u32(tile // group_tiles), u32(tile % group_tiles)
        height = u32(min(m_blocks - group * GROUP_M, GROUP_M))
        m_block, n_block = group * GROUP_M + tile % height, tile // height
        return i64(batch), i64(m_block) * block_m, i64(n_block) * block_n

    return of_block


class Results(NamedTuple):
    """The results, the indices at which the block's matrices begin in them, and the bias."""

    y: Result
    z: Result
    y_begin: Any
    z_begin: Any
    bias: Bias
    N: Any


@kept_noun
def finishing(found: Variant, columns: int, out: int, *, short: bool = False) -> Members:
    """The verb that finishes sums of `columns` neighbouring columns: results[m, n] = act(sum + bias).

    out: elements of a row that are stored at once; short: see `activation`.
    """
    mem, bias_mem = storage(found.dtype), storage(found.bias_dtype or found.dtype)
    act = activation(found.activation, mem.number, short=short)

    @verb
    def _store(to, at, n, N, values):
        for j in range(0, columns, out):
            if out > 1:
                mem.store_vector(to.data, at + n + j, n + j < N, values, j)
            elif n + j < N:
                mem.store(to.data, at + (n + j) * to.column, values[j])

    @verb
    def finish(values, results, m, n):
        """Finish `columns` columns of row m, from n on. Overwrites values."""
        if found.has_bias:
            for j in range(columns):
                if n + j < results.N:
                    values[j] += bias_mem.load(results.bias.data, (n + j) * results.bias.stride)
        if found.preactivation:
            _store(results.z, results.z_begin + m * results.z.row, n, results.N, values)
        for j in range(columns):
            values[j] = act.value(values[j])
        _store(results.y, results.y_begin + m * results.y.row, n, results.N, values)

    return locals()


# --- how arrays are read and written ---------------------------------------------------------------


def _steps(axis: Axis, which: str) -> tuple[int, int]:
    """Return an axis's size, and its stride in one of the arrays."""
    return axis.size, getattr(axis, which) if axis.size > 1 else 0


def _address(product: Product, which: str, metas: Mapping[str, ArrayMeta]) -> int:
    """Return an array's address modulo 16, or 1 for an absent array."""
    name = product.names["yzab".index(which)]
    return int(metas[name].pointer) % 16 if name else 1


def _wide(along: tuple[int, int], others: Iterable[tuple[int, int]], address: int, vector: int, itemsize: int) -> bool:
    """Whether vectors of `vector` elements along an axis are aligned, at any index of the other axes."""
    aligned = address % (vector * itemsize) == 0
    return aligned and along[1] == 1 and all(step % vector == 0 for _, step in others)


def reading(
    product: Product, which: str, metas: Mapping[str, ArrayMeta], dtype: str, vectors: Sequence[int], whole: bool
) -> Reading:
    """Return how factor "a" or "b" is read: by the first of `vectors`, largest first, that its layout allows.

    whole: the size of the axis along which it is read must be a multiple of the vector.
    """
    row_axis = product.m if which == "a" else product.n
    row, depth, *others = (_steps(axis, which) for axis in (row_axis, product.k, *product.batch, *product.outer))
    address, itemsize = _address(product, which, metas), storage(dtype).itemsize
    for vector in vectors:
        for along, axis, other in (("depth", depth, row), ("row", row, depth)):
            if _wide(axis, [other, *others], address, vector, itemsize) and not (whole and axis[0] % vector):
                return Reading(along, vector)
    return Reading("depth" if depth[1] <= row[1] else "row", 1)


def writing(product: Product, found: Variant, metas: Mapping[str, ArrayMeta], columns: int) -> int:
    """Return how many elements of the results' rows one store writes: 16 bytes of them, or 1."""
    mem = storage(found.dtype)
    if columns % mem.vector:
        return 1
    for which in "yz" if found.preactivation else "y":
        along, *others = (_steps(axis, which) for axis in (product.n, product.m, *product.batch))
        wide = _wide(along, others, _address(product, which, metas), mem.vector, mem.itemsize)
        if not wide or along[0] % mem.vector:
            return 1
    return mem.vector


# --- launches --------------------------------------------------------------------------------------


def block_count(product: Product, config: TiledConfig) -> int:
    return product.batches * cdiv(product.m.size, config.block_m) * cdiv(product.n.size, config.block_n)


def best_first(
    tiles: Iterable[tuple[Any, float]], product: Product, dtype: str, device: Device
) -> Iterator[tuple[Any, str]]:
    """Yield the Configs that fit the device, each with a reason. tiles: Configs with their speeds.

    They are ordered by the busiest SM's work, in whole tiles, divided by the speed.
    """
    found = []
    for config, speed in tiles:
        blocks = block_count(product, config)
        if blocks <= MOST_BLOCKS and config.shared_bytes(dtype) <= device.shared_memory_per_block:
            work = cdiv(blocks, device.sms) * config.block_m * config.block_n / speed
            found.append((work, config, f"{config.block_m} x {config.block_n} a block, {blocks} blocks"))
    for _, config, reason in sorted(found, key=lambda each: each[0]):
        yield config, reason


def launch_of(product: Product, build: Kernel, config: TiledConfig, dtype: str) -> Step:
    """Return a product's launch."""
    return Step(build, (block_count(product, config),), arguments(product), config.shared_bytes(dtype))


class GradientConfigs(NamedTuple):
    """The Config of each product; None for one that is not requested."""

    a: Any
    b: Any


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


class Rung(NamedTuple):
    """How a rung computes one product, and so both directions."""

    name: str
    configs: Callable[..., Iterator[tuple[Any, str]]]  # (product, problem, metas, device): best first, with reasons
    steps: Callable[..., list[Step]]  # (product, problem, metas, config)
    maps: Callable[..., Mapping[str, Mapped]] = _nothing  # (product, problem, metas, config): of the steps' names
    workspace: Callable[..., Mapping[str, ArrayMeta]] = _nothing  # (product, problem, metas, config)
    serves: Callable[[Problem, Device], bool] = lambda problem, device: True  # whether it may have Configs

    def forward_choices(self, problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
        """Yield the rung's tiles for the product, best first."""
        if not self.serves(problem, device):
            return
        metas = {**problem.arrays, **results}
        product = forward_product(problem, metas)
        for config, reason in self.configs(product, problem, metas, device):
            call = (product, problem, metas, config)
            steps = partial(self.steps, *call)
            yield Choice(self.name, config, reason, steps, self.workspace(*call), maps=self.maps(*call))

    def backward_choices(self, problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
        """Yield the rung's best tiles for each of the gradient's products."""
        if not self.serves(problem, device):
            return
        products, metas = gradient_products(problem, results), gradient_metas(problem, results)
        best = {name: next(self.configs(each, problem, metas, device), None) for name, each in products.items()}
        if any(found is None for found in best.values()):
            return
        chosen = {name: found[0] for name, found in best.items() if found}
        reason = "; ".join(f"{name}: {found[1]}" for name, found in best.items() if found) or "sums of columns"
        calls = [(product, problem, metas, chosen[name]) for name, product in products.items()]
        steps = partial(self._backward_steps, problem, results, calls)
        workspace = gradient_workspace(problem) | (partial_sums(problem) if "dbias" in results else {})
        maps: dict[str, Mapped] = {}
        for call in calls:
            maps |= self.maps(*call)
            workspace |= self.workspace(*call)
        both = GradientConfigs(chosen.get("da"), chosen.get("db"))
        yield Choice(self.name, both, reason, steps, workspace, maps=maps)

    def _backward_steps(
        self, problem: Problem, results: Mapping[str, ArrayMeta], calls: Iterable[tuple[Any, ...]]
    ) -> list[Step]:
        steps = dz_steps(problem)
        for call in calls:
            steps += self.steps(*call)
        if "dbias" in results and problem.N:
            steps += column_sums_steps(problem, results["dbias"])
        return steps
