"""Lion on dense tensors, whose arrays have the same order of axes: one tensor, or a table of them.

    1  a tensor is cut into chunks, one per block; in a table, the block searches for the tensor of its chunk
    2  a thread loads `vectors` groups of neighbours of p (or master), g and m: 16 bytes of the widest of them
    3  it computes p and m as in formula.py                                             (in registers)
    4  and stores p, m and master; 2 to 4 again, `sweeps` times
    5  elements before the first multiple of 16 bytes, and after the last whole group: one by one

If the arrays of a tensor are aligned differently, all its elements are processed one by one, in the same launch.
A table is an array of int64 with COLUMNS columns: each tensor's first chunk, six addresses, elements and `head`.
No shared memory. Registers: three numbers per element of `vectors` groups, and about 40.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...spec import ArrayMeta
from ...spec.meta import itemsize
from ..compiler.backend import Kernel, Members, builds, cuda, f64, i32, i64, kept_noun, kernel, members, pointer, verb
from ..launch.device import Device
from ..tile.groups import array_in, group
from ..tile.numbers import numbers
from ..tile.storage import storage
from .formula import Arrays, Dtypes, arrays_type, by_role, rate_types, steps

COLUMNS = 9  # columns of a table; each has a word for every tensor


@dataclass(frozen=True)
class DenseConfig:
    """The work of a block of `threads` threads."""

    threads: int
    vectors: int  # groups of each array that a thread has in flight
    sweeps: int  # times that a thread processes `vectors` groups
    min_blocks: int = 1  # blocks whose registers must fit on an SM

    def chunk(self, dtypes: Dtypes) -> int:
        """Return the elements of a block."""
        return self.threads * unit(dtypes) * self.vectors * self.sweeps


def unit(dtypes: Dtypes) -> int:
    """Return the elements of a group: 16 bytes of the widest array."""
    return min(storage(dtype).vector for dtype in used(dtypes))


def used(dtypes: Dtypes) -> tuple[str, ...]:
    """Return the dtypes of the given arrays, without a missing master."""
    return tuple(dtype for place, dtype in enumerate(dtypes.arrays) if place != 2 or dtypes.master)


def heads(dtypes: Dtypes, pointers: Any) -> np.ndarray:
    """Return the number of elements before each tensor's first group, -1 if its arrays are aligned differently.

    pointers [tensors, arrays]: addresses of the given arrays, in the order of ROLES.
    """
    sizes = np.array([itemsize(dtype) for dtype in used(dtypes)])
    missing = -np.array(pointers, np.int64) % (sizes * unit(dtypes))  # bytes to the next whole group of each array
    found = missing // sizes
    same = (missing % sizes == 0) & (found == found[:, :1])
    return np.where(same.all(axis=1), found[:, 0], -1)


def chunks(config: DenseConfig, dtypes: Dtypes, N: Any, head: Any) -> Any:
    """Return the number of blocks for N elements, at least one. N, head: integers or arrays of them."""
    return np.maximum(-(-(N - np.maximum(head, 0)) // config.chunk(dtypes)), 1)


def is_dense(metas: Sequence[ArrayMeta]) -> bool:
    """Whether arrays of one shape are dense and have one order of axes."""

    def steps(meta: ArrayMeta) -> list[int]:
        return [stride for stride, size in zip(meta.strides, meta.shape, strict=True) if size > 1]

    return all(meta.is_dense and steps(meta) == steps(metas[0]) for meta in metas)


def config_of(dtypes: Dtypes, device: Device, *, table: bool) -> DenseConfig:
    """Return the Config for one tensor or for a table of them.

    Doubles need more registers than five blocks per SM leave, and so do all dtypes on some architectures.

    Speed as a share of a plain kernel with the same reads and writes, H200, 2026-11-21, 2.7e8 bfloat16 parameters: one
    tensor 0.998, with two vectors per thread 0.96; a table 0.991, with two vectors 0.95. A table of 1,000 tensors of
    10,000 elements: 30.5 us, with one sweep 44.
    """
    if device.name == "simulator":
        return DenseConfig(32, 1, 2)
    min_blocks = 2 if dtypes.number is f64 else 3 if device.takes_more_registers else 5
    return DenseConfig(256, 1, 2 if table else 1, min_blocks)


@kept_noun
def dense_steps(config: DenseConfig, dtypes: Dtypes) -> Members:
    """The verbs of a step of dense tensors."""
    has = used(dtypes)
    mem = by_role(storage, dtypes)
    vec = by_role(lambda dtype: group(dtype, unit(dtypes) if dtype in has else 1), dtypes)
    num, lion = numbers(dtypes.number), steps(dtypes.number)
    UNIT, CHUNK, NOTHING = unit(dtypes), config.chunk(dtypes), i64(0)

    @verb
    def chunk(tensor, rate, rates, chunk, N, head):
        """Do the step of chunk number `chunk` of a tensor, Arrays of N elements. head: see `heads`."""
        tid = cuda.threadIdx.x
        before = max(head, NOTHING)
        begin = before + chunk * CHUNK
        length = max(min(N - begin, i64(CHUNK)), NOTHING)
        whole = length // UNIT * UNIT if head >= 0 else NOTHING
        p_frag = cuda.local.array(config.vectors * UNIT, dtypes.number)
        g_frag = cuda.local.array(config.vectors * UNIT, dtypes.number)
        m_frag = cuda.local.array(config.vectors * UNIT, dtypes.number)
        for start in range(tid * UNIT, whole, config.threads * config.vectors * UNIT):
            for j in range(config.vectors):
                k = start + j * config.threads * UNIT
                vec.grads.load(g_frag, j * UNIT, tensor.grads, begin + k, k < whole, num.zero)
                vec.momenta.load(m_frag, j * UNIT, tensor.momenta, begin + k, k < whole, num.zero)
                vec.source.load(p_frag, j * UNIT, tensor.source, begin + k, k < whole, num.zero)
            for i in range(len(p_frag)):
                p_frag[i], m_frag[i] = lion.step(p_frag[i], g_frag[i], m_frag[i], rate, rates)
            for j in range(config.vectors):
                k = start + j * config.threads * UNIT
                vec.params.store(tensor.new_params, begin + k, k < whole, p_frag, j * UNIT)
                vec.momenta.store(tensor.new_momenta, begin + k, k < whole, m_frag, j * UNIT)
                if dtypes.master:
                    vec.master.store(tensor.new_master, begin + k, k < whole, p_frag, j * UNIT)
        # one by one: elements before the first group, in chunk 0, then those after the chunk's last whole group
        mine = min(before, N) if chunk == 0 else NOTHING
        for k in range(tid, mine + length - whole, config.threads):
            at = k if k < mine else k - mine + begin + whole
            p, g = mem.source.load(tensor.source, at), mem.grads.load(tensor.grads, at)
            p_new, m_new = lion.step(p, g, mem.momenta.load(tensor.momenta, at), rate, rates)
            mem.params.store(tensor.new_params, at, p_new)
            mem.momenta.store(tensor.new_momenta, at, m_new)
            if dtypes.master:
                mem.master.store(tensor.new_master, at, p_new)

    return members(
        locals(),
        rate=lion.rate,  # (lr) -> the number
    )


@builds
def build_one(config: DenseConfig, dtypes: Dtypes) -> Kernel:
    """Build lion_one(tensor, lr, rates, N, head), with one block per chunk. tensor: Arrays."""
    lion = dense_steps(config, dtypes)

    @kernel(arrays_type(dtypes), *rate_types(dtypes), i64, i64, threads=config.threads, min_blocks=config.min_blocks)
    def lion_one(tensor, lr, rates, N, head):
        lion.chunk(tensor, lion.rate(lr), rates, i64(cuda.blockIdx.x), N, head)

    return lion_one


@builds
def build_table(config: DenseConfig, dtypes: Dtypes) -> Kernel:
    """Build lion_table(table, tensors, lr, rates), with one block per chunk. tensors: the number of tensors."""
    lion, arrays = dense_steps(config, dtypes), by_role(array_in, dtypes)

    @kernel(pointer(i64), i32, *rate_types(dtypes), threads=config.threads, min_blocks=config.min_blocks)
    def lion_table(table, tensors, lr, rates):
        block = i64(cuda.blockIdx.x)
        low, high = i32(0), tensors  # binary search for the last tensor whose first chunk is at most this one
        while high - low > 1:
            middle = (low + high) // 2
            if table[middle] <= block:
                low = middle
            else:
                high = middle
        tensor = Arrays(
            arrays.params(table, low + tensors),
            arrays.momenta(table, low + tensors * 2),
            arrays.master(table, low + tensors * 3),
            arrays.source(table, low + tensors * 4),
            arrays.grads(table, low + tensors * 5),
            arrays.momenta(table, low + tensors * 6),
        )
        lion.chunk(tensor, lion.rate(lr), rates, block - table[low], table[low + tensors * 7], table[low + tensors * 8])

    return lion_table
