"""What numba-cuda imports: NumPy without `row_stack`, as 2.5 is, and no linear algebra of SciPy's."""

from pathlib import Path

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


def test_linear_algebra_of_scipy_is_not_imported(tmp_path: Path):
    (tmp_path / "scipy/linalg").mkdir(parents=True)
    (tmp_path / "scipy/__init__.py").write_text("__version__ = '1.16.0'")
    (tmp_path / "scipy/linalg/__init__.py").write_text("print('imported')")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from dualops.cuda.compiler.compile import lto_ir
from tests.cuda.compile.small import ARCH, build
print(len(lto_ir(build(3), ARCH)) > 0, "scipy.linalg" in sys.modules)
from numba.cuda.np.linalg import ensure_blas
try:
    ensure_blas()
except ImportError:
    print("its own again")
"""
    done = run(program)
    assert done.stdout == "True False\nimported\nits own again\n", done.stderr
