"""From a kernel to LTO-IR: Numba's own passes, without the work that they do over and over. No GPU is needed.

The code is what `cuda.compile` makes, which takes twice as long; tests hold the machine code of the two against each
other. What is done less often:

    verbs        Numba makes the IR of an inlined function anew for each call of it. Here: once a kernel.
    types        Numba tries all overloads and ufuncs for each `a + b`. Here: once in the life of the process.
    lifetimes    of variables are computed after each of six passes. Here: before lowering, which needs them.
    rewrites     of strings and of constant arrays look through the typed kernel. Here: not at all, there are none.
    collections  of garbage run while Numba makes objects that live until it is done. Here: afterwards.

This is the one module that knows Numba's compiler from inside: of numba-cuda 0.30, which pyproject.toml asks for.
"""

# numba-cuda takes the place of numba's own `numba.cuda` when Python runs, which pyright does not see:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from numba.core import types
from numba.core.compiler_lock import global_compiler_lock
from numba.cuda import utils
from numba.cuda.compiler import CUDACompiler, DefaultPassBuilder, compile_extra, kernel_fixup
from numba.cuda.core import ir
from numba.cuda.core.analysis import compute_cfg_from_blocks
from numba.cuda.core.callconv import CUDACallConv
from numba.cuda.core.compiler_machinery import PassManager, register_pass
from numba.cuda.core.inline_closurecall import InlineWorker, callee_ir_validator
from numba.cuda.core.ir_utils import build_definitions, guard, simplify_CFG
from numba.cuda.core.ssa import reconstruct_ssa
from numba.cuda.core.transforms import canonicalize_cfg
from numba.cuda.core.typed_passes import NopythonRewrites, NopythonTypeInference, PreLowerStripPhis
from numba.cuda.core.untyped_passes import InlineInlinables, ReconstructSSA
from numba.cuda.cudadrv import nvvm
from numba.cuda.descriptor import cuda_target
from numba.cuda.flags import CUDAFlags
from numba.cuda.target import CUDATypingContext


def ltoir(
    function: Callable[..., None], argtypes: Sequence[Any], cc: tuple[Any, ...], launch_bounds: tuple[int, int]
) -> bytes:
    """What `cuda.compile(function, void(*argtypes), cc=cc, device=False, abi="numba", output="ltoir",
    launch_bounds=launch_bounds)` gives: (threads, blocks that should fit on an SM). Raises Numba's errors.
    """
    flags = CUDAFlags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.inline, flags.error_model = "never", "numpy"
    flags.nvvm_options = {"fastmath": False, "opt": 3, "gen-lto": None}
    flags.compute_capability = cc
    typing, target = cuda_target.typing_context, cuda_target.target_context
    with global_compiler_lock, utils.numba_target_override(), without_collections():
        made = compile_extra(
            typing,
            target,
            function,
            tuple(argtypes),
            types.void,
            flags,
            {},
            pipeline_class=Compiler,
            call_conv=CUDACallConv(target),
        )
        library = made.library
        library.finalize()
        entry = library.get_function(made.fndesc.llvm_func_name)
        kernel_fixup(entry, False)
        nvvm.set_launch_bounds(entry, launch_bounds)
        return library.get_ltoir(cc=cc)


def prepare() -> None:
    """What the first kernel would wait for: Numba's declarations of all that it knows."""
    with global_compiler_lock:
        cuda_target.typing_context.refresh()
        cuda_target.target_context.refresh()


@contextmanager
def without_collections() -> Iterator[None]:
    """Automatic collections wait until it is over, in all threads."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Compiler(CUDACompiler):
    """Numba's pipeline for CUDA with some of its passes replaced."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.verbs: dict[Callable[..., Any], Any] = {}  # their IR

    def define_pipelines(self) -> list[PassManager]:
        return [leaner(manager) for manager in super().define_pipelines()]


def leaner(manager: PassManager) -> PassManager:
    """The same pipeline with the passes below."""
    made = PassManager(manager.pipeline_name)
    for each, told in manager.passes:
        if each is not NopythonRewrites:
            made.add_pass(REPLACED.get(each, each), told)
    made.finalize()
    return made


@register_pass(mutates_CFG=True, analysis_only=False)
class InlineVerbs(InlineInlinables):
    """Inlines functions, whose IR it makes once."""

    _name = "inline_verbs"

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
        return super().inline_ir(*args, **options)

    def run_untyped_passes(self, func: Callable[..., Any], enable_ssa: bool = False) -> Any:
        """The IR of a function, to be copied."""
        verbs = self.pipeline.verbs
        if func not in verbs:
            verbs[func] = super().run_untyped_passes(func, enable_ssa)
        return verbs[func]


@register_pass(mutates_CFG=False, analysis_only=False)
class SingleAssignment(ReconstructSSA):
    """Numba's, without lifetimes."""

    _name = "single_assignment"

    def run_pass(self, state: Any) -> bool:
        state.func_ir = reconstruct_ssa(state.func_ir)
        self._patch_locals(state)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class KnownTypes(NopythonTypeInference):
    """Numba's type inference, which asks a typing context that remembers its answers."""

    _name = "known_types"

    def run_pass(self, state: Any) -> bool:
        asked = state.typingctx
        state.typingctx = remembering(asked)
        try:
            return super().run_pass(state)
        finally:
            state.typingctx = asked


# (function, types of its arguments, options) -> signature
ANSWERS: dict[tuple[Any, ...], Any] = {}


class Remembering(CUDATypingContext):
    """Another context's twin, which it shares everything with, that answers what it was asked before."""

    def __init__(self, context: CUDATypingContext):
        self.__dict__ = context.__dict__

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


@register_pass(mutates_CFG=False, analysis_only=False)
class StripPhis(PreLowerStripPhis):
    """Numba's, without lifetimes."""

    _name = "strip_phis_alone"

    def run_pass(self, state: Any) -> bool:
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        return True


REPLACED = {
    InlineInlinables: InlineVerbs,
    ReconstructSSA: SingleAssignment,
    NopythonTypeInference: KnownTypes,
    PreLowerStripPhis: StripPhis,
}
