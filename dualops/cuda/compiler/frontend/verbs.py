"""The IR of functions that are to be inlined: each function's own, and its bytecode interpreted once per code object.

A noun creates new verbs for each of its configurations: many functions share one code object, and differ in what
their closures hold. Numba interprets the bytecode of each. Here `interpreted` keeps the result without the values, and
fills in those of the function that asks, at every request, so a changed closure or global is never missed. Code
objects are held weakly: the IR of a user's function goes with it.
"""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Callable
from copy import copy
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from numba.core import types
from numba.cuda.compiler import CUDABytecodeInterpreter, CUDATranslateBytecode, DefaultPassBuilder
from numba.cuda.core import bytecode, ir
from numba.cuda.core.compiler import StateDict, _CompileStatus
from numba.cuda.core.compiler_machinery import PassManager
from numba.cuda.core.inline_closurecall import callee_ir_validator
from numba.cuda.core.interpreter import Interpreter, peep_hole_delete_with_exit, peep_hole_fuse_dict_add_updates
from numba.cuda.core.ir_utils import build_definitions, guard, resolve_func_from_module
from numba.cuda.core.untyped_passes import InlineInlinables, TranslateByteCode

from .passes import instead_of, kinds, leaner

# Numba's rewrites of bytecode's IR -> what they rewrite, see `kinds`
REWRITTEN: dict[Any, Any] = {
    peep_hole_delete_with_exit: ir.EnterWith,
    peep_hole_fuse_dict_add_updates: "_update_from_bytecode",
}


class RewritesIfAny:
    """A base of interpreters: without the rewrites that there is nothing for."""

    def post_process(self, peepholes: list[Any], func_ir: Any) -> Any:
        there = kinds(func_ir)
        needed = [each for each in peepholes if REWRITTEN.get(each) is None or REWRITTEN[each] in there]
        return super().post_process(needed, func_ir)  # pyright: ignore[reportAttributeAccessIssue]


class OfVerbs(RewritesIfAny, Interpreter):
    pass


class OfKernels(RewritesIfAny, CUDABytecodeInterpreter):
    pass


Interpreted = WeakKeyDictionary[CodeType, Any]
INTERPRETED: dict[type, Interpreted] = {OfVerbs: Interpreted(), OfKernels: Interpreted()}


def interpreted(interpreter: type, identity: Any) -> Any:
    """The IR of a function's bytecode, to be changed. identity: Numba's FunctionIdentity."""
    kept, code = INTERPRETED[interpreter], identity.code
    found = kept.get(code)
    if found is None or found.loc.filename != identity.filename:  # equal code of two files has two places
        found = interpreter(identity).interpret(_decoded(identity))
        found.func_id = None  # it holds the code object, which holds this alive
        for block in found.blocks.values():
            for statement in block.body:
                if type(statement) is ir.Assign and type(statement.value) in (ir.Global, ir.FreeVar):
                    statement.value.value = None
        kept[code] = found
    return _of(found, identity)


def _decoded(identity: Any) -> Any:
    """The bytecode without the CACHE entries of Python 3.11: more than half of it, and without an effect."""
    made = bytecode.ByteCode(identity)
    for each in reversed(made.table.values()):
        following = made.table.get(each.next)
        if following is not None and following.opname == "CACHE":
            each.next = following.next
    return made


def _of(kept: Any, identity: Any) -> Any:
    """A copy as far as passes change IR, with the values that the function's closure and globals have now."""
    made, function = copy(kept), identity.func
    made.func_id = identity
    (scope,) = {id(block.scope): block.scope for block in kept.blocks.values()}.values()
    names = ir.Scope(scope.parent, scope.loc)
    names.localvars._con.update(scope.localvars._con)
    names.redefined.update(scope.redefined)
    names.var_redefinitions.update({name: set(later) for name, later in scope.var_redefinitions.items()})
    made.blocks = {}
    for label, block in kept.blocks.items():
        made.blocks[label] = own = ir.Block(names, block.loc)
        own.body = [_with_values(statement, function) for statement in block.body]
    made._definitions = build_definitions(made.blocks)
    made._reset_analysis_variables()
    return made


def _with_values(statement: Any, function: FunctionType) -> Any:
    made = object.__new__(type(statement))
    values = made.__dict__
    values.update(statement.__dict__)
    value = values.get("value")
    kind = type(value)
    if kind is ir.Expr:
        values["value"] = expression = object.__new__(ir.Expr)
        expression.__dict__.update(op=value.op, loc=value.loc, _kws=dict(value._kws))
    elif kind is ir.Global:
        values["value"] = ir.Global(value.name, _global(function, value.name), value.loc)
    elif kind is ir.FreeVar:
        values["value"] = ir.FreeVar(value.index, value.name, _free(function, value.index), value.loc)
    elif kind is ir.Const:
        values["value"] = ir.Const(value.value, value.loc, use_literal_type=value.use_literal_type)
    return made


