"""LLVM IR of a kernel: Numba's, without what it does for each statement and asks for each call.

singly assigned   Numba looks through a block's statements for each variable of it. Here: once through all.
words             Numba prepares the words of an error for each statement, formats it for a print that is off, and
                  asks each call whether it ends a `try`. Here: where there is an error, a print, a `try`.
implementations   Numba looks for one at each statement, asks Python for its signature, and loads all registries
                  again if there is none. Here: once per kernel.
places            Numba gives a place on the stack to each variable that is read in another block than that of its
                  assignment. Here: to those alone that are assigned to again, or read in a block that is lowered
                  earlier, and to iterators.
zeros             Numba stores a zero in each place when the kernel begins, and NVVM then walks through all blocks
                  for each. Here, in kernels of MANY_BLOCKS: only where there are several assignments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from llvmlite import ir as llvm
from numba.core import types
from numba.cuda import cgutils
from numba.cuda.core import config, ir
from numba.cuda.core.errors import LoweringError, new_error_context
from numba.cuda.core.unsafe import eh
from numba.cuda.lowering import CUDALower

from ..backend import BLACKWELL
from .names import names_read
from .operations import PAIR, division, element, has_constants, loop, next_element, slot

# NVVM's time grows faster than the number of blocks and of zeros: of 1,986 blocks of Numba's it made 12 s, and 1.5 with
# few zeros and divisions by selection. The machine code had the same registers, no spills and as many instructions,
# some of them in another order. Smaller kernels gain little, and their code stays Numba's.
MANY_BLOCKS = 1500


# types of variables that stay on the stack, since LLVM would else take loops apart in another order of its passes
ON_STACK = (types.IteratorType, types.RangeType)


class Lower(CUDALower):
    """Numba's, of a kernel without debug information."""

    def init(self) -> None:
        self.tries = self.whole = False
        self.many = len(self.func_ir.blocks) > MANY_BLOCKS
        self.operations: dict[Any, Any] = {}
        # NVVM has a newer LLVM for Blackwell, which left the arrays of 25 kernels in local memory
        self.straight = self.flags.compute_capability >= BLACKWELL
        self.counted = set[str]()  # iterators over a range of constants
        super().init()
        self.context.get_function = Implementations(self.context, self.many)  # of this kernel's own copy of the context

    def lower(self) -> None:
        try:
            super().lower()
        finally:
            del self.context.get_function  # which holds the context

    def _find_singly_assigned_variable(self) -> None:
        """Find the variables that need no place on the stack: assigned to once, and read after it.

        A block that is lowered after the assignment comes after it in the kernel too (`assignments`).
        """
        assigned, others, again = set[str](), set[str](self.func_ir.phis), set[str]()
        here, before = set[str](), set[str]()  # assigned to in this block, or in one before and not ON_STACK
        for block in self.blocks.values():
            here.clear()
            for statement in block.body:
                if type(statement) is not ir.Assign:
                    others.update(
                        each.name for each in statement.list_vars() if not (each.name in here or each.name in before)
                    )
                    continue
                others.update(name for name in names_read(statement.value) if not (name in here or name in before))
                name = statement.target.name
                if name in assigned:
                    others.add(name)
                    again.add(name)
                assigned.add(name)
                here.add(name)
                if not (self.many or isinstance(self.fndesc.typemap[name], ON_STACK)):
                    before.add(name)
                if type(statement.value) is ir.Global and statement.value.value is eh.exception_check:
                    self.tries = True
        self._singly_assigned_vars = assigned - others
        self.once = assigned - again - self.func_ir.phis if self.many else set[str]()
        self._blk_local_varmap = {}
        self.whole = bool(self.context.enable_debuginfo or self.generator_info or config.DEBUG_JIT)
        if self.generator_info:
            super()._find_singly_assigned_variable()

    def pre_block(self, block: Any) -> None:
        if self.tries or self.whole:
            super().pre_block(block)
        else:
            self._cur_ir_block, self.dbg_val_names = block, set()

    def lower_block(self, block: Any) -> None:
        if self.whole or self._loc_notify_registry:
            super().lower_block(block)
            return
        self.pre_block(block)
        statement = None
        try:
            for statement in block.body:
                self.loc = statement.loc
                if type(statement) is ir.Assign and type(statement.value) is not ir.Arg:
                    self._lower_assign(statement)
                else:
                    self.lower_inst(statement)
        except Exception:
            options = {"inst": statement, "loc": self.loc, "errcls_": partial(LoweringError, loc=self.loc)}
            with new_error_context('lowering "{inst}" at {loc}', **options):
                raise
        self.post_block(block)

    def _lower_assign(self, statement: Any) -> None:
        name = statement.target.name
        value = self.lower_assign(self.fndesc.typemap[name], statement)
        if self.straight and isinstance(self.fndesc.typemap[name], types.RangeIteratorType):
            source = statement.value
            copied = isinstance(source, ir.Var)
            if source.name in self.counted if copied else has_constants(self.loadvar(source.value.name)):
                self.counted.add(name)
        if name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
            return
        place = self.getvar(name)
        if value.type != place.type.pointee:
            raise AssertionError(f"Storing {value.type} to ptr of {place.type.pointee} ({name!r})")
        self.builder.store(value, place)  # nothing counts references to what was there

    def alloca_lltype(self, name: str, lltype: Any, datamodel: Any = None) -> Any:
        if self.whole:
            return super().alloca_lltype(name, lltype, datamodel)
        if name in self.once:
            return slot(self.builder, lltype, name)
        return cgutils.alloca_once(self.builder, lltype, name=name, zfill=False)

    def debug_print(self, msg: Any) -> None:
        if self.whole:
            super().debug_print(msg)

    def lower_expr(self, resty: Any, expr: Any) -> Any:
        if expr.op in PAIR and isinstance(self.fndesc.typemap[expr.value.name], types.Pair):
            return self.builder.extract_value(self.loadvar(expr.value.name), PAIR.index(expr.op))
        if expr.op == "iternext" and expr.value.name in self.counted:
            return next_element(True, self.builder, [self.loadvar(expr.value.name)])
        return super().lower_expr(resty, expr)

    def lower_binop(self, resty: Any, expr: Any, op: Any) -> Any:
        if not (expr.static_lhs is ir.UNDEFINED and expr.static_rhs is ir.UNDEFINED):
            return super().lower_binop(resty, expr, op)
        signature = self.fndesc.calltypes[expr]
        operands = self._cast(expr.lhs, signature.args[0]), self._cast(expr.rhs, signature.args[1])
        made = self._operation(op, signature)(self.builder, operands)
        return self.context.cast(self.builder, made, signature.return_type, resty)

    def lower_getitem(self, resty: Any, expr: Any, value: Any, index: Any, signature: Any) -> Any:
        operands = self._cast(value, signature.args[0]), self._cast(index, signature.args[1])
        made = self._operation(operator.getitem, signature)(self.builder, operands)
        return self.context.cast(self.builder, made, signature.return_type, resty)

    def lower_setitem(self, target_var: Any, index_var: Any, value_var: Any, signature: Any) -> Any:
        target = self.fndesc.typemap[target_var.name]
        if isinstance(target, types.Optional):
            return super().lower_setitem(target_var, index_var, value_var, signature)
        operands = (
            self.loadvar(target_var.name),
            self._cast(index_var, signature.args[1]),
            self._cast(value_var, signature.args[2]),
        )
        return self._operation(operator.setitem, signature)(self.builder, operands)

    def _operation(self, op: Any, signature: Any) -> Callable[..., Any]:
        """The implementation of Python's operator for these types."""
        question = op, signature.args
        found = self.operations.get(question)
        if found is None:
            context = self.context.typing_context
            function = context.resolve_value_type(op)
            called = function.get_call_type(context, signature.args, {})
            found = self.operations[question] = self.context.get_function(function, called)
        return found

    def _cast(self, variable: Any, kind: Any) -> Any:
        name = variable.name
        given = self.fndesc.typemap[name]
        if type(given) is types.IntegerLiteral and type(kind) is types.Integer:
            number = given.literal_value
            if kind.minval <= number <= kind.maxval:
                return llvm.Constant(self.context.get_value_type(kind), number)
        value = self.loadvar(name)
        return value if given is kind else self.context.cast(self.builder, value, given, kind)

    def fold_call_args(self, fnty: Any, signature: Any, pos_args: Any, vararg: Any, kw_args: Any) -> Any:
        """The arguments' values. In short where they are those of the signature, one by one."""
        if vararg is None and not kw_args and len(pos_args) == len(signature.args) and not _starred(signature.pysig):
            return [self._cast(variable, kind) for variable, kind in zip(pos_args, signature.args, strict=True)]
        return super().fold_call_args(fnty, signature, pos_args, vararg, kw_args)


