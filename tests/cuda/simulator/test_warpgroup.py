"""A warpgroup's product in the simulator: right for every kind of operand, rejected with any of its steps wrong.

Mutants are nouns with one verb changed, for a kernel whose operands are all in shared memory, for one whose A is in
registers, and for one that leaves a group running: what `tests/wrong` does not derive from a kernel's own steps, as an
order. On a GPU most of them hang, or are right as often as not.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dualops.cuda import simulator
from dualops.cuda.compiler.backend import cuda, f32
from dualops.cuda.ptx.async_copy import fence_proxy_async
from dualops.cuda.ptx.warp import bar_sync
from dualops.cuda.ptx.wgmma import wgmma_fence, wgmma_wait_group
from tests.cuda.warpgroup_product import (
    KINDS,
    Kind,
    Output,
    Pipe,
    Product,
    make,
    output_of,
    pipe_of,
    product_of,
    simulate,
)

SS, RS, PENDING = Kind("bf16", n=16), Kind("bf16", "registers", n=16), Kind("bf16", n=16, pending=1)
ALL = (SS, RS, PENDING)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_right_is_exact(kind, order):
    y, expected = simulate(kind)
    assert y.tolist() == expected.tolist()


@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize("kind", [SS, Kind("f16", n=24)], ids=str)
def test_rows_that_are_not_there_are_zeros_and_are_not_stored(kind, rows, order):
    y, expected = simulate(kind, rows=rows)
    assert y.tolist() == expected.tolist()


NAN = "nan|differs"
STUCK = r"Deadlock: \d+ threads wait forever"
NEVER_OVER = r"products of thread \d+ are not waited for|nan|are written before the wait"
MUTANTS: dict[str, tuple[type, Callable[..., dict[str, Any]], str, tuple[Kind, ...]]] = {}


def of(noun: type, reason: str, *kinds: Kind) -> Callable[[Callable[..., dict[str, Any]]], None]:
    """Decorator of what makes the wrong verbs of the right noun: a mutant of its name, rejected for the reason."""
    return lambda change: MUTANTS.update({change.__name__: (noun, change, reason, kinds or ALL)})


def nothing(*operands: Any) -> None:
    pass


def without(noun: type, verb: str, reason: str, *kinds: Kind) -> None:
    MUTANTS[f"without {noun.__name__}.{verb}"] = (noun, lambda right: {verb: nothing}, reason, kinds or ALL)


without(Product, "fence", "no wgmma.fence before the first product")
without(Product, "issue", NAN)
without(Product, "commit", NEVER_OVER)
without(Product, "wait", NEVER_OVER)
without(Output, "put", NAN)
without(Output, "fence", NAN)
without(Output, "meet", NAN)
without(Output, "commit", "copies out of shared memory still read it")
without(Output, "wait_read", "copies out of shared memory still read it")


@of(Pipe, NAN)
def the_step_after_is_loaded(right):
    return {"load": lambda smem, a_map, b_map, full, stage, k0: right.load(smem, a_map, b_map, full, stage, k0 + 64)}


@of(Pipe, NAN, PENDING)
def a_stage_is_released_while_it_is_multiplied(right):
    def release(full, empty, i):
        if i == 0:
            right.release(full, empty, 0)
        if i < 2:
            right.release(full, empty, i + 1)

    return {"release": release}


@of(Pipe, NAN, SS, PENDING)
def a_stage_is_released_before_it_is_multiplied(right):
    def wait(full, empty, i):
        stage = right.wait(full, empty, i)
        right.release(full, empty, i)
        return stage

    return {"wait": wait, "release": nothing}


@of(Product, "its registers are touched after wgmma.fence", RS)
def fragments_are_loaded_behind_the_fence(right):
    def load(frag, words, K, k0):
        wgmma_fence()
        right.load(frag, words, K, k0)

    return {"load": load, "fence": nothing}


@of(Product, "registers of a wgmma are written before the wait", RS)
def fragments_are_overwritten_while_they_are_multiplied(right):
    def commit():
        right.commit()
        held[simulator.current().tid][0] = 0

    def issue(acc, frag, smem, stage, i):
        held[simulator.current().tid] = frag
        right.issue(acc, frag, smem, stage, i)

    held: dict[int, Any] = {}
    return {"commit": commit, "issue": issue}


@of(Product, "its registers are touched after wgmma.fence|registers of a wgmma are written before the wait")
def accumulators_are_touched_behind_the_fence(right):
    def issue(acc, frag, smem, stage, i):
        acc[0] += f32(0)
        right.issue(acc, frag, smem, stage, i)

    return {"issue": issue}


@of(Product, NAN)
def the_first_product_adds_to_what_nobody_wrote(right):
    return {"issue": lambda acc, frag, smem, stage, i: right.issue(acc, frag, smem, stage, i + 1)}


@of(Product, NAN)
def every_step_starts_again(right):
    return {"issue": lambda acc, frag, smem, stage, i: right.issue(acc, frag, smem, stage, i * 0)}


@of(Product, STUCK)
def three_warps_multiply(right):
    def issue(acc, frag, smem, stage, i):
        if cuda.threadIdx.x < 96:
            right.issue(acc, frag, smem, stage, i)

    return {"issue": issue}


@of(Product, "brings .* others are at")
def a_warp_has_another_stage(right):
    def issue(acc, frag, smem, stage, i):
        right.issue(acc, frag, smem, stage if cuda.threadIdx.x < 96 else 1 - stage, i)

    return {"issue": issue}


@of(Product, NEVER_OVER)
def the_latest_group_is_not_waited_for(right):
    return {"wait": lambda acc, pending: right.wait(acc, pending + 1)}


@of(Product, NAN)
def a_wait_carries_other_registers(right):
    def wait(acc, pending):
        wgmma_wait_group(16)(cuda.local.array(8, f32), pending)

    return {"wait": wait}


@of(Output, NAN)
def the_fence_comes_before_the_writes(right):
    def put(y_smem, acc):
        fence_proxy_async()
        right.put(y_smem, acc)

    return {"put": put, "fence": nothing}


@of(Output, NAN)
def one_thread_fences(right):
    def fence():
        if cuda.threadIdx.x == 0:
            fence_proxy_async()

    return {"fence": fence}


@of(Output, NAN, SS, RS)  # with a group left running, the fourth happens to be first in either order
def three_warps_meet(right):
    def meet():
        if cuda.threadIdx.x < 96:
            bar_sync(1, 96)

    return {"meet": meet}


@of(Output, NAN)
def the_tile_is_overwritten_while_it_is_stored(right):
    def store(y_map, y_smem):
        right.store(y_map, y_smem)
        held.append(y_smem)

    def commit():
        right.commit()
        y_smem = held.pop()
        for i in range(0, 64, 8):
            y_smem[y_smem.size - 1 - i] = 0
        fence_proxy_async()

    held: list[Any] = []
    return {"store": store, "commit": commit}


@of(Output, "a box at shared address .* expected a multiple of 128")
def the_tile_is_misaligned(right):
    store2 = output_of(SS).store

    def store(y_map, y_smem):
        shifted = simulator.Pointer(y_smem.data[4:], "shared memory", y_smem.key)
        store2(y_map, shifted)

    return {"store": store}


def rejection(name: str, kind: Kind) -> str:
    """Why a mutant is rejected; "" if it passes."""
    nouns = {Pipe: pipe_of(kind), Product: product_of(kind), Output: output_of(kind)}
    if name:
        noun, change, *_ = MUTANTS[name]
        nouns[noun] = nouns[noun].but(**change(nouns[noun]))
    try:
        y, expected = simulate(kind, make(kind, *nouns.values()))
    except (RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return "nan" if np.isnan(y).any() else "" if (y == expected).all() else "differs"


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, mutant in MUTANTS.items() for kind in mutant[3]])
def test_a_mutant_is_rejected(name, kind):
    reasons = []
    for order in ("forward", "reversed"):
        with simulator.order(order):
            reasons.append(rejection(name, kind))
    assert any(re.search(MUTANTS[name][2], each) for each in reasons), reasons


@pytest.mark.parametrize("kind", ALL)
def test_the_nouns_as_they_are_pass(kind, order):
    assert rejection("", kind) == ""


def test_there_are_enough():
    assert len(MUTANTS) >= 25
