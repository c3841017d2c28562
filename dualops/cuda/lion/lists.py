"""Lion on lists of tensors: one launch for each combination of dtypes, for any number of tensors.

A call looks up its tables by the addresses of its tensors, and then compares shapes, strides and dtypes. Tables depend
on nothing else, so the memory may have belonged to other tensors before. The spec's checks depend on shapes, strides
and dtypes only: if just addresses change, as those of gradients often do, only overlaps are checked again.

The tables of MOST_KEPT calls are kept, and those that a captured graph may read (`device_memory`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import chain
from operator import eq
from threading import RLock
from typing import Any, NamedTuple

import numpy as np

from ...spec import ArrayMeta, Problem, lion as SPEC
from ...spec.lion import LISTS, bind_list, check_apart, check_lengths, numbered
from ...spec.meta import number_meta
from ..compiler.backend import SIMULATED
from ..launch.arrays import Adapter, adapter_of
from ..launch.device import of_array
from ..launch.device_memory import Kept, Place, Streams, streams_of
from ..launch.driver import away
from ..launch.operation import Operation, on_host
from ..launch.plans import stream_of
from . import dense
from .formula import Dtypes, Rates, array_names, dtypes_of, rates_of
from .tables import Group, Tables

MOST_KEPT = 64
LR_DTYPES = next(entry.dtypes for entry in SPEC.inputs if entry.name == "lr")

Lists = dict[str, Sequence[Any]]
Addresses = tuple[int, ...]  # of a call's arrays


class Call(NamedTuple):
    """The arguments of a call."""

    lists: Lists  # of inputs
    out: Lists  # of results, if out= is given: "out new_params" and so on
    lr: Any  # a float, or an array
    params: dict[str, Any]
    kernel: str | None

    @property
    def everything(self) -> Lists:
        return {**self.lists, **self.out}

    def target(self, result: str) -> str:
        """Return the list to which a result is written."""
        return f"out {result}" if self.out else SPEC.updates[result]

    def one(self, i: int) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
        """Return arrays, parameters and out= of a call for only tensor number i."""
        params, grads, momenta, master = (self.lists[name][i] if name in self.lists else None for name in LISTS)
        out = tuple(each[i] for each in self.out.values()) or None
        return (params, grads, momenta, self.lr, master), tuple(self.params.values()), out


class Bound(NamedTuple):
    """The facts about a call that depend only on shapes, strides and dtypes."""

    kind: Hashable  # the call's library, number of arrays, lists, lr and kernel
    origins: Hashable  # of its arrays, see `Adapter.origins`
    shapes: list[list[Any]]
    place: Place
    groups: list[Group]
    alone: list[int]  # tensors that need a separate launch
    names: list[str]  # of the call's arrays, for messages
    nbytes: np.ndarray  # of each array
    written: np.ndarray  # whether each array is written
    source: np.ndarray  # for a result the index of the array that it may overwrite, for others their own index
    lr_on_device: bool

    def fits(self, arrays: Sequence[Any]) -> bool:
        """Whether arrays of another call, of the same number, have the same shapes, strides and dtypes."""
        return all(all(map(eq, *both)) for both in zip(self.place.adapter.shapes(arrays), self.shapes, strict=True))


class Ready(NamedTuple):
    """A checked call with its tables."""

    bound: Bound
    tables: Tables


class ListOperation:
    """The operation on lists. one: the operation on a single tensor, for tensors that need a separate launch."""

    def __init__(self, one: Operation):
        self.one, self.op = one, one.op
        self.bounds: list[Bound] = []
        self.ready = Kept[Ready]()
        self.lock = RLock()  # for `bounds` and `ready`: a training loop may step in several threads

    def __call__(
        self,
        given: Mapping[str, Any],
        lr: Any,
        betas: Any,
        weight_decay: Any,
        out: Any,
        kernel: str | None,
        stream: Any,
    ) -> tuple[Any, ...]:
        """Do one step and return the written lists. given: has each of LISTS."""
        lists, results = self._lists(given, out)
        if kernel is not None and kernel not in SPEC.rungs:
            raise ValueError(f"{self.op}: kernel is {kernel!r}, expected one of {', '.join(SPEC.rungs)}")
        rates = _rates(self.op, betas, weight_decay)
        if not lists["params"]:
            return tuple(results.values())
        params = {"betas": betas, "weight_decay": weight_decay}
        call = Call(lists, {} if out is None else results, on_host(lr, self.op, "lr", LR_DTYPES), params, kernel)
        arrays = list(chain(*call.everything.values()))
        with self.lock:
            bound, pointers = self._bound(call, arrays)
        adapter, device, _ = bound.place
        address = call.lr if SIMULATED or type(call.lr) is float else adapter.pointer(call.lr)
        with away(device.index) or nullcontext():
            with self.lock:
                tables, streams = self._tables(bound, pointers, arrays, stream)
            tables.launch(address, rates, arrays, streams)
        for i in bound.alone:
            self.one(*call.one(i), kernel, stream)
        return tuple(results.values())

    def _lists(self, given: Mapping[str, Any], out: Any) -> tuple[Lists, Lists]:
        """Return the given lists and the written ones, by their names in messages."""
        lists = {name: each for name, each in given.items() if each is not None}
        results = {name: lists[name] for name in SPEC.updates.values() if name in lists}
        if out is not None:
            names = [f"out {result}" for result, name in SPEC.updates.items() if name in lists]
            if not isinstance(out, (list, tuple)) or len(out) != len(names):
                raise ValueError(f"{self.op}: out is {out!r:.60}, expected {len(names)} lists: {', '.join(names)}")
            results = dict(zip(names, out, strict=True))
        for name, each in {**lists, **results}.items():
            if not isinstance(each, (list, tuple)):
                raise TypeError(f"{self.op}: {name} is a {type(each).__name__}, params is a list, expected a list")
        check_lengths(self.op, {**lists, **results})
        return lists, results

    def _bound(self, call: Call, arrays: list[Any]) -> tuple[Bound, Addresses]:
        """Return the call's Bound, cached or new, and its addresses. Raises the spec's errors."""
        adapter = adapter_of(arrays[0], self.op, "params[0]")
        try:
            pointers = adapter.pointers(arrays)
            lr = None if type(call.lr) is float else adapter.meta(call.lr)._replace(pointer=0)
            kind = (type(adapter), len(arrays), tuple(call.everything), lr, call.kernel)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            self._metas(call)  # its error names the array
            raise
        known = self.ready.get((pointers, kind))
        if known is not None and known.bound.fits(arrays):
            return known.bound, pointers
        origins = adapter.origins(arrays, pointers)
        for bound in self.bounds:
            if (bound.kind, bound.origins) == (kind, origins) and bound.fits(arrays):
                return bound, pointers
        bound = self._bind(call, kind, origins, arrays)
        self.bounds.append(bound)
        del self.bounds[:-MOST_KEPT]
        return bound, pointers

    def _tables(self, bound: Bound, pointers: Addresses, arrays: list[Any], stream: Any) -> tuple[Tables, Streams]:
        """Return the call's tables, cached or new, on the current GPU."""
        adapter, key = bound.place.adapter, (pointers, bound.kind)
        streams = streams_of(self.op, adapter, arrays, None if stream is None else stream_of(self.op, stream))
        known = self.ready.get(key)
        if known is None or known.bound is not bound or not known.tables.memory.is_written(streams):
            addresses = np.array(pointers, np.int64)
            check_apart(self.op, bound.names, addresses, bound.nbytes, bound.written, bound.source)
            latest = reversed(list(self.ready.values()))
            usable = (each.tables for each in latest if each.bound is bound and each.tables.memory.is_written(streams))
            tables = Tables(
                bound.groups, bound.names, addresses, bound.lr_on_device, bound.place, streams, next(usable, None)
            )
            known = Ready(bound, tables)
        self.ready.keep(key, known, streams, MOST_KEPT)
        return known.tables, streams

    def _bind(self, call: Call, kind: Hashable, origins: Hashable, arrays: Sequence[Any]) -> Bound:
        """Check a call by the spec, and divide its tensors into groups."""
        adapter, metas, lr = self._metas(call)
        problems = bind_list(self.op, {name: metas[name] for name in call.lists}, lr, call.params)
        first = metas["params"][0]
        device = of_array(self.op, "params[0]", first)
        number = {(name, i): k for k, (name, i) in enumerate((name, i) for name in metas for i in range(len(problems)))}
        groups: dict[Dtypes, list[int]] = {}
        alone = []
        for i, problem in enumerate(problems):
            if self._fits(call, i, problem, metas):
                if problem.N:
                    groups.setdefault(dtypes_of(problem), []).append(i)
            else:
                alone.append(i)

        def group(dtypes: Dtypes, members: Sequence[int]) -> Group:
            roles = [call.target(role) if role in SPEC.updates else role for role in array_names(problems[members[0]])]
            places = np.array([[number.get((role, i), -1) for role in roles] for i in members])
            return Group(
                dtypes, dense.config_of(dtypes, device, table=True), places, np.array([problems[i].N for i in members])
            )

        source = {number[f"out {result}", i]: number[name, i] for result, name, i in self._overwriting(call)}
        targets = {call.target(result) for result in SPEC.updates}
        return Bound(
            kind,
            origins,
            [list(each) for each in adapter.shapes(arrays)],
            Place(adapter, device, first.device),
            [group(dtypes, members) for dtypes, members in groups.items()],
            alone,
            [f"{name}[{i}]" for name, i in number],
            np.array([meta.nbytes for each in metas.values() for meta in each]),
            np.array([name in targets for name, _ in number]),
            np.array([source.get(k, k) for k in number.values()]),
            type(call.lr) is not float,
        )

    def _metas(self, call: Call) -> tuple[Adapter, dict[str, list[ArrayMeta]], ArrayMeta]:
        """Return adapter, metas and lr's meta. Raises TypeError for an array that is not of the first one's library."""
        one = call.lists["params"][0]
        adapter = adapter_of(one, self.op, "params[0]")
        metas: dict[str, list[ArrayMeta]] = {}
        for name, each in call.everything.items():
            metas[name] = []
            for i, array in enumerate(each):
                found = adapter_of(array, self.op, f"{name}[{i}]")
                if type(found) is not type(adapter):
                    mixed = f"{name}[{i}] is a {type(array).__qualname__}, params[0] a {type(one).__qualname__}"
                    raise TypeError(f"{self.op}: {mixed}, expected arrays of one library")
                try:
                    metas[name].append(found.meta(array))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{self.op}: {name}[{i}]: {error}") from None
        if type(call.lr) is float:
            return adapter, metas, number_meta(call.lr, self.op, "lr", LR_DTYPES)
        return adapter, metas, adapter_of(call.lr, self.op, "lr").meta(call.lr)

    def _fits(self, call: Call, i: int, problem: Problem, metas: Mapping[str, Sequence[ArrayMeta]]) -> bool:
        """Whether a tensor has a place in a table. Raises the spec's errors about written arrays.

        For a tensor without a place, it raises the errors of the operation on a single tensor.
        """
        wanted = problem.outputs()
        results = {result: metas[call.target(result)][i] for result in wanted}
        SPEC.bind_out(self.op, wanted, results, {result: f"{call.target(result)}[{i}]" for result in wanted})
        there = {**problem.arrays, **results}
        roles = [there[role] for role in array_names(problem) if role in there]
        if call.kernel in (None, "table") and dense.is_dense(roles):
            return True
        try:
            self.one.plan(*call.one(i), call.kernel)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise numbered(error, self.op, i) from None
        return False

    @staticmethod
    def _overwriting(call: Call) -> Iterator[tuple[str, str, int]]:
        """Yield (result, input, tensor) for each result in out=."""
        for result, name in SPEC.updates.items() if call.out else ():
            if name in call.lists:
                yield from ((result, name, i) for i in range(len(call.lists[name])))


@lru_cache(1000)
def _rates(op: str, betas: Any, weight_decay: Any) -> Rates:
    """Return the numbers of a step. Raises the spec's errors."""
    params = SPEC.normal_params(SPEC.params, {"betas": betas, "weight_decay": weight_decay}, op)
    return rates_of(params["betas"], params["weight_decay"])
