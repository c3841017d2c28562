"""Declare PTX instructions: text, types, section of the ISA manual, and the twin that the simulator runs.

    @instruction("(f32) -> f32", "ex2.approx.ftz.f32 {d}, {x};", section="9.7.3.21", pure=True)
    def ex2_approx_ftz(x):
        "2 ** x"
        return np.exp2(np.float32(x))

The decorated function is the twin. Its parameter names are the operands in the text; `{d}` (or `{d0}`, `{d1}`, ...) are
the results. In compiled kernels, the name is a Numba intrinsic that emits the text as inline assembly (`emitter`). A
signature consists of

    f32           a value: f32, f64, i32, i64, u32, u64, u16
    global[i64]   two parameters, a pointer and an index: the operand is the address of that element
    shared[i32]   two parameters, a shared array and an index: the operand is the 32-bit shared address
    f32[64]       a fragment: one parameter, a local array whose first 64 elements are operands, each in a register.
                  In the text, `{acc}` becomes the braced list `{r0, r1, ...}`
    u32[4][i32]   two parameters, a local array and an index: 4 elements, from that index on
    +f32[64]      a fragment that is read and written in place
    =f32[64]      a fragment that is only written
    imm[0..7]     an immediate: a constant in this range, which becomes part of the text; imm[24..256:8]: multiples of 8

For example, warpgroup products are

    @instruction("(+f32[64], u64, u64, i32) -> void", "{ .reg .pred p; setp.ne.b32 p, {scale_d}, 0; wgmma.mma_async
        .sync.aligned.m64n128k16.f32.bf16.bf16 {acc}, {a_desc}, {b_desc}, p, 1, 1, 0, 0; }", section="9.7.15.5.2")
    def wgmma_m64n128k16(acc, a_desc, b_desc, scale_d): ...

    @instruction("(+f32[64], imm[0..7]) -> void", "wgmma.wait_group.sync.aligned {pending};", section="9.7.15.7.3")
    def wgmma_wait_group(acc, pending): ...

The text of the second does not name `acc`. A text may omit operands that are read and written in place. A wait needs
`acc` as an operand, or the compiler could read its registers before the wait.

A fragment stays in registers if all its array's indices are constants after loops are unrolled: loops of constant
length, with indices that are sums of loop variables and constants. An immediate is a number in the kernel, or a plain
name that the kernel closes over; verbs may pass it on. Numba does not treat a Namespace's member or an expression as a
constant. Both kinds are checked. An array of another type, an index outside of it (in the simulator) and a number
outside of the range raise an error. It names instruction, operand, expected and given value.

A family makes an instruction for each combination of parameters, once:

    @family(n=range(8, 257, 8), dtype=("bf16", "f16"))
    def wgmma(n, dtype):
        "acc [64, n] += A [64, 16] @ B [16, n]"
        @instruction(f"(+f32[{n // 2}], ...", f"...m64n{n}k16.f32.{dtype}.{dtype} " "{acc}, ...", section=...,
                     name=f"wgmma_m64n{n}k16_f32_{dtype}")
        def product(acc, a_desc, b_desc, scale_d): ...
        return product

The function that builds a kernel gets a member by `mma = wgmma(BLOCK_N, "bf16")`. The kernel closes over it, or it is
put in a Namespace. RECORDS has every instruction that was made, FAMILIES every family. Sections are those of the PTX
ISA manual, release 9.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from itertools import product
from threading import RLock
from typing import Any, NoReturn, TypeVar

import numpy as np

from ..compiler.backend import SIMULATED
from ..simulator import Local
from .operands import Fragment, Immediate, Instruction, described, record_of

RECORDS: dict[str, Instruction] = {}
FAMILIES: dict[str, Family] = {}
Twin = TypeVar("Twin", bound=Callable[..., Any])


def instruction(
    signature: str, text: str, *, section: str, pure: bool = False, convergent: bool = False, name: str = ""
) -> Callable[[Twin], Twin]:
    """Declare an instruction; see the module's docstring.

    pure: the result depends only on the operands, so the compiler may move, merge or drop calls. Otherwise all calls
    stay, in order, and may read and write any memory. convergent: lanes depend on each other, so the compiler may not
    move a call into a branch. name: the instruction's name, for a member of a family; by default the twin's name.
    Raises TypeError if signature, text and twin do not fit together.
    """

    def declare(twin: Twin) -> Twin:
        record = record_of(name or twin.__name__, signature, text, section, pure, convergent, twin)
        if record.name in RECORDS:
            raise TypeError(f"{record.name} is declared twice")
        RECORDS[record.name] = record
        if SIMULATED:
            return _checked(record)
        from .emitter import intrinsic_of

        return intrinsic_of(record)

    return declare


class Family:
    """Makes one instruction for each combination of parameters. `domains`: the values that each parameter may have."""

    def __init__(self, make: Callable[..., Any], domains: dict[str, Iterable[Any]]):
        self.name, self.__doc__, self.domains = make.__name__, make.__doc__, domains
        self._make, self._made, self._lock = make, dict[tuple[Any, ...], Any](), RLock()
        self._signature = inspect.signature(make)
        if tuple(self._signature.parameters) != tuple(domains):
            raise TypeError(f"{self.name}: domains of {tuple(domains)}, for parameters {self._signature}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return the instruction of these parameters. Raises ValueError for a value outside of its domain."""
        bound = self._signature.bind(*args, **options)
        bound.apply_defaults()
        for parameter, value in bound.arguments.items():
            domain = self.domains[parameter]
            if value not in domain:
                text = described(domain) if isinstance(domain, range) else " or ".join(map(repr, domain))
                raise ValueError(f"{self.name}: {parameter} is {value!r}, expected {text}")
        chosen = tuple(bound.arguments.values())
        with self._lock:
            if chosen not in self._made:
                before = len(RECORDS)
                self._made[chosen] = self._make(*chosen)
                for name in list(RECORDS)[before:]:
                    RECORDS[name] = replace(RECORDS[name], family=self.name)
            return self._made[chosen]

    def every(self) -> list[tuple[Any, ...]]:
        """Return the parameters of every member."""
        return list(product(*self.domains.values()))


