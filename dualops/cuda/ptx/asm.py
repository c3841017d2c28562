"""One instruction, one record: PTX text, types, section of the ISA manual, and the twin that the simulator runs.

    @instruction("(f32) -> f32", "ex2.approx.ftz.f32 {d}, {x};", section="9.7.3.21", pure=True)
    def ex2_approx_ftz(x):
        "2 ** x"
        return np.exp2(np.float32(x))

The decorated body is the twin; its parameter names are the operands of the text, `{d}` (or `{d0}`, `{d1}`, ...) the
results. Compiled, the name is a Numba intrinsic that emits the text as inline assembly: operands are numbered,
constraints derived and effects marked here and nowhere else. Types: f32, f64, i32, i64, u32, u64, u16, and

    global[i64]   two parameters, a pointer and an index: the operand is the address of that element
    shared[i32]   two parameters, a shared array and an index: the operand is the 32-bit shared address

ISA sections are those of the PTX ISA manual, release 9.0.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from llvmlite import ir
from numba.core import types

from ..backend import SIMULATED
from ..simulator import located


@dataclass(frozen=True)
class _Scalar:
    numba: Any
    llvm: ir.Type
    constraint: str


_SCALARS = {
    "f32": _Scalar(types.float32, ir.FloatType(), "f"),
    "f64": _Scalar(types.float64, ir.DoubleType(), "d"),
    "i32": _Scalar(types.int32, ir.IntType(32), "r"),
    "u32": _Scalar(types.uint32, ir.IntType(32), "r"),
    "i64": _Scalar(types.int64, ir.IntType(64), "l"),
    "u64": _Scalar(types.uint64, ir.IntType(64), "l"),
    "u16": _Scalar(types.uint16, ir.IntType(16), "h"),
}
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_ADDRESSES = {"global[i64]": _I64, "shared[i32]": _I32}


@dataclass(frozen=True)
class Instruction:
    """What is known of an instruction."""

    name: str
    text: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    section: str
    pure: bool
    convergent: bool
    operands: tuple[str, ...]  # names of the text's inputs, one for each of `takes`
    parameters: tuple[str, ...]  # names of the Python parameters
    twin: Callable[..., Any]


RECORDS: dict[str, Instruction] = {}
Twin = TypeVar("Twin", bound=Callable[..., Any])


def instruction(
    signature: str, text: str, *, section: str, pure: bool = False, convergent: bool = False
) -> Callable[[Twin], Twin]:
    """Declare an instruction; see the module's docstring.

    pure: the result depends on the operands alone, so that calls may be moved, merged or dropped. Otherwise calls stay,
    in order. convergent: lanes depend on one another, so that a call may not be moved into a branch.
    Raises TypeError where signature, text and twin do not fit together.
    """

    def declare(twin: Twin) -> Twin:
        record = _record(signature, text, section, pure, convergent, twin)
        if record.name in RECORDS:
            raise TypeError(f"{record.name} is declared twice")
        RECORDS[record.name] = record
        return twin if SIMULATED else _intrinsic(record)

    return declare


def _record(
    signature: str, text: str, section: str, pure: bool, convergent: bool, twin: Callable[..., Any]
) -> Instruction:
    name = twin.__name__
    takes, gives = (tuple(re.findall(r"\w+(?:\[\w+\])?", side)) for side in signature.split("->"))
    gives = () if gives == ("void",) else gives
    parameters = tuple(inspect.signature(twin).parameters)
    operands, place = [], 0
    for kind in takes:
        if kind not in _SCALARS and kind not in _ADDRESSES:
            raise TypeError(f"{name}: {kind} is no operand type, expected one of {', '.join([*_SCALARS, *_ADDRESSES])}")
        if place >= len(parameters):
            raise TypeError(f"{name}: {len(takes)} operands {takes}, the twin has parameters {parameters}")
        operands.append(parameters[place])
        place += 2 if kind in _ADDRESSES else 1
    if place != len(parameters):
        raise TypeError(f"{name}: operands {takes} need {place} parameters, the twin has {parameters}")
    results = ["d"] if len(gives) == 1 else [f"d{i}" for i in range(len(gives))]
    named = set(re.findall(r"\{(\w+)\}", text))
    if named != {*operands, *results}:
        raise TypeError(f"{name}: the text names {sorted(named)}, expected {sorted({*operands, *results})}")
    if not _has_body(twin):
        raise TypeError(f"{name}: no twin, expected a body that computes it in Python")
    return Instruction(name, text, takes, gives, section, pure, convergent, tuple(operands), parameters, twin)


def _has_body(twin: Callable[..., Any]) -> bool:
    """Whether a function does more than carry a docstring and return None."""

    def nothing() -> None:
        """Only a docstring."""

    returned = {constant for constant in twin.__code__.co_consts if constant != twin.__doc__}
    return twin.__code__.co_code != nothing.__code__.co_code or returned != {None}


def _intrinsic(record: Instruction) -> Any:
    from numba.cuda.extending import intrinsic

    results = [_SCALARS[kind] for kind in record.gives]
    if not results:
        returns = types.void
    else:
        returns = results[0].numba if len(results) == 1 else types.Tuple([result.numba for result in results])
    llvm_result: ir.Type = ir.VoidType()
    if results:
        llvm_result = results[0].llvm if len(results) == 1 else ir.LiteralStructType([r.llvm for r in results])
    asm_types = [_ADDRESSES.get(kind) or _SCALARS[kind].llvm for kind in record.takes]
    constraints = [f"={result.constraint}" for result in results]
    for kind, asm_type in zip(record.takes, asm_types, strict=True):
        address = "l" if asm_type == _I64 else "r"
        constraints.append(address if kind in _ADDRESSES else _SCALARS[kind].constraint)
    numbers = {name: f"${i}" for i, name in enumerate([*_result_names(record), *record.operands])}
    text = re.sub(r"\{(\w+)\}", lambda match: numbers[match[1]], record.text)
    attributes = ("nounwind", "readnone") if record.pure else ("nounwind", "convergent") if record.convergent else ()
    body = ir.InlineAsm(
        ir.FunctionType(llvm_result, asm_types), text, ",".join(constraints), side_effect=not record.pure
    )

    def typing(context: Any, *arguments: Any) -> Any:
        signature = returns(*_argument_types(record, arguments))

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            operands, rest = [], list(zip(signature.args, values, strict=True))
            for kind in record.takes:
                numba_type, value = rest.pop(0)
                if kind == "global[i64]":
                    address = builder.gep(value, [rest.pop(0)[1]])
                    operands.append(builder.ptrtoint(address, _I64))
                elif kind == "shared[i32]":
                    # in 32 bits, of which shared memory needs no more: else its addresses are computed in 64
                    array = context.make_array(numba_type)(context, builder, value)
                    there = ir.PointerType(array.data.type.pointee, addrspace=3)
                    first = builder.ptrtoint(builder.addrspacecast(array.data, there, "addrspacecast"), _I32)
                    distance = builder.mul(rest.pop(0)[1], _I32(numba_type.dtype.bitwidth // 8))
                    operands.append(builder.add(first, distance))
                else:
                    operands.append(value)
            result = builder.call(body, operands, attrs=attributes)
            if not results:
                return context.get_dummy_value()
            if len(results) == 1:
                return result
            return context.make_tuple(
                builder, signature.return_type, [builder.extract_value(result, i) for i in range(len(results))]
            )

        return signature, generate

    typing.__name__ = record.name
    typing.__doc__ = record.twin.__doc__
    names = ("context", *record.parameters)
    parameter = inspect.Parameter
    typing.__signature__ = inspect.Signature([parameter(name, parameter.POSITIONAL_OR_KEYWORD) for name in names])
    return intrinsic(typing)


def _result_names(record: Instruction) -> list[str]:
    return ["d"] if len(record.gives) == 1 else [f"d{i}" for i in range(len(record.gives))]


def _argument_types(record: Instruction, arguments: tuple[Any, ...]) -> list[Any]:
    """Numba types that the call's arguments are cast to."""
    wanted, rest = [], list(arguments)
    for kind in record.takes:
        given = rest.pop(0)
        if kind in _ADDRESSES:
            wanted += [given, types.int64 if kind == "global[i64]" else types.int32]
            rest.pop(0)
        else:
            wanted.append(_SCALARS[kind].numba)
    return wanted


