"""A part of the COMPILE list, built as for a GPU: registers, stack, spills, the PTX. `make check` builds all of it."""

from __future__ import annotations

import re

import pytest

import dualops.cuda  # noqa: F401  registers the operators
from dualops.cuda import device
from dualops.cuda.compile import compile_kernel
from dualops.cuda.launch import steps_to_check
from dualops.cuda.step import Step
from dualops.spec import OPERATORS
from tests.cuda.compile.ptx import compile_list, ptx_of

ARCH = "sm_90a"
MOST_BUILDS = 60  # of an operator
IN_DOUBLE = ("dualops.cuda.rope.tables.build",)  # angles are computed in float64, whatever the result's dtype is
READ_WIDE = ("dualops.cuda.retention.simt_rows.build_rows",)  # aligned in what they read; they write one by one
OTHERS = [arch for arch in device.ARCHITECTURES if arch != ARCH]


def kind_of(identity: str) -> str:
    """The build function of a kernel."""
    return identity.partition("(")[0]


def sample(dtypes: tuple[str, ...]) -> dict[str, tuple[Step, str]]:
    """The last build of each build function in each of these dtypes, by the kernel's identity."""
    found = {}
    for operator in OPERATORS:
        for step, dtype in compile_list(operator, ARCH).values():
            if dtype in dtypes:
                found[kind_of(step.kernel.identity), dtype] = step, dtype
    return {step.kernel.identity: (step, dtype) for step, dtype in found.values()}


BUILDS = [pytest.param(step, id=identity) for identity, (step, _) in sample(("float32", "bfloat16")).items()]
TEXTS = [pytest.param(step.kernel, dtype, id=identity) for identity, (step, dtype) in sample(("float32",)).items()]


@pytest.mark.parametrize("step", BUILDS)
def test_a_build_is_allowed_and_keeps_its_values_in_registers(step):
    report = compile_kernel(step.kernel, ARCH, step.shared_bytes).report
    assert report.allowed and not report.stack_bytes and not report.spill_bytes, report
    assert 0 < report.registers <= 255 and report.cubin_bytes > 0, report
    assert report.static_shared + report.dynamic_shared <= device.known(ARCH).shared_memory_per_block, report


def test_the_check_lists_every_kernel_once_in_however_many_parts():
    whole = [step.kernel.identity for step in steps_to_check(ARCH)]
    parts = [step.kernel.identity for part in range(3) for step in steps_to_check(ARCH, part, 3)]
    assert len(whole) == len(set(whole)) == len(parts)
    assert set(whole) == set(parts) == {name for operator in OPERATORS for name in compile_list(operator, ARCH)}


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_list_is_short_and_not_empty(operator):
    steps = compile_list(operator, ARCH)
    assert 0 < len(steps) <= MOST_BUILDS
    if not OPERATORS[operator].parent:
        assert {dtype for _, dtype in steps.values()} == {"float64", "float32", "float16", "bfloat16"}


@pytest.mark.parametrize(("kernel", "dtype"), TEXTS)
def test_ptx(kernel, dtype):
    """No double precision but in float64's kernels, no local memory, and 16 bytes at a time where rows are aligned."""
    text = ptx_of(kernel, ARCH)
    assert text.count(".visible .entry") == 1
    assert ".local" not in text
    if dtype != "float64" and kind_of(kernel.identity) not in IN_DOUBLE:
        found = [line.strip() for line in text.splitlines() if ".f64" in line]
        assert not found, found[:5]
    if "aligned=True" in kernel.identity:
        assert re.search(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.f64|cp\.async\.bulk", text)
        wide = re.search(r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.f64|cp\.async\.bulk\.global", text)
        assert wide or kind_of(kernel.identity) in READ_WIDE


@pytest.mark.parametrize("arch", OTHERS)
@pytest.mark.parametrize("operator", [name for name, spec in OPERATORS.items() if not spec.parent])
def test_a_sample_for_other_architectures(operator, arch):
    """Each build function on one of them, with a build from another place of its list each time."""
    steps = compile_list(operator, arch)
    kinds: dict[str, list[str]] = {}
    for identity in steps:
        kinds.setdefault(kind_of(identity), []).append(identity)
    for i, identities in enumerate(kinds.values()):
        if i % len(OTHERS) == OTHERS.index(arch):
            step, _ = steps[identities[i % len(identities)]]
            report = compile_kernel(step.kernel, arch, step.shared_bytes).report
            assert report.arch == arch and report.allowed, report


def test_no_two_architectures_share_a_limit_by_mistake():
    assert device.known("sm_90a").shared_memory_per_block == 227 * 1024
    assert device.known("sm_86").shared_memory_per_block == 99 * 1024
    with pytest.raises(ValueError, match="arch is 'sm_90', expected one of sm_80"):
        device.known("sm_90")
