"""Types by a worklist: a constraint is asked again only when a variable that it reads has got another type.

Numba asks all constraints of a kernel in rounds until no type changes, so at least twice. Here the order is the same,
and left out are only those whose answer can't differ from their last: the types are Numba's, which a test compares.
Where a constraint fails or a type stays imprecise, Numba's own rounds go on from there, so errors are Numba's too.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from typing import Any

from numba.core import types
from numba.core.errors import NumbaError
from numba.cuda import utils
from numba.cuda.core import errors, typeinfer as numbas
from numba.cuda.core.typeinfer import TypeInferer


def inferred(state: Any) -> tuple[Any, Any, Any, Any]:
    """Do what `type_inference_stage` does: return types of variables, of the result and of calls, and errors."""
    if len(state.args) != state.func_ir.arg_count:
        raise TypeError("Mismatch number of argument types")
    context, fixer = state.typingctx, errors.WarningsFixer(errors.NumbaWarning)
    inferer = Inferer(context, state.func_ir, fixer)
    try:
        with context.callstack.register(state.targetctx.target, inferer, state.func_ir.func_id, state.args), fixer:
            for index, (name, kind) in enumerate(zip(state.func_ir.arg_names, state.args, strict=True)):
                inferer.seed_argument(name, index, kind)
            if state.return_type is not None:
                inferer.seed_return(state.return_type)
            for name, kind in (state.locals or {}).items():
                inferer.seed_type(name, kind)
            inferer.build_constraint()
            failed = inferer.propagate()
            return *inferer.unify(), failed
    finally:
        inferer.untie()


def _of_call(each: Any) -> list[str]:
    keywords = each.kws.items() if isinstance(each.kws, dict) else each.kws
    found = [arg.name for arg in each.args] + [value.name for _, value in keywords]
    return found if each.vararg is None else [*found, each.vararg.name]


def _of_static_item(each: Any) -> list[str]:
    return [each.value.name, *(_of_call(each.fallback) if each.fallback else ())]


# kind of a constraint -> names of the variables whose types it asks for
READS: dict[type, Callable[[Any], Sequence[str]]] = {
    numbas.Propagate: lambda each: (each.src,),
    numbas.ArgConstraint: lambda each: (each.src,),
    numbas.CallConstraint: lambda each: [*_of_call(each), each.func],
    numbas.IntrinsicCallConstraint: _of_call,
    numbas.GetAttrConstraint: lambda each: (each.value.name,),
    numbas.BuildTupleConstraint: lambda each: [item.name for item in each.items],
    numbas.ExhaustIterConstraint: lambda each: (each.iterator.name,),
    numbas.PairFirstConstraint: lambda each: (each.pair.name,),
    numbas.PairSecondConstraint: lambda each: (each.pair.name,),
    numbas.StaticGetItemConstraint: _of_static_item,
    numbas.SetItemConstraint: lambda each: (each.target.name, each.index.name, each.value.name),
    numbas.StaticSetItemConstraint: lambda each: (each.target.name, each.index_var.name, each.value.name),
}


def _propagate(inferer: Inferer, each: Any) -> None:
    """`dst = src`: refinements of dst go on to src, but what src gives is not refined."""
    known, kind = inferer.typevars[each.dst], inferer.typevars[each.src].type
    if kind is not None and known.type is not kind:
        before = known.type
        if known.add_type(kind, loc=each.loc) != before:
            inferer.changed.append(each.dst)
    inferer.refine_map[each.dst] = each


def _call(inferer: Inferer, each: Any) -> None:
    function = inferer.typevars[each.func].type
    if function is None:
        raise errors.TypingError("a function without a type")  # Numba's rounds say which
    _resolve(inferer, each, function)


def _operation(inferer: Inferer, each: Any) -> None:
    function = each.func
    _resolve(inferer, each, inferer.value_type(function) if function in utils.OPERATORS_TO_BUILTINS else function)


def _resolve(inferer: Inferer, each: Any, function: Any) -> None:
    """`CallConstraint.resolve`, in short where the function's signature for these types is known."""
    if each.vararg is not None or each.kws:
        each.resolve(inferer, inferer.typevars, function)
        return
    typevars, given = inferer.typevars, []
    for argument in each.args:
        kind = typevars[argument.name].type
        if kind is None:
            return
        given.append(kind)
    signature = inferer.context.answered(function, given)
    if signature is None or signature.recvr is not None or not signature.return_type.is_precise():
        each.resolve(inferer, typevars, function)
        return
    inferer.add_type(each.target, signature.return_type, loc=each.loc)
    each.signature = signature


ASKED = {numbas.Propagate: _propagate, numbas.CallConstraint: _call, numbas.IntrinsicCallConstraint: _operation}


