"""Passes in the place of Numba's: how they get there, and those that leave out what nothing asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba.core import types
from numba.cuda.compiler import CUDACompiler
from numba.cuda.core import errors, ir, rewrites
from numba.cuda.core.compiler_machinery import PassManager, _pass_registry, register_pass
from numba.cuda.core.ir_utils import enforce_no_phis, is_operator_or_getitem
from numba.cuda.core.rewrites.ir_print import DetectConstPrintArguments, RewritePrintCalls
from numba.cuda.core.rewrites.static_binop import DetectStaticBinops
from numba.cuda.core.rewrites.static_getitem import RewriteConstGetitems, RewriteConstSetitems
from numba.cuda.core.rewrites.static_raise import RewriteConstRaises
from numba.cuda.core.transforms import canonicalize_cfg
from numba.cuda.core.typed_passes import InlineOverloads, IRLegalization, NopythonRewrites, PreLowerStripPhis
from numba.cuda.core.untyped_passes import (
    DeadBranchPrune,
    GenericRewrites,
    InlineClosureLikes,
    IRProcessing,
    RewriteSemanticConstants,
    WithLifting,
)

from .cycles import untie
from .members import settle_members

Pass = TypeVar("Pass", bound=type)
REPLACED: dict[type, type] = {}


def instead_of(theirs: Any) -> Callable[[Pass], Pass]:
    """Decorator: a pass that takes the place of Numba's, under its name, which errors tell."""

    def replace(ours: Any) -> Any:
        known = _pass_registry.get(theirs)
        ours._name = f"dualops_{theirs._name}"  # no two may register by one name
        register_pass(mutates_CFG=known.mutates_CFG, analysis_only=known.analysis_only)(ours)
        ours._name = theirs._name
        REPLACED[theirs] = ours
        return ours

    return replace


class Manager(PassManager):
    """Runs passes without the lock, events, timers and checks of each: thousands of passes make a kernel."""

    def _runPass(self, index: int, pss: Any, internal_state: Any) -> None:
        if self._print_before or self._print_after or self._print_wrap:
            super()._runPass(index, pss, internal_state)
            return
        pss.analysis = self._analysis
        try:
            pss.run_initialization(internal_state)
            pss.run_pass(internal_state)
            pss.run_finalizer(internal_state)
        except errors.NumbaError:
            with errors.new_error_context(f"Pass {pss.name()}"):
                raise


def leaner(manager: PassManager) -> PassManager:
    """The same pipeline with our passes."""
    made = Manager(manager.pipeline_name)
    for each, description in manager.passes:
        if each is not NopythonRewrites:
            made.add_pass(REPLACED.get(each, each), description)
    made.finalize()
    return made


