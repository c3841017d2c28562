"""Where a kernel waits, signals and copies: found in the kernel's functions, and watched while the simulator runs it.

In the simulator a kernel is a plain function, which reaches nouns (objects) and verbs (their functions) by its closure
and its module's names. `watched` copies it so that each step of its protocol first calls the current `Watch`. Steps are
instructions that return nothing and concern an mbarrier or no memory at all (barriers, fences), the block's barriers,
and verbs that number copies or stages. Functions shared with other kernels are copied, never changed.

A `Site` identifies a step by the calls that lead to it from the kernel. So a verb that is called twice has two sites.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CellType, CodeType, FunctionType
from typing import Any
from unittest import mock

from dualops.cuda import simulator
from dualops.cuda.compiler.backend import Noun, cuda
from dualops.cuda.ptx import asm, async_copy, mbarrier, warp
from dualops.cuda.ptx.operands import Address

assert async_copy and mbarrier and warp  # importing them fills RECORDS

# names of verbs' parameters that number copies, stages or rows: one more is the number of another one
NUMBERS = ("i", "stage", "row_round", "phase")
# instructions that only hint, and do not change results
HINTS = ("prefetch_tensormap", "settle", "settle_bits", "griddepcontrol_launch_dependents")


@dataclass(frozen=True)
class Site:
    """A step of a kernel's protocol."""

    kernel: CodeType
    calls: tuple[tuple[CodeType, int], ...]  # (code, offset in it), from the kernel's own to the step's
    step: str  # the instruction's or the verb's name

    def __str__(self) -> str:
        verbs = [_short(code.co_qualname) for code, _ in self.calls[1:]]
        return " > ".join([*verbs, self.step])

    @property
    def line(self) -> int:
        """The line in the kernel."""
        code, at = self.calls[0]
        return list(code.co_positions())[at // 2][0] or code.co_firstlineno


def _short(name: str) -> str:
    return name.replace(".<locals>", "")


@dataclass
class Seen:
    """The operands of a step's calls while the unchanged kernel ran."""

    parameters: tuple[str, ...]
    verb: bool
    calls: list[dict[str, Any]] = field(default_factory=list)

    def values(self, name: str) -> list[Any]:
        return [call[name] for call in self.calls]


# (site, its operands by name): other operands, or None to leave the step out
Change = Callable[[dict[str, Any]], dict[str, Any] | None]


class Watch:
    """Watches the steps of kernels: records all of them, or changes one."""

    def __init__(self, kernels: set[str], site: Site | None = None, change: Change | None = None):
        self.kernels, self.site, self.change = kernels, site, change
        self.seen: dict[Site, Seen] | None = None if site else {}
        self.acted = False  # an operand was changed, or the step was left out

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Inside the with statement, launches of these kernels are watched."""
        global _watch
        launch, before = simulator.launch, _watch

        def of_copy(function: FunctionType, *args: Any, **options: Any) -> None:
            launch(watched(function) if function.__name__ in self.kernels else function, *args, **options)

        _watch = self
        try:
            with mock.patch.object(simulator, "launch", of_copy):
                yield
        finally:
            _watch = before

    def operands(self, site: Site, parameters: tuple[str, ...], args: tuple[Any, ...], verb: bool) -> Any:
        """Return the operands for the step; None if it is left out."""
        if self.seen is not None:
            calls = self.seen.setdefault(site, Seen(parameters, verb)).calls
            calls.append(dict(zip(parameters, args, strict=True)))
        if site != self.site or self.change is None:
            return args
        given = dict(zip(parameters, args, strict=True))
        changed = self.change(dict(given))
        if changed is None:
            self.acted = True
            return None
        self.acted |= any(changed[name] is not given[name] and changed[name] != given[name] for name in given)
        return tuple(changed.values())


_watch = Watch(set())


@cache
def watched(function: FunctionType) -> FunctionType:
    """Return a copy of the kernel with its steps watched."""
    return _Copies(function).of(function)


def steps(function: FunctionType) -> set[tuple[str, str]]:
    """Return (function, instruction) of every step that a kernel can reach, in no order; empty if it never waits.

    Verbs that no code looks up are left out.
    """
    copies = _Copies(function)
    copies.of(function)
    return {
        (function, step)
        for function, step in copies.found
        if function not in copies.members or copies.members[function] in copies.asked
    }


class _Copies:
    """Copies the functions of a kernel that reach a step; the others are unchanged."""

    def __init__(self, kernel: FunctionType):
        self.kernel = kernel.__code__
        self.found: set[tuple[str, str]] = set()
        self.members: dict[str, str] = {}  # function -> its name in a noun
        self.asked: set[str] = set()  # names that any function's code looks up
        self.made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        if id(value) not in self.made:
            self.made[id(value)] = value  # while it is copied
            self.made[id(value)] = self._copy(value)
        return self.made[id(value)]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            record = _record_of(value)
            if record is None:
                return self._function(value)
            return _observed(value, record.name, self.kernel, verb=False) if _is_step(record) else value
        if isinstance(value, Noun):
            members = value.members()
            self.members |= {_short(f.__qualname__): name for name, f in members.items() if isinstance(f, FunctionType)}
            changed = {name: copy for name, member in members.items() if (copy := self.of(member)) is not member}
            return value.but(**changed) if changed else value
        if isinstance(value, tuple):
            copies = tuple(map(self.of, value))
            if all(one is two for one, two in zip(copies, value, strict=True)):
                return value
            return type(value)(*copies) if hasattr(value, "_fields") else copies
        return value

    def _function(self, function: FunctionType) -> FunctionType:
        names = _names(function.__code__)
        self.asked |= names
        reached = {name: function.__globals__[name] for name in names if name in function.__globals__}
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        captured = {name: cell.cell_contents for name, cell in cells.items() if _filled(cell)}
        changed = {}
        for name, value in (reached | captured).items():
            if value is cuda and names & _CudaWatched.STEPS:
                changed[name] = _CudaWatched(self.kernel)
                self.found |= {(_short(function.__qualname__), step) for step in names & _CudaWatched.STEPS}
            elif (copy := self.of(value)) is not value:
                changed[name] = copy
                if isinstance(value, FunctionType) and (record := _record_of(value)):
                    self.found.add((_short(function.__qualname__), record.name))
        if not changed:
            return function
        closure = tuple(CellType(changed[name]) if name in changed else cell for name, cell in cells.items())
        copy = FunctionType(
            function.__code__,
            {**function.__globals__, **{name: value for name, value in changed.items() if name in reached}},
            function.__name__,
            function.__defaults__,
            closure,
        )
        numbered = function.__code__ is not self.kernel and set(inspect.signature(function).parameters) & {*NUMBERS}
        return _observed(copy, _short(function.__qualname__), self.kernel, verb=True) if numbered else copy


def _names(code: CodeType) -> set[str]:
    """Return all names that code, and the code inside it, looks up."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *code.co_freevars}.union(*inner)


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_step(record: asm.Instruction) -> bool:
    """Whether an instruction is a step of a protocol: it returns nothing, and concerns an mbarrier or no memory."""
    if record.name in HINTS:
        return False
    at_a_barrier = any(operand.name == "bar" for operand in record.operands)
    in_memory = any(isinstance(operand, Address) for operand in record.operands)
    return not record.gives and (at_a_barrier or not in_memory)


def _record_of(function: FunctionType) -> asm.Instruction | None:
    """Return the instruction whose twin (its simulation) this function is; also a member of a family built so far."""
    if len(_TWINS) < len(asm.RECORDS):
        _TWINS.update((id(record.twin), name) for name, record in asm.RECORDS.items())
    name = _TWINS.get(id(inspect.unwrap(function)))
    return asm.RECORDS[name] if name else None


_TWINS: dict[int, str] = {}  # twin, by its id -> the instruction's name
_WAITS = _record_of(mbarrier.mbarrier_wait)
if _WAITS is None or not _is_step(_WAITS):
    raise AssertionError("a wait at an mbarrier is no step of a protocol: there would be no mutants")


def _observed(function: Any, step: str, kernel: CodeType, verb: bool) -> Any:
    """Return the function, called with the operands from the watch."""
    parameters = tuple(inspect.signature(function).parameters)

    def observed(*args: Any) -> Any:
        if _elsewhere(step):
            return function(*args)
        operands = _watch.operands(_site(kernel, step), parameters, args, verb)
        return None if operands is None else function(*operands)

    return observed


_OBSERVED = next(inner for inner in _observed.__code__.co_consts if isinstance(inner, CodeType))
_SITES: dict[tuple[Any, ...], Site] = {}


def _elsewhere(step: str) -> bool:
    """Whether the watch is for a step of another name, or at another place."""
    site = _watch.site
    if site is None:
        return False
    if step != site.step:
        return True
    frame = sys._getframe(2)
    code, at = site.calls[-1]
    return frame.f_lasti != at or frame.f_code is not code


def _site(kernel: CodeType, step: str) -> Site:
    """Return the site of the current step. Code is compared by its id, since its hash reads all its constants."""
    frame: Any = sys._getframe(2)
    calls = []
    key: list[Any] = [step]
    while True:
        code = frame.f_code
        if code is not _OBSERVED:
            calls.append((code, frame.f_lasti))
            key += (id(code), frame.f_lasti)
            if code is kernel:
                break
        frame = frame.f_back
    known = tuple(key)
    if known not in _SITES:
        _SITES[known] = Site(kernel, tuple(reversed(calls)), step)
    return _SITES[known]


class _CudaWatched(type(cuda)):
    """`cuda` for a kernel with block barriers."""

    STEPS = frozenset({"syncthreads", "syncthreads_or"})

    def __init__(self, kernel: CodeType):
        self.kernel = kernel

    blockDim = property(lambda self: cuda.blockDim)
    gridDim = property(lambda self: cuda.gridDim)

    def syncthreads(self) -> None:
        if _elsewhere("syncthreads") or _watch.operands(_site(self.kernel, "syncthreads"), (), (), False) is not None:
            cuda.syncthreads()

    def syncthreads_or(self, predicate: Any) -> int:
        if _elsewhere("syncthreads_or"):
            return cuda.syncthreads_or(predicate)
        operands = _watch.operands(_site(self.kernel, "syncthreads_or"), ("predicate",), (predicate,), False)
        return int(bool(predicate)) if operands is None else cuda.syncthreads_or(*operands)