def array_at(element: Any) -> Callable[..., Any]:
    """What makes an array of `element`, a Numba scalar type, out of the address of its first one in global memory.

    No instruction: compiled, it is the same 64 bits. In the simulator it is the array of the launch that lies there.
    """
    if SIMULATED:
        return located
    from numba.cuda.extending import intrinsic

    def array_at(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            generic = context.get_value_type(signature.return_type)
            in_global = ir.PointerType(generic.pointee, addrspace=1)
            return builder.addrspacecast(builder.inttoptr(values[0], in_global), generic)

        return types.CPointer(element)(types.int64), generate

    return intrinsic(array_at)


def _store_words() -> Callable[..., None]:
    """What writes a tuple of int64 to an array of them, from `index` on: (array, index, words).

    A store for each word, since a tuple that is indexed by a variable becomes a chain of comparisons.
    """
    if SIMULATED:

        def store_each(array: Any, index: int, words: tuple[int, ...]) -> None:
            for k, word in enumerate(words):
                array[index + k] = word

        return store_each
    from numba.cuda.extending import intrinsic

    def store_words(context: Any, array: Any, index: Any, words: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            start = builder.gep(values[0], [values[1]])
            for k in range(len(words)):
                builder.store(builder.extract_value(values[2], k), builder.gep(start, [_I64(k)]))
            return context.get_dummy_value()

        return types.void(array, types.int64, words), generate

    return intrinsic(store_words)


store_words = _store_words()
