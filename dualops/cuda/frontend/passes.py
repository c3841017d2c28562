"""Passes in the place of Numba's: how they get there, and those that leave out what nothing asks for."""

# numba-cuda takes the place of numba's own `numba.cuda` when Python runs, which pyright does not see:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba.cuda.core import errors, ir, rewrites
from numba.cuda.core.compiler_machinery import PassManager, _pass_registry, register_pass
from numba.cuda.core.ir_utils import enforce_no_phis, fixup_var_define_in_scope
from numba.cuda.core.transforms import canonicalize_cfg
from numba.cuda.core.typed_passes import IRLegalization, NopythonRewrites, PreLowerStripPhis
from numba.cuda.core.untyped_passes import GenericRewrites, InlineClosureLikes, IRProcessing, WithLifting

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
    for each, told in manager.passes:
        if each is not NopythonRewrites:
            made.add_pass(REPLACED.get(each, each), told)
    made.finalize()
    return made


@instead_of(IRProcessing)
class CanonicalBlocks(IRProcessing):
    """Without lifetimes, and with members of nouns and records settled."""

    def run_pass(self, state: Any) -> bool:
        if state.func_ir.is_generator:
            return super().run_pass(state)
        state.func_ir.blocks = canonicalize_cfg(state.func_ir.blocks)
        settle_members(state.func_ir)
        return True


@instead_of(WithLifting)
class WithIfAny(WithLifting):
    """For functions that have a `with`."""

    def run_pass(self, state: Any) -> bool:
        entered = (type(each) is ir.EnterWith for block in state.func_ir.blocks.values() for each in block.body)
        return super().run_pass(state) if any(entered) else True


@instead_of(InlineClosureLikes)
class ClosuresIfAny(InlineClosureLikes):
    """For functions that have closures or lists."""

    def run_pass(self, state: Any) -> bool:
        blocks = state.func_ir.blocks
        made = {expression.op for block in blocks.values() for expression in block.find_exprs()}
        if not made.isdisjoint({"make_function", "build_list"}):
            return super().run_pass(state)
        fixup_var_define_in_scope(blocks)
        return True


@instead_of(GenericRewrites)
class Rewrites(GenericRewrites):
    """Without lifetimes, and a comparison of all blocks with what they were."""

    def run_pass(self, state: Any) -> bool:
        kernel = state.func_ir
        for kind in rewrites.rewrite_registry.rewrites["before-inference"]:
            rewrite, work = kind(state), list(kernel.blocks.items())
            while work:
                label, block = work.pop()
                if rewrite.match(kernel, block, state.typemap, state.calltypes):
                    kernel.blocks[label] = block = rewrite.apply()
                    block.verify()
                    work.append((label, block))
        return True


@instead_of(PreLowerStripPhis)
class StripPhis(PreLowerStripPhis):
    """Without lifetimes."""

    def run_pass(self, state: Any) -> bool:
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        return True


@instead_of(IRLegalization)
class Legal(IRLegalization):
    """Without the ends of variables' lives, where Numba would count a reference less; of generators, with them."""

    def run_pass(self, state: Any) -> bool:
        if state.func_ir.is_generator:
            return super().run_pass(state)
        enforce_no_phis(state.func_ir)
        state.func_ir.blocks = canonicalize_cfg(state.func_ir.blocks)
        return True