class Compiler(CUDACompiler):
    """Numba's pipeline for CUDA with our passes: of a kernel, or of a function that it calls."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        try:
            return super().compile_extra(func)
        finally:
            untie(self.state)

    def define_pipelines(self) -> list[PassManager]:
        return [leaner(manager) for manager in super().define_pipelines()]


@instead_of(IRProcessing)
class CanonicalBlocks(IRProcessing):
    """Without lifetimes, and with members of nouns and records settled."""

    def run_pass(self, state: Any) -> bool:
        if state.func_ir.is_generator:
            return super().run_pass(state)
        state.func_ir.blocks = canonicalize_cfg(state.func_ir.blocks)
        settle_members(state.func_ir)
        return True


def kinds(function: Any) -> set[Any]:
    """Return what passes look for in a function: types of statements other than assignments, names of its expressions
    and of attributes, and "print" if it names that.
    """
    found = set[Any]()
    for block in function.blocks.values():
        for statement in block.body:
            if type(statement) is ir.Assign:
                value = statement.value
                if type(value) is ir.Expr:
                    found.add(value.op)
                    if value.op == "getattr":
                        found.add(value.attr)
                elif type(value) in (ir.Global, ir.FreeVar) and value.value is print:
                    found.add("print")
            else:
                found.add(type(statement))
    return found


def _has_closures_or_lists(state: Any) -> bool:
    return not kinds(state.func_ir).isdisjoint({"make_function", "build_list"})


def _has_arrays_or_tuples(state: Any) -> bool:
    given = any(isinstance(kind, (types.Array, types.BaseTuple)) for kind in state.args)
    return given or "typed_getitem" in kinds(state.func_ir)


def _has_branches(state: Any) -> bool:
    return any(type(block.body[-1]) is ir.Branch for block in state.func_ir.blocks.values())


# Numba's passes that run for some functions only -> whether a state's function has what they change
NEEDED: dict[type, Callable[[Any], bool]] = {
    WithLifting: lambda state: ir.EnterWith in kinds(state.func_ir),
    InlineClosureLikes: _has_closures_or_lists,
    RewriteSemanticConstants: _has_arrays_or_tuples,
    DeadBranchPrune: _has_branches,
}


def _if_needed(theirs: Any, is_needed: Callable[[Any], bool]) -> None:
    def run_pass(self: Any, state: Any) -> bool:
        return theirs.run_pass(self, state) if is_needed(state) else True

    instead_of(theirs)(type(theirs.__name__, (theirs,), {"run_pass": run_pass}))


for _each in NEEDED.items():
    _if_needed(*_each)


# Numba's rewrites -> the kinds of what they rewrite, of which one must be there
REWRITTEN: dict[type, set[Any]] = {
    RewriteConstGetitems: {"getitem"},
    RewriteConstSetitems: {ir.SetItem},
    RewriteConstRaises: {ir.Raise, ir.TryRaise},
    RewritePrintCalls: {"print"},
    DetectConstPrintArguments: {"print", ir.Print},
    DetectStaticBinops: {"binop", "inplace_binop"},
}


@instead_of(GenericRewrites)
class Rewrites(GenericRewrites):
    """Without lifetimes, a comparison of all blocks with what they were, and what there is nothing for."""

    def run_pass(self, state: Any) -> bool:
        kernel = state.func_ir
        there = kinds(kernel)
        for kind in rewrites.rewrite_registry.rewrites["before-inference"]:
            if kind in REWRITTEN and there.isdisjoint(REWRITTEN[kind]):
                continue
            rewrite, work = kind(state), list(kernel.blocks.items())
            while work:
                label, block = work.pop()
                if rewrite.match(kernel, block, state.typemap, state.calltypes):
                    kernel.blocks[label] = block = rewrite.apply()
                    block.verify()
                    work.append((label, block))
        return True


@instead_of(InlineOverloads)
class OverloadsIfAny(InlineOverloads):
    """Inlining of overloads, only for kernels that call one that is declared inline."""

    def run_pass(self, state: Any) -> bool:
        different = dict[Any, Any]()  # what is asked of which types -> an expression that does
        for block in state.func_ir.blocks.values():
            for value in block.find_exprs():
                if value.op == "getattr":
                    asked = types.unliteral(state.typemap[value.value.name]), value.attr
                elif value.op == "call":
                    asked = state.typemap[value.func.name], state.calltypes[value]
                elif is_operator_or_getitem(value):
                    asked = value.fn, state.calltypes[value]
                else:
                    continue
                different.setdefault(asked, value)
        return super().run_pass(state) if any(self._inlined(state, each) for each in different.values()) else True

    def _inlined(self, state: Any, value: Any) -> bool:
        found = self._get_attr_info(state, value) if value.op == "getattr" else self._get_callable_info(state, value)
        templates, _, given, _ = found or ((), None, None, None)
        for template in templates or ():
            inline = getattr(template, "_inline", None)
            if inline is not None and not inline.is_never_inline and given in template._inline_overloads:
                return True
        return False


@instead_of(PreLowerStripPhis)
class StripPhis(PreLowerStripPhis):
    """Remove phis without computing the lifetimes of variables."""

    def run_pass(self, state: Any) -> bool:
        phis = {each.target.name for block in state.func_ir.blocks.values() for each in block.body if _is_phi(each)}
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        state.func_ir.phis = phis  # for `lowering`
        return True


def _is_phi(statement: Any) -> bool:
    return type(statement) is ir.Assign and type(statement.value) is ir.Expr and statement.value.op == "phi"


@instead_of(IRLegalization)
class Legal(IRLegalization):
    """Without the ends of variables' lives, where Numba would count a reference less; of generators, with them."""

    def run_pass(self, state: Any) -> bool:
        if state.func_ir.is_generator:
            return super().run_pass(state)
        enforce_no_phis(state.func_ir)
        state.func_ir.blocks = canonicalize_cfg(state.func_ir.blocks)
        return True
