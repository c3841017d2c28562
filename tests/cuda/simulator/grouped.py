"""What test_instructions.py runs for cp.async, whose copies land in groups or tell an mbarrier."""

from collections.abc import Callable

import numpy as np
import pytest

from dualops.cuda.compiler.backend import cuda, f32
from dualops.cuda.ptx.cp_async import cp_async, cp_async_commit, cp_async_wait_group

from .asynchronous import numbered, run, tests_of

TESTS: dict[str, Callable[[], None]] = {}
of = tests_of(TESTS)


@of("cp_async", "cp_async_commit")
def _copies() -> None:
    copy = cp_async(16)

    def in_groups(y, x):
        lane, stages = cuda.threadIdx.x, cuda.shared.array(384, f32, alignment=16)
        for stage in range(3):
            copy(stages, 128 * stage + 4 * lane, x, 128 * stage + 4 * lane)
            cp_async_commit()
        for stage in range(3):
            y[3 * lane + stage] = stages[128 * stage + 4 * lane + 3]  # too soon
        cp_async_wait_group(2)
        y[96 + lane] = stages[4 * lane + 3]
        y[128 + lane] = stages[128 + 4 * lane + 3]  # too soon
        cp_async_wait_group(0)
        cuda.syncthreads()
        y[160 + lane] = stages[256 + 4 * (31 - lane)]

    x, y = numbered(384), np.zeros(192)
    run(in_groups, y, x)
    assert np.isnan(y[:96]).all() and np.isnan(y[128:160]).all()
    assert y[96:128].tolist() == x[3:128:4].tolist() and y[160:].tolist() == x[256::4][::-1].tolist()

    for nbytes, zfill in cp_async.every():
        each, copy = nbytes // 4, cp_async(nbytes, zfill)
        for size in range(0, nbytes + 1, 4) if zfill else [nbytes]:

            def parts(y, x, copy=copy, zfill=zfill, each=each, size=size):
                there = cuda.shared.array(16, f32, alignment=16)
                if zfill:
                    copy(there, each, x, 2 * each if size else 10**6, size)
                else:
                    copy(there, each, x, 2 * each)
                x[2 * each] = -1  # read when it lands
                cp_async_commit()
                cp_async_wait_group(0)
                for i in range(each):
                    y[i] = there[each + i]
                y[each] = there[2 * each]

            x, y = numbered(16), np.zeros(5)
            run(parts, y, x, threads=1)
            expected = [-1.0, *x[2 * each + 1 : 3 * each].tolist()][: size // 4]
            assert y[:each].tolist() == expected + [0.0] * (each - size // 4)
            assert np.isnan(y[each])


@of("cp_async_wait_group")
def _what_is_forgotten() -> None:
    copy = cp_async(16)

    def uncommitted(y, x):
        there = cuda.shared.array(4, f32, alignment=16)
        copy(there, 0, x, 0)
        cp_async_wait_group(0)
        y[0] = there[0]

    y = np.zeros(1)
    with pytest.raises(RuntimeError, match="1 copies are still in flight"):
        run(uncommitted, y, numbered(4), threads=1)
    assert np.isnan(y[0])

    def refused(*operands):
        def kernel(x):
            there = cuda.shared.array(8, f32, alignment=16)
            cp_async(16, len(operands) == 3)(there, operands[0], x, *operands[1:])

        return kernel

    for error, operands, message in (
        (IndexError, (2, 0), r"shared memory\[2\] is not aligned to 16"),
        (IndexError, (0, 1), r"a0\[1\] is not aligned to 16"),
        (IndexError, (0, 8), r"a0\[8\] copied as 4 elements, of 8"),
        (IndexError, (8, 0), r"shared memory\[8\] accessed as 4 elements, of 8"),
        (ValueError, (0, 0, 20), "size is 20"),
        (ValueError, (0, 0, 6), "size is 6"),
    ):
        with pytest.raises(error, match=message):
            run(refused(*operands), numbered(8), threads=1)

    def too_many(y):
        cp_async_wait_group(64)

    with pytest.raises(ValueError, match="cp_async_wait_group: pending is 64, expected a constant from 0 to 63"):
        run(too_many, np.zeros(1), threads=1)
