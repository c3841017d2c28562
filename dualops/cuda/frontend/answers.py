"""What Numba asks about types over and over: the signature of a call with given types, to infer and to lower."""

# numba-cuda takes the place of numba's own `numba.cuda` when Python runs, which pyright does not see:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from functools import cache
from typing import Any

from numba.core import types
from numba.cuda.compiler import CUDANativeLowering
from numba.cuda.core.typed_passes import NopythonTypeInference
from numba.cuda.target import CUDATypingContext

from .passes import instead_of


@instead_of(NopythonTypeInference)
class KnownTypes(NopythonTypeInference):
    """With a typing context that remembers its answers."""

    def run_pass(self, state: Any) -> bool:
        asked = state.typingctx
        state.typingctx = remembering(asked)
        try:
            return super().run_pass(state)
        finally:
            state.typingctx = asked


# (function, types of its arguments, options) -> signature
ANSWERS: dict[tuple[Any, ...], Any] = {}


class Twin(CUDATypingContext):
    """Of another context, which it shares everything with."""

    def __init__(self, context: CUDATypingContext):
        self.__dict__ = context.__dict__


class Remembering(Twin):
    """Answers what it was asked before."""

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        """The signature of a call. Kept for operators, intrinsics and the like, which have one for given types."""
        if not isinstance(func, types.Function):
            return super().resolve_function_type(func, args, kws)
        question = func, tuple(args), tuple(dict(kws).items())
        answer = ANSWERS.get(question)
        if answer is None:
            answer = ANSWERS[question] = super().resolve_function_type(func, args, kws)
        return answer


remembering = cache(Remembering)  # one for each context, since templates keep what they make by it


@instead_of(CUDANativeLowering)
class KnownSignatures(CUDANativeLowering):
    """With operators that remember their signatures."""

    def run_pass(self, state: Any) -> bool:
        target = state.targetctx
        asked = target.typing_context
        target.typing_context = recalling(asked)
        try:
            return super().run_pass(state)
        finally:
            target.typing_context = asked


class Recalling(Twin):
    """Its functions remember their signatures."""

    def resolve_value_type(self, val: Any) -> Any:
        found = super().resolve_value_type(val)
        return recalled(found) if type(found) is types.Function else found


recalling = cache(Recalling)

# (function, types of its arguments, options) -> signature
SIGNATURES: dict[tuple[Any, ...], Any] = {}


class Recalled(types.Function):
    """A function's twin, which it shares everything with, that remembers its signatures."""

    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        question = self.key, tuple(args), tuple(kws.items())
        answer = SIGNATURES.get(question)
        if answer is None:
            answer = SIGNATURES[question] = super().get_call_type(context, args, kws)
        return answer


@cache
def recalled(function: types.Function) -> Recalled:
    made = object.__new__(Recalled)  # not by calling it: Numba keeps one object for equal types
    made.__dict__ = function.__dict__
    return made