def family(**domains: Iterable[Any]) -> Callable[[Callable[..., Any]], Family]:
    """Decorator of a function that declares the instruction of its parameters; see the module's docstring."""

    def declare(make: Callable[..., Any]) -> Family:
        if make.__name__ in FAMILIES:
            raise TypeError(f"{make.__name__} is declared twice")
        FAMILIES[make.__name__] = made = Family(make, domains)
        return made

    return declare


_KINDS = {"f32": np.float32, "f64": np.float64, "u16": np.uint16, "i32": np.int32, "u32": np.uint32}
_KINDS |= {"i64": np.int64, "u64": np.uint64}


def _checked(record: Instruction) -> Any:
    """Return the twin with checks: it refuses fragments and immediates that can't be compiled, and bad indices."""
    places = {operand: record.parameters.index(operand.name) for operand in record.operands}
    immediates = [(operand, places[operand]) for operand in record.operands if isinstance(operand, Immediate)]
    fragments = [
        (operand, places[operand], _KINDS[operand.of], operand.count, operand.indexed)
        for operand in record.operands
        if isinstance(operand, Fragment)
    ]
    if not immediates and not fragments:
        return record.twin
    run = record.twin

    @wraps(run)
    def twin(*args: Any) -> Any:
        for immediate, place in immediates:
            immediate.check(record.name, args[place])
        for fragment, place, kind, count, indexed in fragments:
            array, index = args[place], args[place + 1] if indexed else 0
            if not (isinstance(array, Local) and array.kind is kind and 0 <= index <= len(array.values) - count):
                _refuse(record.name, fragment, array, index)
        return run(*args)

    return twin


def _refuse(instruction: str, fragment: Fragment, array: Any, index: int) -> NoReturn:
    kind = _KINDS[fragment.of]
    if not isinstance(array, Local) or array.kind is not kind:
        text = f"a local array of {array.kind.__name__}" if isinstance(array, Local) else repr(array)
        raise TypeError(f"{instruction}: {fragment.name} is {text}, expected a local array of {kind.__name__}")
    text = f"{fragment.count} from {index} on, of {len(array.values)}"
    raise IndexError(f"{instruction}: {fragment.name} is elements {text}")
