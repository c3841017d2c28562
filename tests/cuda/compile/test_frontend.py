"""Numba's passes without what they do over and over: the machine code is that of `cuda.compile`."""

from __future__ import annotations

import gc
import struct
from typing import Any

import pytest

from dualops.cuda import frontend
from dualops.cuda.backend import Kernel, NumbaError, cuda, types
from dualops.cuda.compile import link, lto_ir
from dualops.cuda.device import compute_capability
from dualops.cuda.step import Step
from dualops.spec import OPERATORS
from tests.cuda.compile.ptx import compile_list
from tests.cuda.compile.small import build, build_wrong

ARCH = "sm_90a"
# of each way to write a kernel the one that is soonest compiled; the whole list was compared when this was written
KINDS = (
    "flash_attention.naive_backward.build_bend",
    "flash_attention.simt_forward.build_forward",
    "lion.dense.build_table",
    "matmul.gradient.build_dz",
    "norm.rows.build_forward",
    "norm.sums.build_sums",
    "retention.simt_states.build_walk",
    "rope.simt.build",
    "softmax.ring.build_forward",
)


def sample() -> list[Any]:
    """The build with the shortest name of each kind."""
    steps = [step for operator in OPERATORS for step, _ in compile_list(operator, ARCH).values()]
    found: dict[str, Step] = {}
    for step in sorted(steps, key=lambda step: len(step.kernel.identity)):
        found.setdefault(step.kernel.identity.partition("(")[0].removeprefix("dualops.cuda."), step)
    return [pytest.param(found[kind].kernel, id=kind) for kind in KINDS]


def usual(kernel: Kernel) -> bytes:
    code, _ = cuda.compile(
        kernel.function,
        types.void(*kernel.argtypes),
        cc=compute_capability(ARCH),
        device=False,
        abi="numba",
        output="ltoir",
        launch_bounds=(kernel.threads, kernel.min_blocks),
    )
    return code


def machine_code(cubin: bytes) -> bytes:
    """The section .text.<kernel> of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in sections:
        if cubin[sections[names][4] + name :].startswith(b".text."):
            return cubin[offset : offset + length]
    raise AssertionError("a cubin without code")


@pytest.mark.parametrize("kernel", sample())
def test_the_machine_code_is_the_same(kernel):
    ours, numbas = (machine_code(link(code, ARCH)[0]) for code in (lto_ir(kernel, ARCH), usual(kernel)))
    assert ours == numbas and len(ours) > 500


def test_errors_are_numbas():
    messages = []
    for compiled in (lambda kernel: lto_ir(kernel, ARCH), usual):
        with pytest.raises(NumbaError) as caught:
            compiled(build_wrong(10))
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "a word" in messages[0]


def test_answers_about_types_are_kept_and_asked_for_again():
    """The same operators again cost no further answers."""
    lto_ir(build(11), ARCH)
    before = len(frontend.ANSWERS)
    lto_ir(build(12), ARCH)
    assert before == len(frontend.ANSWERS) > 0
    assert all(isinstance(function, types.Function) for function, *_ in frontend.ANSWERS)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled):
    try:
        gc.enable() if enabled else gc.disable()
        lto_ir(build(13), ARCH)
        with pytest.raises(NumbaError):
            lto_ir(build_wrong(11), ARCH)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
