"""Broken kernels, each with the one mistake that its name describes. The checker must reject all of them.

`BROKEN[name].build(dtype)` builds the kernel. `reason`: the message of the checker or the simulator. `on_gpu`: whether
the mistake also shows on a GPU, in every run and without damage; races and undefined shuffles may not show there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from dualops.cuda.compiler.backend import Kernel, cuda, verb
from dualops.cuda.tile.numbers import numbers
from dualops.cuda.tile.storage import storage

from .kernels import THREADS, build, build_backward, build_through_shared, build_vectors, right

WRONG_VALUE = r"max error .* limit"
NAN_OUT_OF_PLACE = r"y: nan at .* expected"


@dataclass(frozen=True)
class Broken:
    """A kernel with a mistake."""

    name: str
    build: Callable[[str], Kernel]
    reason: str  # a pattern of the message
    on_gpu: bool
    backward: bool = False
    blocks: Callable[[int], int] = lambda rows: rows


BROKEN: dict[str, Broken] = {}


def broken(reason: str, *, on_gpu: bool) -> Callable[[Callable[[str], dict[str, Any]]], Callable[..., Any]]:
    """Decorate a function that returns the wrong verbs for a dtype: add the kernel that is built with them."""

    def add(verbs: Callable[[str], dict[str, Any]]) -> Callable[..., Any]:
        made: dict[str, Kernel] = {}

        def build_broken(dtype: str) -> Kernel:
            if dtype not in made:
                made[dtype] = build(dtype, right(dtype).but(**verbs(dtype)))
            return made[dtype]

        BROKEN[verbs.__name__] = Broken(verbs.__name__, build_broken, reason, on_gpu)
        return verbs

    return add


def control(dtype: str) -> Kernel:
    """The kernel without a mistake."""
    return build(dtype, right(dtype))


# --- memory ------------------------------------------------------------------------------------------


@broken(r"x\[\d+\] read, of \d+ elements", on_gpu=False)
def unmasked_tail(dtype):
    @verb
    def rounded_up(N):
        return (N + THREADS - 1) // THREADS * THREADS

    return {"read_end": rounded_up}


@broken(r"y\[\d+\] written, of \d+ elements|elements outside the array were written, at offsets", on_gpu=True)
def one_element_too_many(dtype):
    store = storage(dtype).store

    @verb
    def store_two(y, index, value):
        store(y, index, value)
        store(y, index + 1, value)

    return {"store": store_two}


@broken(r"elements were never written, the first at \(0, \d+\)", on_gpu=True)
def last_column_not_written(dtype):
    @verb
    def one_less(N):
        return N - 1

    return {"write_end": one_less}


@broken(r"elements outside the array were written, at offsets", on_gpu=True)
def row_stride_forgotten(dtype):
    @verb
    def dense(row, stride, N):
        return row * N

    return {"row_begin": dense}


@broken(NAN_OUT_OF_PLACE, on_gpu=True)
def added_to_what_was_there(dtype):
    load, store = storage(dtype).load, storage(dtype).store

    @verb
    def accumulate(y, index, value):
        store(y, index, load(y, index) + value)

    return {"store": accumulate}


# --- arithmetic --------------------------------------------------------------------------------------


@broken(WRONG_VALUE, on_gpu=True)
def sum_in_half_precision(dtype):
    rounded = storage("bfloat16").rounded

    @verb
    def add(row_sum, value):
        return row_sum * 0 + rounded(row_sum + value)

    return {"add": add}


@broken(WRONG_VALUE, on_gpu=True)
def result_rounded_to_bfloat16(dtype):
    store, rounded = storage(dtype).store, storage("bfloat16").rounded

    @verb
    def round_and_store(y, index, value):
        store(y, index, rounded(value))

    return {"store": round_and_store}


@broken(WRONG_VALUE, on_gpu=True)
def sum_not_rescaled(dtype):
    @verb
    def as_it_was(row_sum, old_max, new_max):
        return row_sum

    return {"rescaled": as_it_was}


@broken(r"y: (nan|inf|0.0) at|" + WRONG_VALUE, on_gpu=True)
def maximum_without_the_tail(dtype):
    maximum = numbers(storage(dtype).number).maximum

    @verb
    def larger(row_max, value, n, N):
        return maximum(row_max, value) if n < N // THREADS * THREADS else row_max

    return {"larger": larger}


@broken(NAN_OUT_OF_PLACE, on_gpu=True)
def minus_infinity_not_guarded(dtype):
    @verb
    def unguarded(row_max):
        return row_max

    return {"base_of": unguarded}


@broken(r"y: nan at|" + WRONG_VALUE, on_gpu=True)
def maximum_from_zero(dtype):
    maximum, ZERO = numbers(storage(dtype).number).maximum, storage(dtype).number(0)

    @verb
    def larger(row_max, value, n, N):
        return maximum(maximum(row_max, value), ZERO)

    return {"larger": larger}


@broken(r"expected nan", on_gpu=True)
def nan_swallowed(dtype):
    number, load = storage(dtype).number, storage(dtype).load
    maximum, NOTHING = numbers(number).maximum, number(-inf)

    @verb
    def load_number(x, index):
        return maximum(load(x, index), NOTHING)

    return {"load": load_number}


# --- threads together --------------------------------------------------------------------------------


@broken(NAN_OUT_OF_PLACE, on_gpu=False)
def barrier_missing(dtype):
    @verb
    def go_on(warp):
        pass

    return {"meet": go_on}


@broken(r"Deadlock: 32 threads wait forever: block .* at syncthreads", on_gpu=False)
def barrier_in_a_branch(dtype):
    @verb
    def first_warp_waits(warp):
        if warp == 0:
            cuda.syncthreads()

    return {"meet": first_warp_waits}


def _lanes_sum(dtype: str, distances: tuple[int, ...], mask: int) -> Any:
    shuffle = numbers(storage(dtype).number).shuffle
    STEPS, MASK = len(distances), mask

    @verb
    def lanes_sum(x):
        for step in range(STEPS):
            x += shuffle(x, distances[step], MASK)
        return x

    return lanes_sum


@broken(r"lane (1[6-9]|2\d|3[01]) calls with a member mask 0x0000ffff that leaves it out", on_gpu=False)
def shuffle_mask_of_half_a_warp(dtype):
    return {"lanes_sum": _lanes_sum(dtype, (1, 2, 4, 8, 16), 0x0000FFFF)}


@broken(WRONG_VALUE, on_gpu=True)
def shuffle_distance_twice(dtype):
    return {"lanes_sum": _lanes_sum(dtype, (1, 2, 4, 8, 8), 0xFFFFFFFF)}


@broken(WRONG_VALUE, on_gpu=True)
def shuffle_step_left_out(dtype):
    return {"lanes_sum": _lanes_sum(dtype, (1, 2, 4, 8), 0xFFFFFFFF)}


@broken(r"Deadlock: .* at shfl.sync.bfly with lanes 0xffffffff", on_gpu=False)
def shuffle_of_lanes_that_have_something(dtype):
    shuffle, NOTHING = numbers(storage(dtype).number).shuffle, storage(dtype).number(-inf)
    maximum = numbers(storage(dtype).number).maximum

    @verb
    def lanes_max(x):
        if x != NOTHING:
            for step in range(5):
                x = maximum(x, shuffle(x, 1 << step, 0xFFFFFFFF))
        return x

    return {"lanes_max": lanes_max}


# --- other kernels -----------------------------------------------------------------------------------

for _entry in (
    Broken(
        "stale_shared_memory",
        lambda dtype: build_through_shared(dtype, False),
        "max error .* limit|nan at|inf at",
        False,
    ),
    Broken("vectors_on_unaligned_rows", build_vectors, r"x\[\d+\] is not aligned to 16 bytes", False),
    Broken(
        "grid_one_row_short",
        control,
        r"elements were never written, the first at \(\d+, 0\)",
        True,
        blocks=lambda rows: rows - 1,
    ),
    Broken(
        "dot_of_one_lane", lambda dtype: build_backward(dtype, False), "dx: max error .* limit", True, backward=True
    ),
):
    BROKEN[_entry.name] = _entry

# what is right of them, and whether it is a gradient
RIGHT: dict[str, tuple[Callable[[str], Kernel], bool]] = {
    "control": (control, False),
    "through_shared": (partial(build_through_shared, barrier_between=True), False),
    "backward": (partial(build_backward, sees_all_lanes=True), True),
}
