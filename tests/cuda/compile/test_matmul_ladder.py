"""matmul's ladder, built as for the GPU: sums in registers, and the instructions that the page counts."""

import re
from collections import Counter

import pytest

from dualops.cuda.compiler.compile import compile_kernel
from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.launch.device import known
from dualops.cuda.launch.step import Step
from dualops.spec import OPERATORS, Case
from examples.ladder.matmul import STEPS, choices
from tests.cuda.compile.ptx import lto_ir, ptx_of


def step_of(name: str, arch: str) -> Step:
    """Its launch on matrices of 4096 x 4096."""
    case = Case("ladder", "bfloat16", {"a": (4096, 4096), "b": (4096, 4096)})
    problem = absent_problem(OPERATORS["matmul"], case, False)
    (found,) = (one for one in choices(problem, problem.outputs(), known(arch)) if one.rung == name)
    (step,) = found.steps()
    return step


# of a thread: all of them for a slice of its block's tile, but on CUDA cores: 8 and 4 steps of it
SHARED_TILES = {"bar.sync": 2, "fma.rn.f32": 8, "ld.shared.v4.f32": 2, "ld.shared.f32": 8}
REGISTER_TILES = {"bar.sync": 2, "fma.rn.f32": 4 * 64, "ld.shared.v4.f32": 8 + 8}
A_SLICE = {"bar.sync": 2, "mma.sync": 4 * 4 * 8, "ldmatrix": 4 * (4 + 4)}


@pytest.mark.parametrize(
    ("name", "arch", "expected"),
    [
        ("shared_tiles", "sm_90a", SHARED_TILES),
        ("register_tiles", "sm_80", REGISTER_TILES),
        ("tensor_cores", "sm_80", {**A_SLICE, "cp.async.cg": 16}),
        ("copies_ahead", "sm_90a", {**A_SLICE, "cp.async.cg": 3 * 16}),
        ("boxes", "sm_90a", {"wgmma.mma_async": 4}),
        ("roles", "sm_90a", {"wgmma.mma_async": 2 * 4, "setmaxnreg": 2}),  # the first slice's are others
    ],
)
def test_a_step_keeps_its_sums_in_registers_and_has_what_the_page_counts(name, arch, expected):
    step = step_of(name, arch)
    report = compile_kernel(step.kernel, arch, step.shared_bytes, lto_ir(step.kernel, arch)).report
    assert report.allowed and not report.stack_bytes and not report.spill_bytes, report
    blocks = step.kernel.min_blocks
    assert blocks * (report.dynamic_shared + report.static_shared) <= known(arch).shared_memory_per_block
    assert blocks * report.registers * step.kernel.threads <= 65536, report
    text = ptx_of(step.kernel, arch)
    assert ".f64" not in text and ".local" not in text
    words = {*SHARED_TILES, *A_SLICE, "cp.async.cg", "wgmma.mma_async", "setmaxnreg"}
    found = Counter(re.findall(rf"(?<![.\w])({'|'.join(map(re.escape, sorted(words, reverse=True)))})", text))
    assert {word: found[word] for word in expected} == expected
    assert bool(found["mma.sync"]) == ("mma.sync" in expected)


def test_clusters():
    """The one Config of a real rung that no other test builds."""
    step = step_of([*STEPS][-1], "sm_90a")
    report = compile_kernel(step.kernel, "sm_90a", step.shared_bytes).report
    assert report.allowed and not report.stack_bytes and not report.spill_bytes, report
