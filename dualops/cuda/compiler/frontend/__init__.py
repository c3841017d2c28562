"""From a kernel to LTO-IR: Numba's own passes, without the work that they do over and over. No GPU is needed.

Members of nouns and records are constants, which they are not to Numba (`members`). But for that the code is what
`cuda.compile` makes in ten to thirty times as long; tests hold the machine code of the two against each other.
What is done less often:

    bytecode     of a function is interpreted for each closure of it. Here: once for a code object (`verbs`).
    verbs        Numba inlines a function into its caller, and both into the caller's caller, by deep copies. Here: each
                 statement is copied once, into the kernel (`inlining`).
    calls        of a long verb at many places are calls: Numba compiles it once, and NVVM inlines it (`called`).
    assignments  Numba walks through the whole kernel twice for each variable that is assigned to again. Here: through
                 the statements that mention it (`assignments`).
    types        Numba asks all constraints in rounds until no type changes. Here: those again whose variables changed
                 (`inference`).
    signatures   Numba tries all overloads and ufuncs for each `a + b`, for each literal, and again to lower it. Here:
                 once in the life of the process (`answers`).
    lowering     has a shorter way for each statement (`lowering`), and for elements of arrays, divisions by constants
                 and loops (`operations`).
    stack        Values that are read in another block go through the stack. Here: few (`lowering`).
    labels       of blocks double with each function that is inlined in one that is inlined. Here: they count blocks.
    lifetimes    of variables are computed after each of nine passes, and to count references. Here: never, since nobody
                 counts them (`passes`).
    rewrites     of strings, constant arrays, closures and `with` look through each function. Here: where there are any.
    collections  of garbage run while Numba makes objects that live until it is done. Here: afterwards
                 (`compile.without_collections`), when those have been taken apart (`cycles`).

This is the one package that uses internals of Numba's compiler: of numba-cuda 0.30, see `known`.
"""

from __future__ import annotations

from . import known  # noqa: F401  before Numba's own modules, which may be others, or import SciPy

# isort: split

from collections.abc import Callable, Sequence
from typing import Any

from numba.core import types
from numba.core.compiler_lock import global_compiler_lock
from numba.cuda import utils
from numba.cuda.compiler import compile_extra, kernel_fixup
from numba.cuda.core.callconv import CUDACallConv
from numba.cuda.cudadrv import nvvm
from numba.cuda.descriptor import cuda_target
from numba.cuda.flags import CUDAFlags

from . import answers, assignments, inlining, verbs  # noqa: F401  their passes
from .by_value import take_by_value
from .called import calls_of_a_kernel
from .cycles import untie_module
from .passes import Compiler
from .read_arrays import in_global_memory


def ltoir(
    function: Callable[..., None], argtypes: Sequence[Any], cc: tuple[Any, ...], launch_bounds: tuple[int, int]
) -> bytes:
    """Compile a kernel to LTO IR, as `cuda.compile(function, void(*argtypes), cc=cc, device=False, abi="numba",
    output="ltoir", launch_bounds=launch_bounds)` does. Raises Numba's errors.

    launch_bounds: threads of a block, and how many blocks should fit on an SM.
    """
    flags = CUDAFlags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.inline, flags.error_model = "never", "numpy"
    flags.nvvm_options = {"fastmath": False, "opt": 3, "gen-lto": None}
    flags.compute_capability = cc
    typing, target = cuda_target.typing_context, cuda_target.target_context
    with global_compiler_lock, utils.numba_target_override(), in_global_memory(), calls_of_a_kernel():
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
        take_by_value(entry)
        nvvm.set_launch_bounds(entry, launch_bounds)
        try:
            return library.get_ltoir(cc=cc)
        finally:
            untie_module(library)


def prepare() -> None:
    """Load Numba's declarations of types and functions, which the first kernel would wait for."""
    with global_compiler_lock:
        cuda_target.typing_context.refresh()
        cuda_target.target_context.refresh()
