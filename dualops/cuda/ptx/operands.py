"""The operands of an instruction, and its record. `asm` declares instructions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# types of registers, and their letters in inline assembly
CONSTRAINTS = {"f32": "f", "f64": "d", "i32": "r", "u32": "r", "i64": "l", "u64": "l", "u16": "h"}
ADDRESSES = {"global[i64]": "l", "shared[i32]": "r"}
KNOWN = ", ".join([*CONSTRAINTS, *ADDRESSES, "f32[4]", "f32[4][i32]", "imm[0..7]", "imm[8..256:8]"])


@dataclass(frozen=True)
class Operand:
    """A value, in one register."""

    name: str  # its name in the text, and the twin's parameter
    kind: str  # its text in the signature

    @property
    def parameters(self) -> int:
        """Return the number of the twin's parameters for this operand."""
        return 1


class Address(Operand):
    """The address of an array's element: an array and an index."""

    @property
    def parameters(self) -> int:
        return 2


@dataclass(frozen=True)
class Fragment(Operand):
    """Consecutive elements of a local array, each in a register."""

    of: str  # type of the registers
    count: int
    read: bool
    written: bool
    indexed: bool  # whether the twin has the first element's index as a parameter; else it is 0

    @property
    def parameters(self) -> int:
        return 1 + self.indexed

    @property
    def tied(self) -> bool:
        """Return whether the registers are read and written in place."""
        return self.read and self.written


@dataclass(frozen=True)
class Immediate(Operand):
    """A number that is part of the text."""

    domain: range

    def check(self, instruction: str, value: Any, error: type[Exception] = ValueError) -> int:
        """Return the value. Raises `error` if it is not in the domain."""
        if isinstance(value, int) and value in self.domain:
            return value
        raise error(f"{instruction}: {self.name} is {value}, expected a constant {described(self.domain)}")


def described(domain: range) -> str:
    """Describe a range as text."""
    return f"from {domain[0]} to {domain[-1]}" + (f" in steps of {domain.step}" if domain.step > 1 else "")


@dataclass(frozen=True)
class Instruction:
    """The record of an instruction."""

    name: str
    family: str  # the family's name; the instruction's own if it has no family
    text: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    section: str
    pure: bool
    convergent: bool
    operands: tuple[Operand, ...]  # one for each of `takes`
    parameters: tuple[str, ...]  # names of the Python parameters
    twin: Callable[..., Any]

    @property
    def results(self) -> tuple[str, ...]:
        """Return the names of the results in the text."""
        return ("d",) if len(self.gives) == 1 else tuple(f"d{i}" for i in range(len(self.gives)))


def record_of(
    name: str, signature: str, text: str, section: str, pure: bool, convergent: bool, twin: Callable[..., Any]
) -> Instruction:
    """Return the record. Raises TypeError if signature, text and twin do not fit together."""
    takes, gives = (tuple(re.findall(r"[+=]?\w+(?:\[[^]]*\])*", side)) for side in signature.split("->"))
    gives = () if gives == ("void",) else gives
    parameters = tuple(inspect.signature(twin).parameters)
    operands, place = [], 0
    for kind in takes:
        operand = _operand(name, kind, parameters[place] if place < len(parameters) else "")
        if place >= len(parameters):
            raise TypeError(f"{name}: {len(takes)} operands {takes}, the twin has parameters {parameters}")
        operands.append(operand)
        place += operand.parameters
    if place != len(parameters):
        raise TypeError(f"{name}: operands {takes} need {place} parameters, the twin has {parameters}")
    for kind in gives:
        if kind not in CONSTRAINTS:
            raise TypeError(f"{name}: {kind} is no type of a result, expected one of {', '.join(CONSTRAINTS)}")
    if not _has_body(twin):
        raise TypeError(f"{name}: no twin, expected a body that computes it in Python")
    record = Instruction(name, name, text, takes, gives, section, pure, convergent, tuple(operands), parameters, twin)
    _check_text(record)
    return record


def _operand(instruction: str, kind: str, name: str) -> Operand:
    if kind in CONSTRAINTS:
        return Operand(name, kind)
    if kind in ADDRESSES:
        return Address(name, kind)
    if found := re.fullmatch(r"([+=]?)(\w+)\[(\d+)\](\[i32\])?", kind):
        way, of, count, indexed = found.groups()
        if of in CONSTRAINTS and int(count):
            return Fragment(name, kind, of, int(count), way != "=", way != "", bool(indexed))
    if found := re.fullmatch(r"imm\[(\d+)\.\.(\d+)(?::(\d+))?\]", kind):
        first, last, step = (int(each or 1) for each in found.groups())
        if first <= last and step and not (last - first) % step:
            return Immediate(name, kind, range(first, last + 1, step))
    raise TypeError(f"{instruction}: {kind} is no operand type, expected one of {KNOWN}")


def _check_text(record: Instruction) -> None:
    """Check that the text names every operand and result, except registers that only a wait must carry."""
    named = set(re.findall(r"\{(\w+)\}", record.text))
    expected = {*record.results, *(operand.name for operand in record.operands)}
    carried = {operand.name for operand in record.operands if isinstance(operand, Fragment) and operand.tied}
    if named | carried != expected:
        raise TypeError(f"{record.name}: the text names {sorted(named)}, expected {sorted(expected)}")


def _has_body(twin: Callable[..., Any]) -> bool:
    """Return whether a function has code in addition to its docstring."""

    def nothing() -> None:
        """Only a docstring."""

    returned = {constant for constant in twin.__code__.co_consts if constant != twin.__doc__}
    return twin.__code__.co_code != nothing.__code__.co_code or returned != {None}