@cache
def _starred(signature: Any) -> bool:
    return signature is not None and any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values())


class Implementations:
    """A replacement for a context's `get_function` that looks up each implementation once."""

    def __init__(self, context: Any, many: bool):
        """many: for a kernel of MANY_BLOCKS."""
        self.context, self.numbas, self.many = context, type(context).get_function, many
        self.found: dict[Any, Any] = {}
        self.missing: dict[Any, str] = {}  # the message of the NotImplementedError

    def __call__(self, fn: Any, sig: Any, _firstcall: bool = True) -> Callable[..., Any]:
        question = fn, sig
        try:
            made = self.found.get(question)
        except TypeError:  # a constant index that can't be hashed
            return self.numbas(self.context, fn, sig, _firstcall)
        if made is None:
            made = element(self.context, fn, sig) or loop(self.context, fn, sig)
            if made is None:
                numbas = self._look(question, _firstcall)
                made = division(self.context, fn, sig, numbas, by_selection=self.many) or numbas
            self.found[question] = made
        return made

    def _look(self, question: tuple[Any, Any], first: bool) -> Callable[..., Any]:
        if question in self.missing:
            raise NotImplementedError(self.missing[question])
        try:
            return self.numbas(self.context, *question, first)
        except NotImplementedError as error:
            self.missing[question] = str(error)
            raise
