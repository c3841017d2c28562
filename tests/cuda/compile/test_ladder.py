"""softmax's ladder, compiled for the GPU: all values stay in registers, even for the longest supported rows."""

import re

import pytest

from dualops.cuda.compiler.compile import compile_kernel
from dualops.cuda.launch.step import Step
from examples.ladder.softmax import STEPS
from tests.cuda.compile.ptx import ptx_of

ARCH = "sm_90a"


def step_of(name: str, dtype: str, columns: int) -> Step:
    configure, launch = STEPS[name].configure, STEPS[name].launch
    return launch(configure(columns, dtype, True), dtype, 1000, columns)


# the steps whose kernels are on no COMPILE list, each with as many elements per thread as it can keep
@pytest.mark.parametrize(
    ("name", "dtype", "columns"),
    [
        ("tree", "float64", 4096),
        ("shuffles", "bfloat16", 4096),
        ("registers", "bfloat16", 16384),
        ("registers", "float64", 8192),
        ("vectors", "float32", 16384),
        ("vectors", "float64", 8192),
    ],
)
def test_a_step_keeps_its_values_in_registers(name, dtype, columns):
    step = step_of(name, dtype, columns)
    report = compile_kernel(step.kernel, ARCH).report
    assert report.allowed and not report.stack_bytes and not report.spill_bytes, report
    numbers = {"tree": 2 * 256, "shuffles": 2 * 8, "registers": 2 * 8, "vectors": 2 * 8}[name]
    assert report.static_shared == numbers * (8 if dtype == "float64" else 4)


@pytest.mark.parametrize(
    ("name", "barriers", "shuffles", "loads"),
    [
        ("tree", 18, 0, {"u16"}),  # in loops
        ("shuffles", 2, 16, {"u16"}),
        ("registers", 2, 16, ["u16"] * 4),
        ("vectors", 2, 16, ["v4.b32"]),
        ("online", 1, 16, {"v4.b32"}),
    ],
)
def test_what_the_page_counts(name, barriers, shuffles, loads):
    """For a row of 1024 bfloat16, a thread keeps four elements, from four loads, or eight from one load."""
    text = ptx_of(step_of(name, "bfloat16", 1024).kernel, ARCH)
    assert ".f64" not in text and ".local" not in text
    assert (text.count("bar.sync"), text.count("shfl.sync")) == (barriers, shuffles)
    found = re.findall(r"ld\.global\S*?\.(u16|v4\.b32)\b", text)
    assert type(loads)(found) == loads
