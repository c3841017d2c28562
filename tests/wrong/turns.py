"""Blocks that add to sums in turns, watched: the simulator runs one block after another, and would not see one that
adds before its turn, or tells the next one too early.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from typing import Any

from dualops.cuda.backend import builds
from dualops.cuda.flash_attention.sm80 import fused, fused_launch
from dualops.cuda.simulator import current
from dualops.cuda.tile.ordered_sums import all_added, pass_on
from dualops.cuda.tile.tile_sums import TileSums, tile_sums
from tests.cuda.configs import Change

THREADS = 256


class Turns:
    """The sums of a block that are open, from when a thread has waited until one tells the next block, by their flags;
    and which threads have added to them.
    """

    def __init__(self) -> None:
        self.block: object = None
        self.open: dict[int, set[object]] = {}

    def of_block(self) -> dict[int, set[object]]:
        """Those of the block that runs: one runs after another."""
        if current().block is not self.block:
            self.block, self.open = current().block, {}
        return self.open

    def waited(self, flags: Any, flag: int, count: int) -> None:
        all_added(flags, flag, count)
        self.of_block()[int(flag)] = set()

    def told(self, flags: Any, flag: int, count: int) -> None:
        added = self.of_block().pop(int(flag), set())
        if len(added) != THREADS:
            raise RuntimeError(f"the next block is told of sum {flag} when {len(added)} threads have added to it")
        pass_on(flags, flag, count)

    def add(self, flag: int) -> None:
        if flag not in self.of_block():
            raise RuntimeError(f"a thread adds to sum {flag} when it is not its block's turn")
        self.open[flag].add(current())

    def sums(self, dtype: str, a: Any, b: Any, parts: int, boxes: int) -> TileSums:
        found, size = tile_sums(dtype, a, b, parts, boxes), parts * a.rows * boxes * b.rows

        def store(sums: Any, at: int, acc: Any) -> None:
            self.add(int(at) // size + 1)
            found.store(sums, at, acc)

        def add(sums: Any, at: int, acc: Any) -> None:
            self.add(int(at) // size + 1)
            found.add(sums, at, acc)

        return found.but(store=store, add=add)


def in_turns(**instead: Callable[..., None]) -> tuple[Change, ...]:
    """A kernel that is built anew, of watched verbs, or of these instead."""
    turns = Turns()
    watched = {"all_added": turns.waited, "pass_on": turns.told, "tile_sums": turns.sums, **instead}
    return (fused, watched), (fused_launch, {"build_fused": builds(unwrap(fused.build_fused))})
