"""The tables of log_decay (`step_tables`) on their way from the warp that makes them to those that multiply.

    the warp, of a chunk            those that multiply
    put(...)                        wait(barriers, i);  ...;  release(barriers, i)

There is one place for them: a chunk's are written when all have read those of the chunk before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ...backend import Namespace, i32, verb
from ...tile.companion import companion
from ...tile.pipeline import pipeline
from .step_tables import step_tables


class StepFeed(Namespace):
    """The verbs; i numbers the chunks that a block walks."""

    barriers: Callable[..., Any]  # () -> in shared memory; once in a kernel, by all threads
    init: Callable[..., None]  # (barriers): by one thread, before the `start` of a pipeline
    eights: Callable[..., Any]  # () and
    own: Callable[..., Any]  # (): arrays, as `StepTables` has them
    put: Callable[..., None]  # (tables, barriers, i, own, logs, (b, h, m0), rows): of the chunk that begins with m0
    wait: Callable[..., Any]  # (barriers, i): until they are there
    release: Callable[..., None]  # (barriers, i): the lanes of my warp have read them


@cache
def step_feed(at: int, back: bool, warps: int, *, states: bool = True) -> StepFeed:
    """For tables from byte `at` on, which so many warps read; back, states: as for `step_tables`."""
    tables_of, pipe, written = step_tables(at, back, states=states), pipeline(1, 0, warps), companion(1, 0)

    @verb
    def put(tables, barriers, i, own, logs, place, rows):
        b, h, m0 = place
        tables_of.fetch(own, logs, b, h, m0, rows)
        pipe.claim(barriers, i)
        tables_of.put(tables, own, i32(rows - m0))
        written.hand(barriers.full, i)

    @verb
    def release(barriers, i):
        written.leave()
        pipe.release(barriers, i)

    return StepFeed(
        barriers=pipe.barriers,
        init=pipe.init,
        eights=tables_of.eights,
        own=tables_of.own,
        put=put,
        wait=pipe.wait,
        release=release,
    )
