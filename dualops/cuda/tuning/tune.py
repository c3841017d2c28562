"""`plan` a call by the operator's name; `tune`: time the ways to compute it. Later similar calls take the fastest.

An operator has many ways to compute a problem: a way is a rung with a Config. The operator orders them by rules that
were measured on one GPU. On a GPU with other clocks, fewer SMs or less bandwidth, or for a problem between the rules,
another way may be the fastest. Only a measurement can find it. The times are on disk, see `records`; calls read nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from numbers import Integral
from statistics import median
from typing import Any, NamedTuple, TypeVar
from warnings import warn

from ...spec.named import refusal
from ..compiler.backend import SIMULATED
from ..compiler.binaries import Wanted, build_all
from ..launch.arrays import adapter_of
from ..launch.driver import away, elapsed
from ..launch.operation import OPERATIONS, Offer, Operation, results_of
from ..launch.plans import Choice, Plan
from .records import Record, Timed, Way, keep, measured, way_of

SLOW = "naive"  # the rung that is never the fastest
CALLS, BURSTS = 20, 5  # calls per burst, without a wait between them; bursts, of which the median is taken
BURST_SECONDS = 0.1  # a burst has fewer calls if CALLS would take longer

Ranked = TypeVar("Ranked", Choice, Offer)


class NamedCall(NamedTuple):
    """An operation and its arguments."""

    operation: Operation
    arrays: tuple[Any, ...]
    params: tuple[Any, ...]
    out: tuple[Any, ...] | None


def named_call(
    who: str, operator: str, arrays: Sequence[Any], out: Any, backward: bool, params: Mapping[str, Any]
) -> NamedCall:
    """Return the call of an operator's name and arguments. who: the public function, for messages.

    Raises ValueError for an unknown operator, TypeError for a parameter, NotImplementedError for a missing gradient.
    """
    if operator not in OPERATIONS:
        raise ValueError(f"{who}: operator is {operator!r}, expected one of {', '.join(OPERATIONS)}")
    directions = OPERATIONS[operator]
    if backward and len(directions) < 2:
        raise NotImplementedError(f"{who}: {operator} has no backward yet")
    operation = directions[1 if backward else 0]
    inputs = dict(zip(operation.inputs, arrays))
    accepted = dict.fromkeys(operation.inputs) | operation.defaults
    known = [name for name in accepted if name not in inputs]
    if unknown := params.keys() - known:
        raise refusal(operation.op, sorted(unknown), known)
    call = {**accepted, **inputs, **params}
    values = [tuple(call[name] for name in names) for names in (operation.inputs, operation.defaults)]
    return NamedCall(operation, values[0], values[1], None if out is None else results_of(out))


def plan(
    operator: str, *arrays: Any, out: Any = None, kernel: str | None = None, backward: bool = False, **params: Any
) -> Plan:
    """Return how a call would be computed: `print(plan("softmax", x, axis=0))` shows rung, Config and reason.

    Launches nothing. operator: "softmax", "flash_attention", ...; arrays, params, out, kernel: the operator's
    arguments. Raises the errors of the call itself.
    """
    call = named_call("plan", operator, arrays, out, backward, params)
    return call.operation.plan(call.arrays, call.params, call.out, kernel)


def tune(
    operator: str,
    *arrays: Any,
    out: Any = None,
    backward: bool = False,
    top: int = 8,
    remeasure: bool = False,
    begin: Callable[[str], None] = lambda name: None,
    **params: Any,
) -> Record:
    """Time the ways to compute a call on this GPU, and keep the fastest for similar calls, also of later processes.

        dualops.cuda.tune("matmul", a, b)
        dualops.cuda.tune("flash_attention", q, k, v, o, lse, do, causal=True, backward=True)

    operator, arrays, out, backward, params: see `plan`. The arrays are only read: results go to new memory, or to
    `out`. top: the number of ways to time, in the operator's order; the rung "naive" is not
    timed. `remeasure`: time ways again that were timed before. begin: is called with each way before it is timed.

    Calls are similar if each axis of their shapes rounds up to the same power of two, and if dtypes, parameters, the
    operator's own first choice and the name of the GPU are equal. `plan` shows a call's measured time. If several
    similar problems were timed, the last one counts. The results of different ways differ in their last bits. So after
    a tune, a row may depend on the size of its batch, if two sizes have different fastest ways.

    Returns the record: the seconds of a call by each way, in bursts, and the best way. All calls have the same arrays,
    which L2 may contain. To replace the operator's own first choice, a way must be 1 % faster. Kernels are compiled
    beforehand on all cores, and each time is saved at once, so an interrupted call loses nothing. A way that fails at
    run time is left out, with a RuntimeWarning. Records are in the cache folder, for these sources and this compiler
    only; `python -m dualops tune --clear` deletes them.
    Raises the errors of the call itself, TypeError and ValueError for a wrong `top`, RuntimeError if the stream of the
    arrays is being captured, OSError if the cache can't be written.
    """
    if isinstance(top, bool) or not isinstance(top, Integral):
        raise TypeError(f"tune: top is {top!r}, expected an integer of at least 1")
    if top < 1:
        raise ValueError(f"tune: top is {top}, expected at least 1")
    call = named_call("tune", operator, arrays, out, backward, params)
    operation = call.operation
    given = operation.with_numbers(call.arrays)
    results = call.out if call.out is not None else _results(operation, given)
    operation.plan(given, call.params, results)  # raises the errors of a wrong call
    ways = worth_timing(operation.ways(given, call.params, results))[: int(top)]
    first = ways[0].settled
    of = Timed(operation.op, first.problem, first.results, first.device, operation.lengths)
    before = measured(of)
    seconds = dict(before.seconds) if before else {}
    _refuse_capture(operation, given)
    todo = [way for way in ways if remeasure or way_of(way.choice) not in seconds]
    _build(todo)
    own, failed = way_of(ways[0].choice), set[Way]()
    try:
        for way in todo:
            name = way_of(way.choice)
            begin(f"{name.rung}  {name.config}")
            try:
                seconds[name] = _seconds(way.plan(), given, results)
            except (RuntimeError, MemoryError) as error:
                if name == own:
                    raise
                seconds.pop(name, None)
                failed.add(name)
                warn(f"tune: {name.rung}  {name.config} is left out: {error}", RuntimeWarning, stacklevel=2)
            keep(of, {own: seconds[own], **seconds}, failed)
        return keep(of, {own: seconds[own], **seconds}, failed)
    finally:
        operation.forget()


def worth_timing(ways: Iterable[Ranked]) -> list[Ranked]:
    """Return the ways without those of the rung "naive", which exists to be read; or all, if there is no other rung."""
    found = [*ways]
    return [way for way in found if way.rung != SLOW] or found


def _results(operation: Operation, arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return new arrays for results that would overwrite inputs; None if a call allocates its results."""
    found = []
    for array in operation.overwritten(arrays):
        adapter = adapter_of(array, operation.op, operation.inputs[0])
        meta = adapter.meta(array)
        found.append(adapter.allocator(meta.dtype, meta.device)(meta.shape, meta.strides))
    return tuple(found) or None


