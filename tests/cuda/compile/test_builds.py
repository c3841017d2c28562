"""A part of the COMPILE list, built as for a GPU: registers, stack, spills, the PTX. `make check` builds all of it."""

import re
from collections.abc import Iterator

import pytest

import dualops.cuda  # noqa: F401  registers the operators
from dualops.cuda.compiler.compile import compile_kernel
from dualops.cuda.compiler.offline import steps_to_check
from dualops.cuda.launch import device
from dualops.cuda.launch.step import Step
from dualops.spec import OPERATORS
from tests.cuda.compile.ptx import compile_list, lto_ir, ptx_of

ARCH = "sm_90a"
MOST_BUILDS = 90  # of an operator; attention has 34 functions that build kernels, on four rungs
# angles and sums of log_decay are computed in float64, whatever the result's dtype is
IN_DOUBLE = ("dualops.cuda.rope.tables.build", "dualops.cuda.retention.decays.build_prefix_sums")
# aligned in what they read; they write one by one
READ_WIDE = (
    "dualops.cuda.retention.simt_rows.build_rows",
    "dualops.cuda.retention.simt_steps.build_state_terms",
    "dualops.cuda.retention.simt_steps.build_step_gradient",
    "dualops.cuda.norm.rows_backward.build_means",
    "dualops.cuda.matmul.gradient.build_column_sums",
)
# ten to twenty seconds each; `make check` builds them in each Config, for several architectures
LEFT_TO_CHECK = {
    f"dualops.cuda.{name}"
    for name in (
        *("flash_attention.sm80.forward.build_forward", "flash_attention.sm90.forward.build_forward"),
        *("flash_attention.sm80.dkv.build_dkv", "flash_attention.sm80.dq.build_dq"),
        *("flash_attention.sm90.dkv.build_dkv", "flash_attention.sm90.dq.build_dq"),
        *("flash_attention.sm90.dkv_split.build_dkv_split", "flash_attention.sm90.fused.build_fused"),
        "flash_attention.sm90.dq_split.build_dq_split_f32",
        *("retention.sm90.chunks.build_chunks", "retention.sm90.wide.build_wide", "retention.sm80.rows.build_rows"),
    )
}


def kind_of(identity: str) -> str:
    """The build function of a kernel."""
    return identity.partition("(")[0]


def sample() -> Iterator[tuple[Step, str, str]]:
    """A build of each build function, the architecture and the dtype: architectures in turns of those that have it;
    float32 and bfloat16 too, where there are such builds; and of these the one with the shortest name, which has few
    options and is soon compiled.
    """
    found: dict[str, dict[str, dict[str, list[Step]]]] = {}
    for operator in OPERATORS:
        for arch in device.ARCHITECTURES:
            for step, dtype in compile_list(operator, arch).values():
                kind = kind_of(step.kernel.identity)
                found.setdefault(kind, {}).setdefault(arch, {}).setdefault(dtype, []).append(step)
    for number, (kind, by_arch) in enumerate(found.items()):
        if kind in LEFT_TO_CHECK:
            continue
        arch = list(by_arch)[number % len(by_arch)]
        by_dtype = by_arch[arch]
        wanted = ("float32", "bfloat16", *by_dtype) if number % 2 else ("bfloat16", "float32", *by_dtype)
        dtype = next(dtype for dtype in wanted if dtype in by_dtype)
        yield min(by_dtype[dtype], key=lambda step: len(step.kernel.identity)), arch, dtype


SAMPLE = [pytest.param(*found, id=f"{found[0].kernel.identity}-{found[1]}") for found in sample()]


@pytest.mark.parametrize(("step", "arch", "dtype"), SAMPLE)
def test_a_build_is_allowed_and_keeps_its_values_in_registers(step, arch, dtype):
    report = compile_kernel(step.kernel, arch, step.shared_bytes, lto_ir(step.kernel, arch)).report
    assert report.allowed and not report.stack_bytes and not report.spill_bytes, report
    assert 0 < report.registers <= 255 and report.cubin_bytes > 0, report
    assert report.static_shared + report.dynamic_shared <= device.known(arch).shared_memory_per_block, report


def test_the_check_lists_every_kernel_once():
    names = [step.kernel.identity for step in steps_to_check(ARCH)]
    assert len(names) == len(set(names))
    assert set(names) == {name for operator in OPERATORS for name in compile_list(operator, ARCH)}


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_list_is_short_and_not_empty(operator):
    steps = compile_list(operator, ARCH)
    assert 0 < len(steps) <= MOST_BUILDS
    if not OPERATORS[operator].parent:
        assert {dtype for _, dtype in steps.values()} == {"float64", "float32", "float16", "bfloat16"}


@pytest.mark.parametrize(("step", "arch", "dtype"), SAMPLE)
def test_ptx(step, arch, dtype):
    """No double precision but in float64's kernels, no local memory, and 16 bytes at a time where rows are aligned."""
    kernel = step.kernel
    text = ptx_of(kernel, arch)
    assert text.count(".visible .entry") == 1
    assert ".local" not in text
    if dtype != "float64" and kind_of(kernel.identity) not in IN_DOUBLE:
        found = [line.strip() for line in text.splitlines() if ".f64" in line]
        assert not found, found[:5]
    if "aligned=True" in kernel.identity:
        assert re.search(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.f64|cp\.async\.bulk", text)
        wide = re.search(r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.f64|cp\.async\.bulk\.global", text)
        assert wide or kind_of(kernel.identity) in READ_WIDE


def test_every_build_function_and_architecture_is_in_the_sample():
    kinds = {kind_of(name) for operator in OPERATORS for name in compile_list(operator, ARCH)}
    assert kinds > LEFT_TO_CHECK
    found = [(kind_of(str(param.id)), str(param.id).rpartition("-")[2]) for param in SAMPLE]
    assert {kind for kind, _ in found} == kinds - LEFT_TO_CHECK and len(found) == len(kinds - LEFT_TO_CHECK)
    assert {arch for _, arch in found} == set(device.ARCHITECTURES)


def test_no_two_architectures_share_a_limit_by_mistake():
    assert device.known("sm_90a").shared_memory_per_block == 227 * 1024
    assert device.known("sm_86").shared_memory_per_block == 99 * 1024
    with pytest.raises(ValueError, match="arch is 'sm_90', expected one of sm_80"):
        device.known("sm_90")