class Inferer(TypeInferer):
    """Numba's, with the worklist in front of its rounds."""

    def __init__(self, context: Any, func_ir: Any, fixer: Any):
        super().__init__(context, func_ir, fixer)
        self.changed: list[str] = []  # variables with another type than before
        self.values: dict[int, Any] = {}  # id of a constant -> itself and its type
        self.others = set[type]()  # of constants that are neither numbers nor functions
        self.numbers: dict[Any, Any] = {}  # kind, number and whether it is a literal -> type

    def untie(self) -> None:
        """Let go of what Numba's frames hold, which exceptions hold that Numba keeps."""
        self.typevars.clear()
        self.constraints.constraints.clear()
        self.__dict__.clear()  # a function within Numba's `unify` holds this, and itself

    def propagate(self, raise_errors: bool = True) -> Any:
        return None if self._settle() else super().propagate(raise_errors)

    def _settle(self) -> bool:
        """Ask the constraints; whether all are met, by precise types."""
        constraints = self.constraints.constraints
        readers: dict[str, list[int]] = defaultdict(list)
        for number, each in enumerate(constraints):
            reads = READS.get(type(each))
            if reads is None:
                return False
            for name in reads(each):
                readers[name].append(number)
        failed, others = set[int](), []
        now: Sequence[int] = range(len(constraints))
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always", errors.NumbaWarning)
            while now:
                now = self._round(now, constraints, readers, failed, heard)
                others += [each for each in heard if not issubclass(each.category, errors.NumbaWarning)]
                heard.clear()
        readers.clear()
        for each in others:
            warnings.warn_explicit(str(each.message), each.category, each.filename, each.lineno)
        return not failed and all(var.type is None or var.type.is_precise() for var in self.typevars.values())

    def _round(
        self, now: Sequence[int], constraints: list[Any], readers: Any, failed: set[int], heard: list[Any]
    ) -> list[int]:
        """Ask these constraints in order, and those behind that they make worth asking; returns who is next."""
        waiting, again, changed, warned = Waiting(now), set[int](), self.changed, 0
        for number in waiting:
            each = constraints[number]
            ask = ASKED.get(type(each))
            try:
                ask(self, each) if ask else each(self)
                failed.discard(number)
            except NumbaError:
                failed.add(number)
            while len(heard) > warned:
                if issubclass(heard[warned].category, errors.NumbaWarning):
                    with self.warnings.catch_warnings(each.loc.filename, each.loc.line):
                        warnings.warn(heard[warned].message, heard[warned].category)  # noqa: B028  its place is each.loc
                warned += 1
            if changed:
                for name in changed:
                    for reader in readers[name]:
                        if reader <= number:
                            again.add(reader)
                        else:
                            waiting.add(reader)
                changed.clear()
        return sorted(again)

    def add_type(self, var: str, tp: Any, loc: Any, unless_locked: bool = False) -> None:
        known = self.typevars[var]
        before = known.type
        if before is tp:
            return  # unified with itself it is unchanged
        if before is None:
            known.type, known.define_loc = tp, loc
        elif (unless_locked and known.locked) or known.add_type(tp, loc=loc) == before:
            return
        self.changed.append(var)
        self.propagate_refined_type(var, known.type)

    def value_type(self, value: Any) -> Any:
        """The type of a constant, asked for once. It is kept alive, so that its id is its own. Raises ValueError."""
        found = self.values.get(id(value))
        if found is None:
            found = self.values[id(value)] = value, self.context.resolve_value_type(value)
        return found[1]

    def typeof_const(self, inst: Any, target: Any, const: Any) -> None:
        if type(const) not in NUMBERS:
            super().typeof_const(inst, target, const)
            return
        question = type(const), const, inst.value.use_literal_type
        found = self.numbers.get(question)
        if found is None:
            literal = types.maybe_literal(const) if inst.value.use_literal_type else None
            found = self.numbers[question] = literal or self.resolve_value_type(inst, const)
        self.add_type(target.name, found, loc=inst.loc)

    def typeof_global(self, inst: Any, target: Any, gvar: Any) -> None:
        """Type a global: directly for numbers, and for functions and types that Numba knows, but no built-in names."""
        value, kind = gvar.value, None
        if gvar.name not in ("range", "slice", "len") and not self.typevars[target.name].locked:
            if type(value) in NUMBERS:
                kind = types.maybe_literal(value) or self.value_type(value)
            elif type(value) not in self.others:
                with suppress(ValueError):
                    kind = self.value_type(value)
        if not isinstance(kind, PLAIN):
            self.others.add(type(value))
            super().typeof_global(inst, target, gvar)
            return
        self.lock_type(target.name, kind, loc=inst.loc)
        self.assumed_immutables.add(inst)


NUMBERS = (int, float, bool)
PLAIN = (types.Number, types.Boolean, types.Function, types.NumberClass, types.Module)


class Waiting:
    """Numbers in ascending order, to which larger ones are added on the way."""

    def __init__(self, numbers: Sequence[int]):
        self.sorted, self.place = list(numbers), 0
        self.members = set(numbers)
        self.added: list[int] = []

    def add(self, number: int) -> None:
        if number not in self.members:
            self.members.add(number)
            heappush(self.added, number)

    def __iter__(self) -> Any:
        given, added = iter(self.sorted), self.added
        number = next(given, None)
        while number is not None or added:
            if added and (number is None or added[0] < number):
                yield heappop(added)
            else:
                yield number
                number = next(given, None)
