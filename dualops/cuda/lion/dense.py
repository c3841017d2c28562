"""Lion on tensors that lie densely in memory, all arrays of a tensor in the same order: one tensor, or a table of them.

    1  a tensor is cut into chunks, a block takes one; of a table, it searches for the tensor that its chunk is of
    2  a thread loads `vectors` groups of neighbours of p (or master), g and m: 16 bytes of the widest of them
    3  p and m as in formula.py                                                         (registers alone)
    4  and writes p, m and master; 2 to 4 again, `sweeps` times
    5  what is no whole group, before the first address that is a multiple of 16 bytes and at the end: one by one

Arrays of a tensor that are not aligned alike are walked one by one throughout, in the same launch.
A table is an array of int64, of COLUMNS columns: each tensor's first chunk, six addresses, elements and `head`.
No shared memory. Registers: three numbers an element of `vectors` groups, and about 40.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ...spec import ArrayMeta
from ...spec.meta import itemsize
from ..backend import Kernel, builds, cuda, f64, i32, i64, kernel, pointer, types, verb
from ..device import Device
from ..tile import array_in, group, storage, store_words
from .formula import Dtypes, array_types, rate_types, steps

COLUMNS = 9  # of a table, each with a word for every tensor


@dataclass(frozen=True)
class DenseConfig:
    """What a block of `threads` threads does."""

    threads: int
    vectors: int  # groups of each array that a thread has under way
    sweeps: int  # times that it takes so many
    min_blocks: int = 1  # blocks that the registers must leave room for on an SM

    def chunk(self, dtypes: Dtypes) -> int:
        """Elements of a block."""
        return self.threads * unit(dtypes) * self.vectors * self.sweeps


def unit(dtypes: Dtypes) -> int:
    """Elements of a group: 16 bytes of the widest array."""
    return min(storage(dtype).vector for dtype in used(dtypes))


def used(dtypes: Dtypes) -> tuple[str, ...]:
    """The dtypes of the arrays that there are."""
    return tuple(dtype for place, dtype in enumerate(dtypes.arrays) if place != 2 or dtypes.master)


def heads(dtypes: Dtypes, pointers: Any) -> np.ndarray:
    """Elements of each tensor before its first group, -1 where there are no groups.

    pointers [tensors, arrays]: addresses of the arrays that there are, in the order of ROLES.
    """
    sizes = np.array([itemsize(dtype) for dtype in used(dtypes)])
    missing = -np.array(pointers, np.int64) % (sizes * unit(dtypes))  # bytes to the next whole group of each array
    found = missing // sizes
    alike = (missing % sizes == 0) & (found == found[:, :1])
    return np.where(alike.all(axis=1), found[:, 0], -1)


def chunks(config: DenseConfig, dtypes: Dtypes, N: Any, head: Any) -> Any:
    """Blocks for N elements, at least one; integers or arrays of them."""
    return np.maximum(-(-(N - np.maximum(head, 0)) // config.chunk(dtypes)), 1)


def is_dense(metas: Sequence[ArrayMeta]) -> bool:
    """Whether arrays of one shape lie densely, all in one order of axes."""

    def steps(meta: ArrayMeta) -> list[int]:
        return [stride for stride, size in zip(meta.strides, meta.shape, strict=True) if size > 1]

    return all(meta.is_dense and steps(meta) == steps(metas[0]) for meta in metas)


def config_of(dtypes: Dtypes, device: Device, *, table: bool) -> DenseConfig:
    """What blocks do, for one tensor or for a table of them. Doubles need more registers than five blocks an SM leave,
    and so does what the compiler makes for sm_120.

    Shares of the roof that a plain kernel with the same reads and writes reaches, H200, 2026-11-21, 2.7e8 bfloat16
    parameters: one tensor 0.998, with two vectors a thread 0.96; a table 0.991, with two vectors 0.95. A table of 1,000
    tensors of 10,000 elements: 30.5 us, with one sweep 44.
    """
    if device.name == "simulator":
        return DenseConfig(32, 1, 2)
    min_blocks = 2 if dtypes.number is f64 else 5 if device.compute_capability < (12, 0) else 3
    return DenseConfig(256, 1, 2 if table else 1, min_blocks)


@cache
def _chunk(config: DenseConfig, dtypes: Dtypes) -> Any:
    """A verb: chunk number `chunk` of a tensor of N elements, `head` of them before the first group (see `heads`)."""
    number, has = dtypes.number, used(dtypes)
    new_p, new_m, new_w, source, grads, momenta = (
        group(dtype, unit(dtypes) if dtype in has else 1) for dtype in dtypes.arrays
    )
    load_p, load_g, load_m = source.load, grads.load, momenta.load
    store_p, store_m, store_w = new_p.store, new_m.store, new_w.store
    new_p, new_m, new_w, source, grads, momenta = map(storage, dtypes.arrays)
    load_p1, load_g1, load_m1 = source.load, grads.load, momenta.load
    store_p1, store_m1, store_w1 = new_p.store, new_m.store, new_w.store
    step = steps(number).step
    UNIT, VECTORS, THREADS, HAS_MASTER = unit(dtypes), config.vectors, config.threads, dtypes.master
    CHUNK, STRIDE, ELEMENTS = config.chunk(dtypes), config.threads * UNIT, config.vectors * UNIT
    SWEEP = STRIDE * config.vectors
    NOTHING, ZERO = i64(0), number(0)

    @verb
    def chunk_of(to_p, to_m, to_w, p, g, m, rate, rates, chunk, N, head):
        tid = cuda.threadIdx.x
        before = max(head, NOTHING)
        begin = before + chunk * CHUNK
        length = max(min(N - begin, i64(CHUNK)), NOTHING)
        whole = length // UNIT * UNIT if head >= 0 else NOTHING
        p_frag = cuda.local.array(ELEMENTS, number)
        g_frag = cuda.local.array(ELEMENTS, number)
        m_frag = cuda.local.array(ELEMENTS, number)
        for start in range(tid * UNIT, whole, SWEEP):
            for j in range(VECTORS):
                k = start + j * STRIDE
                load_g(g_frag, j * UNIT, g, begin + k, k < whole, ZERO)
                load_m(m_frag, j * UNIT, m, begin + k, k < whole, ZERO)
                load_p(p_frag, j * UNIT, p, begin + k, k < whole, ZERO)
            for i in range(ELEMENTS):
                p_frag[i], m_frag[i] = step(p_frag[i], g_frag[i], m_frag[i], rate, rates)
            for j in range(VECTORS):
                k = start + j * STRIDE
                store_p(to_p, begin + k, k < whole, p_frag, j * UNIT)
                store_m(to_m, begin + k, k < whole, m_frag, j * UNIT)
                if HAS_MASTER:
                    store_w(to_w, begin + k, k < whole, p_frag, j * UNIT)
        # what lies before the first group is chunk 0's, and comes first; what lies behind the last one follows
        mine = min(before, N) if chunk == 0 else NOTHING
        for k in range(tid, mine + length - whole, THREADS):
            at = k if k < mine else k - mine + begin + whole
            p_new, m_new = step(load_p1(p, at), load_g1(g, at), load_m1(m, at), rate, rates)
            store_p1(to_p, at, p_new)
            store_m1(to_m, at, m_new)
            if HAS_MASTER:
                store_w1(to_w, at, p_new)

    return chunk_of


@builds
def build_one(config: DenseConfig, dtypes: Dtypes) -> Kernel:
    """lion_one(six arrays in the order of ROLES, lr, rates, N, head): chunk by chunk, a block each."""
    chunk_of, step_rate = _chunk(config, dtypes), steps(dtypes.number).rate

    @kernel(*array_types(dtypes), *rate_types(dtypes), i64, i64, threads=config.threads, min_blocks=config.min_blocks)
    def lion_one(to_p, to_m, to_w, p, g, m, lr, rates, N, head):
        chunk_of(to_p, to_m, to_w, p, g, m, step_rate(lr), rates, i64(cuda.blockIdx.x), N, head)

    return lion_one


@builds
def build_table(config: DenseConfig, dtypes: Dtypes) -> Kernel:
    """lion_table(table, tensors, lr, rates): as many blocks as there are chunks."""
    chunk_of, step_rate = _chunk(config, dtypes), steps(dtypes.number).rate
    params_at, momenta_at, master_at, source_at, grads_at, _ = map(array_in, dtypes.arrays)

    @kernel(pointer(i64), i32, *rate_types(dtypes), threads=config.threads, min_blocks=config.min_blocks)
    def lion_table(table, tensors, lr, rates):
        block = i64(cuda.blockIdx.x)
        low, high = i32(0), tensors  # the last tensor whose first chunk is not behind this one
        while high - low > 1:
            middle = (low + high) // 2
            if table[middle] <= block:
                low = middle
            else:
                high = middle
        chunk_of(
            params_at(table, low + tensors),
            momenta_at(table, low + tensors * 2),
            master_at(table, low + tensors * 3),
            source_at(table, low + tensors * 4),
            grads_at(table, low + tensors * 5),
            momenta_at(table, low + tensors * 6),
            step_rate(lr),
            rates,
            block - table[low],
            table[low + tensors * 7],
            table[low + tensors * 8],
        )

    return lion_table


@builds
def build_writer(count: int) -> Kernel:
    """lion_table_writer(table, first, words): `count` words of a table, from number `first` on, by one thread.

    They travel as arguments of the launch: nothing on the host is read later, whether the launch is captured or not.
    """

    @kernel(pointer(i64), i64, types.UniTuple(i64, count), threads=1)
    def lion_table_writer(table, first, words):
        store_words(table, first, words)

    return lion_table_writer
