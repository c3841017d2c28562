"""matmul's column sums: each dtype, read in both ways, along one axis and along several."""

import re

import pytest

from dualops.cuda.compiler.compile import compile_kernel
from dualops.cuda.matmul import gradient
from dualops.cuda.matmul.gradient import SumsVariant, build_column_sums
from dualops.spec.meta import compute_dtype
from tests.cuda.compile.ptx import lto_ir, ptx_of

ONE_AXIS, SEVERAL = 64, 96  # registers
KINDS = [
    ("sm_90a", "bfloat16", 1, True),
    ("sm_90a", "bfloat16", 1, False),
    ("sm_90a", "bfloat16", 4, True),
    ("sm_90a", "float16", 2, True),
    ("sm_90a", "float32", 1, True),
    ("sm_90a", "float32", 2, False),
    ("sm_90a", "float64", 1, True),
    ("sm_90a", "float64", 1, False),
    ("sm_90a", "float64", 2, True),
    ("sm_80", "bfloat16", 1, True),
    ("sm_100a", "bfloat16", 1, True),
    ("sm_120", "float32", 1, True),
    ("sm_120", "bfloat16", 2, True),
]


@pytest.mark.parametrize(("arch", "dtype", "axes", "aligned"), KINDS)
def test_sums_stay_in_registers_and_loads_are_on_their_way_together(arch, dtype, axes, aligned):
    kernel = build_column_sums(SumsVariant(dtype, compute_dtype(dtype), axes, aligned))
    report = compile_kernel(kernel, arch, 0, lto_ir(kernel, arch)).report
    assert report.allowed, report
    assert report.registers <= (ONE_AXIS if axes == 1 else SEVERAL), report
    wide = re.findall(r"ld\.global\S*\.v[24]\.", ptx_of(kernel, arch))
    assert len(wide) == (gradient.VECTORS_AHEAD if aligned else 0)
