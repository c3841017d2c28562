"""Emit inline assembly from an instruction's record.

Only this module numbers operands, derives constraints, ties registers that are read and written, and marks effects.

Operands are numbered in this order: outputs (results, then registers of fragments that are written), inputs, then the
old values of tied registers, whose constraint is the number of their output.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import types
from numba.core.errors import TypingError

from .operands import ADDRESSES, CONSTRAINTS, Address, Fragment, Immediate, Instruction

I32, I64 = ir.IntType(32), ir.IntType(64)
LLVM = {"f32": ir.FloatType(), "f64": ir.DoubleType(), "u16": ir.IntType(16)}
LLVM |= {"i32": I32, "u32": I32, "i64": I64, "u64": I64, "global[i64]": I64, "shared[i32]": I32}
NUMBA = {"f32": types.float32, "f64": types.float64, "u16": types.uint16}
NUMBA |= {"i32": types.int32, "u32": types.uint32, "i64": types.int64, "u64": types.uint64}


class Assembly(NamedTuple):
    """The inline assembly of an instruction, shared by all its calls."""

    outputs: list[ir.Type]
    inputs: list[ir.Type]
    constraints: str
    numbers: dict[str, str]  # name in the text -> operand numbers


def intrinsic_of(record: Instruction) -> Any:
    """Return the Numba intrinsic that emits an instruction."""
    from numba.cuda.extending import intrinsic

    assembly = _assembly(record)
    attributes = ("nounwind", "readnone") if record.pure else ("nounwind", "convergent") if record.convergent else ()
    results = [NUMBA[kind] for kind in record.gives]
    returns = types.Tuple(results) if len(results) > 1 else (*results, types.void)[0]
    outputs = assembly.outputs
    given: ir.Type = ir.VoidType()
    if outputs:
        given = outputs[0] if len(outputs) == 1 else ir.LiteralStructType(outputs)

    def typing(context: Any, *arguments: Any) -> Any:
        wanted = _argument_types(record, arguments)
        constants = {
            operand.name: str(wanted[record.parameters.index(operand.name)].literal_value)
            for operand in record.operands
            if isinstance(operand, Immediate)
        }
        numbers = assembly.numbers | constants
        text = re.sub(r"\{(\w+)\}", lambda match: numbers[match[1]], record.text)
        function = ir.FunctionType(given, assembly.inputs)
        body = ir.InlineAsm(function, text, assembly.constraints, side_effect=not record.pure)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            inputs, places = _operands(record, context, builder, signature.args, values)
            outcome = builder.call(body, inputs, attrs=attributes)
            made = [outcome] if len(outputs) == 1 else [builder.extract_value(outcome, i) for i in range(len(outputs))]
            for value, place in zip(made[len(results) :], places, strict=True):
                builder.store(value, place)
            if not results:
                return context.get_dummy_value()
            if len(results) == 1:
                return made[0]
            return context.make_tuple(builder, signature.return_type, made[: len(results)])

        return returns(*wanted), generate

    typing.__name__ = record.name
    typing.__doc__ = record.twin.__doc__
    names = ("context", *record.parameters)
    parameter = inspect.Parameter
    typing.__signature__ = inspect.Signature([parameter(name, parameter.POSITIONAL_OR_KEYWORD) for name in names])
    return intrinsic(typing)


def _assembly(record: Instruction) -> Assembly:
    fragments = [operand for operand in record.operands if isinstance(operand, Fragment)]
    outputs, numbers = list(record.gives), {name: f"${i}" for i, name in enumerate(record.results)}
    inputs, ties = [], []
    for fragment in fragments:
        if fragment.written:
            numbers[fragment.name] = _registers(len(outputs), fragment.count)
            ties += range(len(outputs), len(outputs) + fragment.count) if fragment.tied else ()
            outputs += [fragment.of] * fragment.count
    for operand in record.operands:
        here = len(outputs) + len(inputs)
        if isinstance(operand, Fragment):
            if not operand.written:
                numbers[operand.name] = _registers(here, operand.count)
                inputs += [operand.of] * operand.count
        elif not isinstance(operand, Immediate):
            numbers[operand.name] = f"${here}"
            inputs.append(operand.kind)
    letters = CONSTRAINTS | ADDRESSES
    constraints = [*(f"={letters[kind]}" for kind in outputs), *(letters[kind] for kind in inputs), *map(str, ties)]
    types_of = [LLVM[kind] for kind in [*inputs, *(outputs[tie] for tie in ties)]]
    return Assembly([LLVM[kind] for kind in outputs], types_of, ",".join(constraints), numbers)


def _registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"


def _operands(
    record: Instruction, context: Any, builder: Any, arguments: Sequence[Any], values: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the arguments of the assembly, and the addresses for its outputs after the results."""
    inputs, tied, places = [], [], []
    rest = iter(zip(arguments, values, strict=True))
    for operand in record.operands:
        numba_type, value = next(rest)
        if isinstance(operand, Address):
            inputs.append(_address(operand.kind, context, builder, numba_type, value, next(rest)[1]))
        elif isinstance(operand, Fragment):
            index = next(rest)[1] if operand.indexed else I32(0)
            data = _data(context, builder, numba_type, value)
            registers = [builder.gep(data, [builder.add(index, I32(i))]) for i in range(operand.count)]
            if operand.read:
                (tied if operand.written else inputs).extend(builder.load(each) for each in registers)
            if operand.written:
                places += registers
        elif not isinstance(operand, Immediate):
            inputs.append(value)
    return [*inputs, *tied], places


def _address(kind: str, context: Any, builder: Any, numba_type: Any, value: Any, index: Any) -> Any:
    if kind == "global[i64]":
        return builder.ptrtoint(builder.gep(value, [index]), I64)
    # in 32 bits, which are enough for shared memory; otherwise addresses would be computed in 64
    data = _data(context, builder, numba_type, value)
    there = ir.PointerType(data.type.pointee, addrspace=3)
    first = builder.ptrtoint(builder.addrspacecast(data, there, "addrspacecast"), I32)
    return builder.add(first, builder.mul(index, I32(numba_type.dtype.bitwidth // 8)))


def _data(context: Any, builder: Any, numba_type: Any, value: Any) -> Any:
    """Return the address of an array's first element, by one instruction; Numba's `make_array` needs a dozen."""
    return builder.extract_value(value, context.data_model_manager[numba_type].get_field_position("data"))


def _argument_types(record: Instruction, arguments: Sequence[Any]) -> list[Any]:
    """Return the Numba types to which the arguments are cast. Raises TypingError if that is impossible."""
    wanted: list[Any] = []
    rest: Iterator[Any] = iter(arguments)
    for operand in record.operands:
        given = next(rest)
        if isinstance(operand, Address):
            wanted += [given, types.int64 if operand.kind == "global[i64]" else types.int32]
            next(rest)
        elif isinstance(operand, Fragment):
            of = NUMBA[operand.of]
            if not isinstance(given, types.Array) or (given.dtype, given.ndim, given.layout) != (of, 1, "C"):
                raise TypingError(f"{record.name}: {operand.name} is {given}, expected a local array of {of}")
            wanted.append(given)
            if operand.indexed:
                next(rest)
                wanted.append(types.int32)
        elif isinstance(operand, Immediate):
            if not isinstance(given, types.IntegerLiteral):
                operand.check(record.name, f"{given} and no constant", TypingError)
            operand.check(record.name, given.literal_value, TypingError)
            wanted.append(given)
        else:
            wanted.append(NUMBA[operand.kind])
    return wanted
