"""Verbs that are called: each is compiled once for the types of its arguments, and NVVM inlines it at every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir as llvm
from numba.core import types
from numba.core.errors import TypingError
from numba.cuda.compiler import compile_extra
from numba.cuda.core.callconv import CUDACABICallConv
from numba.cuda.core.targetconfig import ConfigStack
from numba.cuda.descriptor import cuda_target
from numba.cuda.typing.templates import make_concrete_template

from .cycles import untie_module
from .passes import Compiler

CALL = "_dualops_call"  # a function's attribute
# of the kernel that is compiled: verb, types of its arguments -> Numba's result
MADE: dict[tuple[Any, ...], Any] = {}


@contextmanager
def calls_of_a_kernel() -> Iterator[None]:
    """Inside the with statement one kernel is compiled, with the functions that it calls."""
    try:
        yield
    finally:
        for made in MADE.values():
            cuda_target.target_context.remove_user_function(made.fndesc)
            untie_module(made.library)
        MADE.clear()


class ByValue(CUDACABICallConv):
    """Arguments and result are values of LLVM, tuples too; no status is returned. A name counts functions."""

    def mangler(self, name: str, argtypes: Any, *, abi_tags: Any = None, uid: Any = None) -> str:
        return f"{super().mangler(name, argtypes)}_{len(MADE)}"

    def get_function_type(self, restype: Any, argtypes: Any) -> Any:
        result, *given = map(self.context.get_value_type, (restype, *argtypes))
        return llvm.FunctionType(result, given)

    def decode_arguments(self, builder: Any, argtypes: Any, func: Any) -> Any:
        return func.args

    def decorate_function(self, fn: Any, args: Any, fe_argtypes: Any, noalias: bool = False) -> None:
        fn.attributes.add("alwaysinline")

    def call_function(self, builder: Any, callee: Any, resty: Any, argtys: Any, args: Any) -> tuple[None, Any]:
        return None, builder.call(callee, args)

    def return_user_exc(self, builder: Any, *args: Any, **options: Any) -> None:
        builder.unreachable()


class Call:
    """A device function, in the form that Numba's compiler expects."""

    is_compiling = False

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    @property
    def _numba_type_(self) -> types.Type:
        return types.Dispatcher(self)

    def get_call_template(self, args: Any, kws: Any) -> tuple[Any, ...]:
        made = _compiled(self.function, tuple(map(types.unliteral, args)))
        name = self.function.__name__
        return make_concrete_template(name, key=name, signatures=[made.signature]), None, args, kws

    def get_overload(self, args: Any) -> Any:
        return _compiled(self.function, args).fndesc


def call_of(function: Callable[..., Any]) -> Call:
    """Return the function's own `Call`, which lives as long as it does."""
    made = vars(function).get(CALL)
    if made is None or made.function is not function:
        made = Call(function)
        setattr(function, CALL, made)
    return made


def _compiled(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    found = MADE.get((function, args))
    if found is None:
        typing, target, flags = cuda_target.typing_context, cuda_target.target_context, ConfigStack().top().copy()
        convention = {"pipeline_class": Compiler, "call_conv": ByValue(target)}
        found = compile_extra(typing, target, function, args, None, flags, {}, **convention)
        result = found.signature.return_type
        if not _is_value(result):
            raise TypingError(f"{function.__name__} is called, and returns {result}, expected numbers")
        found.library.finalize()
        target.insert_user_function(found.fndesc, found.fndesc, [found.library])
        MADE[function, args] = found
    return found


def _is_value(kind: Any) -> bool:
    """Whether it is None, a number, or a tuple of such: no array, which would be on the stack of what has returned."""
    if isinstance(kind, types.BaseTuple):
        return all(map(_is_value, kind))  # pyright: ignore[reportArgumentType]
    return isinstance(kind, (types.Number, types.Boolean, types.NoneType))
