"""NumPy without `row_stack`, as 2.5 is, which numba-cuda 0.30 asks for when it is imported."""

from __future__ import annotations

from .small import run

PROGRAM = """
import numpy
vars(numpy).pop("row_stack", None)  # older ones have it
assert not hasattr(numpy, "row_stack")
from dualops.cuda.compiler.backend import cuda
assert not hasattr(numpy, "row_stack")
from dualops.cuda.compiler.compile import compile_kernel
from tests.cuda.compile.small import ARCH, build
print(cuda.__name__, len(compile_kernel(build(3), ARCH).cubin) > 0)
"""


def test_kernels_are_built_and_numpy_stays_what_it_was():
    done = run(PROGRAM)
    assert done.stdout == "numba.cuda True\n", done.stderr


def test_where_numpy_has_the_name_it_stays():
    done = run("import numpy\nnumpy.row_stack = own = numpy.vstack\nimport dualops.cuda\nprint(numpy.row_stack is own)")
    assert done.stdout == "True\n", done.stderr
