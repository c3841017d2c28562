"""An operator on rows needs no kernel of its own: log_softmax, of which only this test knows, by every walk."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dualops.cuda.compiler.backend import Members, members, noun, types, verb
from dualops.cuda.launch.step import flat
from dualops.cuda.rows import chunks, cluster, registers, reread
from dualops.cuda.rows.chunks import ChunksConfig
from dualops.cuda.rows.cluster import ClusterRowsConfig, share_of
from dualops.cuda.rows.operator import Keeping, RowArrays, Rows
from dualops.cuda.rows.registers import RowsConfig
from dualops.cuda.rows.reread import LongRowsConfig
from dualops.cuda.softmax.operator import softmax_operator
from dualops.cuda.tile.numbers import numbers
from dualops.cuda.tile.storage import access, storage
from dualops.spec.meta import Strided


@dataclass(frozen=True)
class LogSoftmax:
    """y = x - log(sum(exp(x)))."""

    dtype: str
    rank: int = 1
    inputs: int = 1

    @property
    def params_type(self) -> Any:
        return types.Tuple(())

    def named(self, walk: str) -> str:
        return f"log_softmax_{walk}"

    def operator(self, keeping: Keeping) -> Any:
        return log_softmax_operator(self.dtype, keeping)

    def shared_bytes(self, columns: int) -> int:
        return 0


@noun
def log_softmax_operator(dtype: str, keeping: Keeping) -> Members:
    """softmax's sums; what is written, and numbers that are kept as they are, are its own."""
    num, count = numbers(storage(dtype).number), access(dtype, keeping.aligned).vector
    softmax, group = softmax_operator(dtype, keeping), keeping.group

    @verb
    def write(frag, at, other, found, own, column, inside):
        for c in range(at, at + count):
            frag[c] = frag[c] - found[0] + num.log(found[1])

    @verb
    def keep(frag, other, sent, left, own, N):
        a, b = softmax.of_warp(softmax.add(softmax.none(), frag, other, 0), own)
        if group.PARTS == 1:
            return num.base(a), num.one / b
        group.send(sent, 0, a, b)
        return softmax.merge(sent, group.wait(sent, 0), own, N)

    return members(locals(), **softmax.members() | {"write": write, "write_kept": write, "keep": keep})


@pytest.mark.parametrize(
    ("walk", "config"),
    [
        (registers, RowsConfig(32, 2, 2)),
        (registers, RowsConfig(64, 2, 1)),
        (registers, RowsConfig(64, 4, 1, aligned=False)),
        (cluster, ClusterRowsConfig(32, 2, 2)),
        (cluster, ClusterRowsConfig(32, 2, 2, rows=2)),
        (chunks, ChunksConfig(warps=1, vectors=1, stages=3, cluster=2, chunks=1)),
        (reread, LongRowsConfig(64, 1)),
    ],
    ids=str,
)
def test_log_softmax(walk, config, order):
    M, N, dtype = 3, 184, "float32"
    x = np.random.default_rng(0).standard_normal((M, N)).astype(np.float32) * 8
    y = np.full_like(x, np.nan)
    kind = LogSoftmax(dtype)
    kernel, blocks, more, shared_bytes = walk.build(config, kind), M, (), 0
    if walk is registers:
        blocks = -(-M // config.rows)
    elif walk is cluster:
        blocks, more = config.cluster * -(-M // config.rows), (share_of(N, config.cluster, N, dtype),)
    elif walk is chunks:
        blocks, more = config.cluster, (share_of(N, config.cluster, N, dtype),)
        shared_bytes = config.staged(dtype, kind.inputs).nbytes
    to, given = (Strided(flat(array, name), (N,)) for array, name in ((y, "y"), (x, "x")))
    arrays = RowArrays(to, to, given, given)
    kernel[blocks, kernel.threads, 0, shared_bytes](arrays, (), Rows(M, N, (M,)), *more)
    exact = x - np.log(np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True))
    assert kernel.name.startswith("log_softmax_")
    # x - maximum, log and their sum are rounded once each; what the sum of 184 terms is off by, log makes absolute
    np.testing.assert_allclose(y, exact, rtol=0, atol=4 * np.finfo(np.float32).eps * np.abs(exact).max())
