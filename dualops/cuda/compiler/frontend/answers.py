"""What Numba asks about types over and over: the signature of a call with given types, to infer and to lower."""

from __future__ import annotations

from functools import cache
from types import BuiltinFunctionType
from typing import Any

from numba.core import types
from numba.core.errors import NumbaError
from numba.core.target_extension import get_local_target
from numba.core.utils import order_by_target_specificity
from numba.cuda.compiler import CUDANativeLowering
from numba.cuda.core.typed_passes import NopythonTypeInference, fallback_context
from numba.cuda.target import CUDATypingContext

from .inference import inferred
from .lowering import Lower
from .passes import instead_of


@instead_of(NopythonTypeInference)
class KnownTypes(NopythonTypeInference):
    """Type inference with a typing context that remembers its answers."""

    def run_pass(self, state: Any) -> bool:
        asked = state.typingctx
        state.typingctx = remembering(asked)
        try:
            with fallback_context(state, f'Function "{state.func_id.func_name}" failed type inference'):
                state.typemap, state.return_type, state.calltypes, state.typing_errors = inferred(state)
        finally:
            state.typingctx = asked
        return True


# (function, types of its arguments) -> signature
ANSWERS: dict[tuple[Any, ...], Any] = {}
TAKEN_FIRST: dict[tuple[Any, ...], bool] = {}


class Twin(CUDATypingContext):
    """A typing context that shares all attributes with another one."""

    def __init__(self, context: CUDATypingContext):
        self.__dict__ = context.__dict__

    def resolve_value_type(self, val: Any) -> Any:
        try:
            return super().resolve_value_type(val)
        except ValueError as error:
            error.__traceback__ = None  # of a frame that holds the error, and all frames that called it
            raise ValueError(*error.args) from None


class Remembering(Twin):
    """A typing context that remembers the types of calls."""

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        """The signature of a call. Kept for operators, intrinsics, number types and the like, which have one for given
        types."""
        if kws or not isinstance(func, OF_TYPES_ALONE):
            return super().resolve_function_type(func, args, kws)
        question = question_of(func, args)
        try:
            answer = ANSWERS.get(question)
        except TypeError:  # an index that can't be hashed
            return super().resolve_function_type(func, args, kws)
        if answer is None:
            answer = self._without_literals(func, args)
            if answer is not None:  # what Numba doesn't know yet it may learn
                ANSWERS[question] = answer
        return answer

    def answered(self, function: Any, args: Any) -> Any:
        """The signature of a call if it was asked for before, or None."""
        return ANSWERS.get(question_of(function, args)) if isinstance(function, OF_TYPES_ALONE) else None

    def _without_literals(self, func: Any, args: Any) -> Any:
        """As Numba finds it. Where the template that Numba tries first takes an int for 3, and prefers to, there is one
        answer for all ints.
        """
        known = func if isinstance(func, types.Type) else self._lookup_global(func)
        if type(known) is types.Function:
            plain = tuple(types.unliteral(each) for each in args)
            if plain != tuple(args) and _takes_first(self, known, plain):
                return self.resolve_function_type(func, plain, {})
        return super().resolve_function_type(func, args, {})


# what has one signature for given types: also names of Numba's ("getiter") and Python's operators
OF_TYPES_ALONE = (types.Function, types.NumberClass, str, BuiltinFunctionType)


def question_of(function: Any, args: Any) -> tuple[Any, ...]:
    """Numba numbers its types, equal ones alike, and gives no number twice. The index of a static item is a value."""
    return tuple([each._code if isinstance(each, types.Type) else (type(each), each) for each in (function, *args)])


def _takes_first(context: Any, function: types.Function, plain: tuple[Any, ...]) -> bool:
    """Whether the template that Numba tries first has a signature for types without literals, and wants those first."""
    question = question_of(function, plain)
    found = TAKEN_FIRST.get(question)
    if found is None:
        target = get_local_target(context)
        (first, *_) = order_by_target_specificity(target, function.templates, fnkey=function.key[0])
        try:
            found = not first.prefer_literal and first(context).apply(plain, {}) is not None
        except NumbaError:
            found = False
        TAKEN_FIRST[question] = found
    return found


remembering = cache(Remembering)  # one for each context, since templates keep what they make by it


@instead_of(CUDANativeLowering)
class KnownSignatures(CUDANativeLowering):
    """Lowering with operators that remember their signatures."""

    @property
    def lowering_class(self) -> type:
        return Lower

    def run_pass(self, state: Any) -> bool:
        target = state.targetctx
        asked = target.typing_context
        target.typing_context = recalling(asked)
        try:
            return super().run_pass(state)
        finally:
            target.typing_context = asked


class Recalling(Twin):
    """A typing context whose functions remember their signatures."""

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
