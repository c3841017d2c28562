"""Asynchronous products of a warpgroup's 128 threads: fenced, issued, committed in groups, waited for.

They are delayed and strict. A product begins to read shared memory when the first thread issues it. Each warp computes
its 16 rows when its first thread waits for the group; bytes that changed in between are read as NaN. The accumulators
are NaN from the issue until a wait with them as operand, after their group has ended. It is an error if a thread
accesses a product's registers between its latest fence and the product, or writes them while a product uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from .meetings import WARP, Event
from .memory import Local
from .threads import Scheduler, Thread, current

THREADS = 4 * WARP
# (warp, words of A, old registers or None) -> the registers of the warp's 32 threads
Compute = Callable[[int, list[Any], "np.ndarray | None"], np.ndarray]
_NAN = np.float32(np.nan)


class Product:
    """One product: its threads' operands, and the registers [32, count] of each warp after they are computed."""

    def __init__(self, name: str, operands: Sequence[int], number: int, compute: Compute):
        self.name, self.operands, self.number, self.compute = name, operands, number, compute
        self.words: list[Any] = [None] * THREADS
        self.old: list[Any] = [None] * THREADS
        self.before: Product | None = None  # the product in flight with the same accumulators
        self.missing = THREADS
        self.issued = Event(f"{name}, which not all threads of the warpgroup have issued")
        self.registers: list[Any] = [None] * 4

    def finish(self, scheduler: Scheduler, warp: int) -> None:
        """Compute the rows of a warp, after all threads of the warpgroup have issued the product."""
        if self.missing:
            scheduler.wait(self.issued)
        if self.registers[warp] is None:
            threads = slice(WARP * warp, WARP * (warp + 1))
            old = self.before.registers[warp] if self.before is not None else None
            if self.old[threads.start] is not None:
                old = np.fromiter(chain.from_iterable(self.old[threads]), np.float32).reshape(WARP, -1)
            self.registers[warp] = self.compute(warp, self.words[threads], old)
            if all(registers is not None for registers in self.registers):
                self.before = None  # not needed any more


class Watch:
    """The state of registers that products use."""

    __slots__ = ("product", "read_by", "touched", "unit")

    def __init__(self, unit: Products):
        self.unit, self.read_by = unit, -1
        self.product: Product | None = None  # the product that writes them, until a wait with them as operand
        self.touched = unit.fences - 1  # not accessed yet: counts as before the latest fence

    def check_write(self) -> None:
        """Raise RuntimeError if a product still uses the registers."""
        busy = self.product.number if self.product is not None else self.read_by
        if busy >= self.unit.finished:
            raise RuntimeError("registers of a wgmma are written before the wait for its group")
        self.product = None  # its result is lost, if no wait had them as operand


class Watched(Local):
    """A local array that a product has used. From then on, accesses of the thread are recorded."""

    __slots__ = ()

    def __getitem__(self, index: int) -> Any:
        watch = self.watch
        watch.touched = watch.unit.fences
        if 0 <= index < len(self.values):  # as in Local, which saves a call for most reads of kernels
            return self.values[index]
        return super().__getitem__(index)

    def __setitem__(self, index: int, value: Any) -> None:
        watch = self.watch
        if watch.product is not None or watch.read_by >= watch.unit.finished:
            watch.check_write()
        watch.touched = watch.unit.fences
        if 0 <= index < len(self.values):
            self.values[index] = value if type(value) is self.kind else self.make(value)
        else:
            super().__setitem__(index, value)

    def some(self, index: int, count: int) -> list[Any]:
        self.watch.touched = self.watch.unit.fences
        return super().some(index, count)

    def put(self, index: int, values: list[Any]) -> None:
        self.watch.check_write()
        self.watch.touched = self.watch.unit.fences
        super().put(index, values)


class Products:
    """A thread's part in the products of its warpgroup."""

    def __init__(self, thread: Thread):
        self.thread, self.groups = thread, list[list[Product]]([[]])  # groups without a wait so far; the last is open
        self.fences = self.number = self.finished = 0
        self.fenced = False  # whether there was a fence since the latest wait
        self.shared: dict[int, Product] = thread.block.units.setdefault(("wgmma", thread.warp // 4), {})

    def fence(self) -> None:
        """Order this thread's accesses to registers before its next products."""
        self.fences += 1
        self.fenced = True

    def issue(
        self,
        name: str,
        operands: Sequence[int],
        begin: Callable[[], Compute],
        acc: Local,
        count: int,
        accumulate: bool,
        words: tuple[Local, int] | None,
    ) -> None:
        """Start a product. `begin` starts its reads of shared memory; `words`: A, if it is in registers."""
        if not self.fenced:
            raise RuntimeError(f"{name}: no wgmma.fence before the first product, or since the latest wait")
        watch = self._watch(name, acc)
        product = self.shared.get(self.number)
        if product is None:
            product = self.shared[self.number] = Product(name, operands, self.number, begin())
        tid = self.thread.tid % THREADS
        if (product.name, product.operands) != (name, operands):
            expected = f"{product.name} of {product.operands}"
            raise RuntimeError(f"{name}: thread {tid} of the warpgroup brings {operands}, others are at {expected}")
        if words is not None:
            array, index = words
            fragment = self._watch(name, array)
            if fragment.product is not None:
                raise RuntimeError(f"{name}: A is accumulators that were not waited for")
            product.words[tid] = array.values[index : index + 4]
            fragment.read_by = self.number
        if accumulate:
            if watch.product is None:
                product.old[tid] = acc.values[:count]
            elif watch.product.name != name:
                raise RuntimeError(f"{name}: its accumulators are in flight in {watch.product.name}, of another shape")
            else:
                product.before = watch.product
        acc.values[:count] = [_NAN] * count
        watch.product = product
        self.groups[-1].append(product)
        self.number += 1
        product.missing -= 1
        if not product.missing:
            del self.shared[product.number]
            self.thread.scheduler.fire(product.issued)

    def commit(self) -> None:
        self.groups.append([])

    def wait(self, acc: Local, count: int, pending: int) -> None:
        """Wait for all groups except the latest `pending`. Then `acc` has the results of ended products, else its old
        values."""
        while len(self.groups) - 1 > pending:
            for product in self.groups.pop(0):
                product.finish(self.thread.scheduler, self.thread.warp % 4)
                self.finished = product.number + 1
        self.fenced = False
        if not isinstance(acc, Watched):
            return
        product = acc.watch.product
        if product is not None and product.number < self.finished:
            acc.values[:count] = list(product.registers[self.thread.warp % 4][self.thread.lane])
            acc.watch.product = None

    def end(self) -> None:
        """End the block. Raises RuntimeError for products without a wait."""
        left = sum(map(len, self.groups))
        if left:
            raise RuntimeError(f"{left} products of thread {self.thread.tid} are not waited for when its block ends")

    def _watch(self, name: str, array: Local) -> Watch:
        if not isinstance(array, Watched):
            array.__class__ = Watched
            array.watch = Watch(self)
        if array.watch.touched >= self.fences:
            raise RuntimeError(f"{name}: its registers are touched after wgmma.fence")
        return array.watch


def products() -> Products:
    """Return the products of the running thread. Raises RuntimeError in a block without whole warpgroups."""
    thread = current()
    unit = thread.units.get("wgmma")
    if unit is None:
        if thread.block.threads < (thread.warp // 4 + 1) * THREADS:
            raise RuntimeError(
                f"wgmma: warp {thread.warp} is in no warpgroup of four, of {thread.block.threads} threads"
            )
        unit = thread.units["wgmma"] = Products(thread)
    return unit
