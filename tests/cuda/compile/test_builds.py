"""The COMPILE list, built as it would be for the GPU: registers, stack, spills, and what the PTX is made of."""

from __future__ import annotations

import re

import pytest

import dualops.cuda  # noqa: F401  registers the operators
from dualops.cuda import device
from dualops.cuda.backend import Kernel
from dualops.cuda.compile import compile_kernel
from dualops.cuda.launch import check_builds
from dualops.spec import OPERATORS
from tests.cuda.compile.ptx import compile_list, ptx_of

ARCH = "sm_90a"
MOST_BUILDS = 60  # of an operator
OTHERS = [arch for arch in device.ARCHITECTURES if arch != ARCH]


def looked_into(operator: str) -> list[tuple[Kernel, str]]:
    """The builds whose PTX is read; of attention's, which take seconds, the last float32 of each build function."""
    builds = [(step.kernel, dtype) for step, dtype in compile_list(operator, ARCH).values()]
    if not operator.startswith("flash_attention"):
        return builds
    single = [(kernel, dtype) for kernel, dtype in builds if dtype == "float32" and not OPERATORS[operator].parent]
    return list({kind_of(kernel.identity): (kernel, dtype) for kernel, dtype in single}.values())


def kind_of(identity: str) -> str:
    """The build function of a kernel."""
    return identity.partition("(")[0]


BUILDS = [
    pytest.param(kernel, dtype, id=kernel.identity.removeprefix("dualops.cuda."))
    for operator in OPERATORS
    for kernel, dtype in looked_into(operator)
]


@pytest.fixture(scope="module")
def reports():
    return list(check_builds(ARCH))


def test_every_build_is_allowed_and_keeps_its_values_in_registers(reports):
    refused = [report for report in reports if not report.allowed or report.stack_bytes or report.spill_bytes]
    assert not refused
    for report in reports:
        assert 0 < report.registers <= 255 and report.cubin_bytes > 0, report
        assert report.static_shared + report.dynamic_shared <= device.known(ARCH).shared_memory_per_block, report


def test_every_kernel_is_reported_once(reports):
    names = [report.name for report in reports]
    assert len(names) == len(set(names)) == sum(len(compile_list(operator, ARCH)) for operator in OPERATORS)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_list_is_short_and_not_empty(operator):
    steps = compile_list(operator, ARCH)
    assert 0 < len(steps) <= MOST_BUILDS
    if not OPERATORS[operator].parent:
        assert {dtype for _, dtype in steps.values()} == {"float64", "float32", "float16", "bfloat16"}


@pytest.mark.parametrize(("kernel", "dtype"), BUILDS)
def test_ptx(kernel, dtype):
    """No double precision but in float64's kernels, no local memory, and 16 bytes at a time where rows are aligned."""
    text = ptx_of(kernel, ARCH)
    assert text.count(".visible .entry") == 1
    assert ".local" not in text
    if dtype != "float64":
        found = [line.strip() for line in text.splitlines() if ".f64" in line]
        assert not found, found[:5]
    if "aligned=True" in kernel.identity:
        assert re.search(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.f64|cp\.async\.bulk", text)
        assert re.search(r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.f64|cp\.async\.bulk\.global", text)


@pytest.mark.parametrize("arch", OTHERS)
@pytest.mark.parametrize("operator", [name for name, spec in OPERATORS.items() if not spec.parent])
def test_a_sample_for_other_architectures(operator, arch):
    """A kernel of each build function, at a different place in its list for each; of attention on one of them alone."""
    steps = compile_list(operator, arch)
    kinds: dict[str, list[str]] = {}
    for identity in steps:
        kinds.setdefault(kind_of(identity), []).append(identity)
    for i, identities in enumerate(kinds.values()):
        if operator.startswith("flash_attention") and i % len(OTHERS) != OTHERS.index(arch):
            continue
        step, _ = steps[identities[i % len(identities)]]
        report = compile_kernel(step.kernel, arch, step.shared_bytes).report
        assert report.arch == arch and report.allowed, report


def test_no_two_architectures_share_a_limit_by_mistake():
    assert device.known("sm_90a").shared_memory_per_block == 227 * 1024
    assert device.known("sm_86").shared_memory_per_block == 99 * 1024
    with pytest.raises(ValueError, match="arch is 'sm_90', expected one of sm_80"):
        device.known("sm_90")
