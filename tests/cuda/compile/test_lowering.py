"""Shorter LLVM IR, the same machine code: elements of arrays, divisions, literals, loops, values without a place."""

from typing import Any

import pytest

from dualops.cuda.compiler.backend import cuda, f32, i32, i64, kernel, pointer, types
from dualops.cuda.compiler.compile import compile_kernel, link, lto_ir
from dualops.cuda.compiler.frontend import lowering
from tests.cuda.compile.test_frontend import ARCH, assigned_again, machine_code, usual

SIZE = 6


@kernel(pointer(i64), i64, i32, types.uint32, threads=32)
def divided(y, n, small, natural):
    """By constants of either sign, one of them the only two that Numba treats apart, and by what varies."""
    y[0], y[1] = n // 8, n % 8
    y[2], y[3] = n // -8, n % -8
    y[4], y[5] = small // i32(12), small % i32(12)
    y[6], y[7] = natural // types.uint32(12), natural % types.uint32(12)
    y[8], y[9] = n // -1, n % -1
    y[10], y[11] = n // small, n % small
    for k in range(small):
        y[12 + k] = k // 3 + k % 5
        y[k] //= 7


@kernel(pointer(f32), i32, threads=32)
def elements(y, n):
    """Of a local array and a shared one: by positive and negative, constant and varying indices."""
    mine, ours = cuda.local.array(SIZE, f32), cuda.shared.array(SIZE, f32)
    for k in range(SIZE):
        mine[k] = y[k]
        ours[k] = mine[k] + f32(1)
    mine[-1] = ours[-2]
    mine[n] += ours[n - 3] * 2
    mine[types.uint32(n)] = True
    for k in range(SIZE):
        y[k] = mine[k] + mine[-k - 1] + ours[SIZE - 1 - k]


@kernel(pointer(f32), pointer(i32), i32, threads=32)
def numbers(y, z, n):
    """Literals that become other types, one of which has no room for it."""
    z[0] = n + 3
    z[1] = i32(2**31 + 5)
    y[0] = 3 * y[1] - 7
    y[1] = types.uint32(-1) + f32(n)
    z[2] = (n << 3) | 1
    flag = n > 0
    z[3] = flag + 1


@kernel(pointer(i64), i32, i32, types.uint32, threads=32)
def loops(y, n, step, natural):
    """Ranges of one to three numbers, by ones and not, up and down, of any kind of integer; left and nested."""
    for k in range(n):
        for j in range(k, n + 1):
            y[j] += k
        if y[k] > 100:
            break
    for k in range(n, 0, -3):
        y[k] = k
    for k in range(1, n, step):
        y[k] *= 3
    for k in range(natural):
        y[k] -= 1
    for k in range(2, 7):
        y[k] = n


@kernel(pointer(i64), i32, threads=32)
def kept(y, n):
    """Ranges in variables, and iterators of several in one."""
    kept = range(3, n)
    y[0] = len(kept)
    if n > 4:
        for k in kept:
            y[k] = 2 * k
    for k in kept:
        y[k] += 1
    for left, right in zip(kept, range(9)):
        y[left] = right
    for k, number in enumerate(range(n)):
        y[k] -= number


@kernel(pointer(i64), i32, threads=32)
def far(y, n):
    """Values that are read in other blocks than that of their assignment: before and behind it in the source."""
    first, both = y[n], (y[1], n + 1)
    while n > 0:
        twice = 2 * first
        if twice > both[0]:
            y[n] = twice - both[1]
        else:
            late = twice * n
            if late > 7:
                continue
            y[n + 1] = late
        n -= 1
    y[0] = first + both[1]


@kernel(pointer(i64), i32, threads=32)
def perhaps(y, n):
    """Variables that a way to where they are read does not assign to."""
    if n > 3:
        seldom = y[n]
    y[0] = seldom  # pyright: ignore[reportPossiblyUnboundVariable]
    for k in range(n):
        if k == 2:
            last = y[k]
        if k > 2:
            y[k] = last  # pyright: ignore[reportPossiblyUnboundVariable]
    y[1] = last  # pyright: ignore[reportPossiblyUnboundVariable]


@pytest.mark.parametrize("kernel", [divided, elements, numbers, loops, far, perhaps], ids=lambda kernel: kernel.name)
def test_the_machine_code_is_numbas(kernel):
    ours, numbas = (machine_code(link(code, ARCH)[0]) for code in (lto_ir(kernel, ARCH), usual(kernel)))
    assert ours == numbas and len(ours) > 500


def registers_and_bytes(code: bytes) -> tuple[int, int]:
    """Of a kernel without spills."""
    cubin, log = link(code, ARCH)
    assert " 0 bytes spill stores" in log
    return int(log.partition("Used ")[2].split()[0]), len(machine_code(cubin))


def test_of_ranges_in_variables_it_is_as_long():
    assert registers_and_bytes(lto_ir(kept, ARCH)) == registers_and_bytes(usual(kept))


@pytest.mark.parametrize("kernel", [divided, elements, loops, assigned_again], ids=lambda kernel: kernel.name)
def test_of_many_blocks_there_are_no_more_registers_and_no_spills(monkeypatch, kernel):
    usually = registers_and_bytes(lto_ir(kernel, ARCH))
    monkeypatch.setattr(lowering, "MANY_BLOCKS", 0)
    of_many = registers_and_bytes(lto_ir(kernel, ARCH))
    assert of_many[0] <= usually[0] and of_many[1] <= usually[1]


def test_an_implementation_is_looked_for_once(monkeypatch):
    """That there is none, too: Numba loads all registries again each time."""

    def init(self: Any, context: Any, many: bool) -> None:
        def look(context: Any, fn: Any, sig: Any, first: bool) -> Any:
            if first:  # Numba asks itself again when it has loaded its registries
                asked.append((fn, sig))
            return numbas(context, fn, sig, first)

        theirs(self, context, many)
        numbas, self.numbas = self.numbas, look

    asked, theirs = list[Any](), lowering.Implementations.__init__
    monkeypatch.setattr(lowering.Implementations, "__init__", init)
    lto_ir(divided, ARCH)
    assert len(asked) == len(set(asked)) > 5
    assert "static_setitem" in {fn for fn, _ in asked}, "it has no implementation"


@kernel(pointer(f32), pointer(f32), i32, threads=32)
def rotated(y, x, n):
    """Each element of a local array moves several times, in loops over constants within one that is not."""
    mine = cuda.local.array(32, f32)
    for k in range(n):
        for j in range(8):
            for half in range(2):
                for e in range(0, 2, 1):
                    at = 4 * j + 2 * half + e
                    mine[at] = x[32 * k + at] + mine[(at + 5) % 32]
    for j in range(32):
        y[j] = mine[j]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120"])
def test_loops_over_constants_are_unrolled(arch):
    assert compile_kernel(rotated, arch).report.stack_bytes == 0