def _global(function: FunctionType, name: str) -> Any:
    """As Numba's interpreter finds it."""
    return function.__globals__.get(name, getattr(builtins, name, ir.UNDEFINED))


def _free(function: FunctionType, index: int) -> Any:
    cells = function.__closure__ or ()
    try:
        return cells[index].cell_contents
    except ValueError:  # an empty cell, a function that calls itself say
        return ir.UNDEFINED


@instead_of(TranslateByteCode)
class InterpretOnce(TranslateByteCode):
    """Translate a verb's bytecode to IR, once per function."""

    def run_pass(self, state: Any) -> bool:
        state.func_ir = interpreted(OfVerbs, state.func_id)
        return True


@instead_of(CUDATranslateBytecode)
class InterpretKernelOnce(CUDATranslateBytecode):
    """Translate a kernel's bytecode to IR, once per function."""

    def run_pass(self, state: Any) -> bool:
        state.func_ir = interpreted(OfKernels, state.func_id)
        return True


class Return(NamedTuple):
    """A return statement, without the cast to a type that is not known yet."""

    name: str
    loc: Any


class Verb:
    """A function's own IR, after Numba's passes up to inlining. Never changed."""

    def __init__(self, function: Any, func_ir: Any):
        callee_ir_validator(func_ir)
        self.function, self.func_ir = function, func_ir
        self.order = sorted(func_ir.blocks)
        self.assigned = Counter[str]()  # how often each variable is
        self.arguments = {*func_ir.arg_names}
        self.statements = {label: _without_cast(func_ir.blocks[label].body) for label in self.order}
        targets, self.returns = set[int](), 0
        self.methods: dict[int, Any] = {}  # id of a call of a module's attribute -> the function that it is
        for body in self.statements.values():
            for statement in body:
                if type(statement) is ir.Assign:
                    self.assigned[statement.target.name] += 1
                    value = statement.value
                    if type(value) is ir.Expr and value.op == "call":
                        self._find_method(value)
            if type(body[-1]) is Return:
                self.returns += 1
            elif type(body[-1]) in (ir.Jump, ir.Branch):
                targets.update(body[-1].get_targets())
        self.entered_again = self.order[0] in targets

    def _find_method(self, call: Any) -> None:
        called = self.func_ir._definitions.get(call.func.name, ())
        if len(called) == 1 and type(called[0]) is ir.Expr and called[0].op == "getattr":
            function = inlinable(guard(resolve_func_from_module, self.func_ir, called[0]))
            if function is not None:
                self.methods[id(call)] = function


def _without_cast(body: list[Any]) -> list[Any]:
    last = body[-1]
    if type(last) is not ir.Return:
        return body
    before = body[-2] if len(body) > 1 else None
    if type(before) is ir.Assign and before.target.name == last.value.name:
        cast = before.value
        if type(cast) is ir.Expr and cast.op == "cast":
            return [*body[:-2], Return(cast.value.name, last.loc)]
    return [*body[:-1], Return(last.value.name, last.loc)]


def inlinable(value: Any) -> Callable[..., Any] | None:
    """The Python function of Numba's form of it, if that is to be inlined."""
    options = getattr(value, "targetoptions", None)
    return value.py_func if isinstance(options, dict) and options.get("inline") == "always" else None


class Verbs:
    """The verbs of one kernel by their functions; each is translated once."""

    def __init__(self, state: Any):
        self.outer = state
        self.made: dict[Callable[..., Any], Verb] = {}
        self.passes: PassManager | None = None

    def __getitem__(self, function: Callable[..., Any]) -> Verb:
        found = self.made.get(function)
        if found is None:
            found = self.made[function] = Verb(function, self._untyped(function))
        return found

    def _untyped(self, function: Callable[..., Any]) -> Any:
        """What `InlineWorker.run_untyped_passes` gives, but nothing is inlined."""
        outer, state = self.outer, StateDict()
        for name in ("typingctx", "targetctx", "locals", "pipeline", "flags"):
            state[name] = outer[name]
        state.func_id = bytecode.FunctionIdentity.from_function(function)
        state.func_ir = state.typemap = state.calltypes = state.type_annotation = state.return_type = state.bc = None
        state.status, state.metadata = _CompileStatus(False), {}
        state.args = len(state.func_id.pysig.parameters) * (types.pyobject,)
        if self.passes is None:
            self.passes = _up_to_inlining(DefaultPassBuilder.define_untyped_pipeline(state))
        self.passes.run(state)
        return state.func_ir


def _up_to_inlining(manager: PassManager) -> PassManager:
    kept = [each for each, _ in manager.passes].index(InlineInlinables)
    manager.passes = manager.passes[:kept]
    return leaner(manager)
