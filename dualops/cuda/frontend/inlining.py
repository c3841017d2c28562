"""Functions are put where they are called. The IR of each is made once, and copied as far as inlining changes it."""

# numba-cuda takes the place of numba's own `numba.cuda` when Python runs, which pyright does not see:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from numba.cuda.compiler import DefaultPassBuilder
from numba.cuda.core import ir
from numba.cuda.core.analysis import compute_cfg_from_blocks
from numba.cuda.core.inline_closurecall import InlineWorker, callee_ir_validator
from numba.cuda.core.ir_utils import guard, simplify_CFG
from numba.cuda.core.transforms import canonicalize_cfg
from numba.cuda.core.untyped_passes import InlineInlinables

from .passes import instead_of, leaner


@instead_of(InlineInlinables)
class InlineVerbs(InlineInlinables):
    """With each function's IR made once."""

    def run_pass(self, state: Any) -> bool:
        worker, blocks = Inliner(state), state.func_ir.blocks
        work = list(blocks.items())
        while work:
            _, block = work.pop()
            for i, statement in enumerate(block.body):
                call = getattr(statement, "value", None)
                if not isinstance(call, ir.Expr) or call.op != "call":
                    continue
                if guard(self._do_work, state, work, block, i, call, worker):
                    break  # what followed the call is a block of its own now, and among the work
        if worker.inlined:
            for dead in compute_cfg_from_blocks(blocks).dead_nodes():
                del blocks[dead]
            state.func_ir.blocks = simplify_CFG(canonicalize_cfg(blocks))
        return True


class Inliner(InlineWorker):
    """Puts the IR of functions where they are called."""

    def __init__(self, state: Any):
        context = (state.typingctx, state.targetctx, state.locals, state.pipeline, state.flags)
        super().__init__(*context, validator=callee_ir_validator)
        self._compiler_pipeline = lambda state: leaner(DefaultPassBuilder.define_untyped_pipeline(state))
        self.inlined = 0

    def inline_ir(self, *args: Any, **options: Any) -> Any:
        self.inlined += 1
        made = super().inline_ir(*args, **options)
        for block in made[1].values():
            block.__class__ = ir.Block
        return made

    def run_untyped_passes(self, func: Callable[..., Any], enable_ssa: bool = False) -> Any:
        """The IR of a function, to be changed."""
        verbs = self.pipeline.verbs
        if func not in verbs:
            verbs[func] = super().run_untyped_passes(func, enable_ssa)
        return ready_to_inline(verbs[func])


class Ready(ir.Block):
    """A block that was copied for whoever copies it next."""

    def __deepcopy__(self, memo: Any) -> Ready:
        return self


def ready_to_inline(function: Any) -> Any:
    """A copy of a function's IR, as far as inlining changes it: blocks, statements, expressions and names in use.

    Blocks are counted anew, in their order. Inlining adds the largest label there is to those of what it inlines, so
    labels would double with each function within a function, and after some kernels be too long for NVVM.
    """
    made = copy(function)
    (scope,) = {id(block.scope): block.scope for block in function.blocks.values()}.values()
    names = ir.Scope(scope.parent, scope.loc)
    names.localvars._con.update(scope.localvars._con)
    names.redefined.update(scope.redefined)
    names.var_redefinitions.update({name: set(later) for name, later in scope.var_redefinitions.items()})
    numbers = {label: number for number, label in enumerate(sorted(function.blocks))}
    made.blocks = {}
    for label, block in function.blocks.items():
        made.blocks[numbers[label]] = own = Ready(names, block.loc)
        own.body = [copied(statement) for statement in block.body]
        end = own.body[-1].__dict__  # to where it goes on: of a jump `target`, of a branch `truebr` and `falsebr`
        end.update({name: numbers[end[name]] for name in ("target", "truebr", "falsebr") if name in end})
    made.block_entry_vars = {}
    return made


def copied(node: Any) -> Any:
    """Of a statement: its own, its expressions' own, but the same variables, constants and places."""
    made = object.__new__(type(node))
    values = made.__dict__
    values.update(node.__dict__)
    for name, value in values.items():
        if isinstance(value, ir.Expr):
            values[name] = expression = object.__new__(ir.Expr)
            expression.__dict__.update(op=value.op, loc=value.loc, _kws=dict(value._kws))
    return made