def _refuse_capture(operation: Operation, arrays: tuple[Any, ...]) -> None:
    """Raise RuntimeError if the stream is being captured, because launches would not run."""
    adapter = adapter_of(arrays[0], operation.op, operation.inputs[0])
    if not SIMULATED and adapter.is_capturing(adapter.stream(arrays, operation.op)):
        raise RuntimeError(f"tune: {operation.op}'s arrays are on a stream that is being captured")


def _build(ways: Iterable[Offer]) -> None:
    """Compile the kernels of ways, in parallel."""
    if not SIMULATED:
        steps = [(way.settled.device.arch, step) for way in ways for step in way.choice.steps()]
        list(build_all({Wanted(step.kernel, arch, step.shared_bytes): None for arch, step in steps}))


def _seconds(plan: Plan, arrays: tuple[Any, ...], out: tuple[Any, ...] | None) -> float:
    """Return the seconds of one call by a plan: the median of bursts without the first."""
    everything = arrays if out is None else (*arrays, *out)
    adapter = plan.adapter
    handle = adapter.stream(everything)

    def burst(calls: int) -> float:
        def run() -> None:
            for _ in range(calls):
                plan.run(arrays, adapter.layouts(everything)[1], out)

        return elapsed(run, handle)

    with away(plan.device_index) or nullcontext():
        burst(1)
        calls = max(1, min(CALLS, int(BURST_SECONDS / max(burst(1), 1e-9))))
        burst(calls)
        return median(burst(calls) for _ in range(BURSTS)) / calls
