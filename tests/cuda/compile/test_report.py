"""What the report says of kernels that were made for it: registers, stack, spills, shared memory, and the verdict."""

import pytest

from dualops.cuda.compiler import compile as compiler
from dualops.cuda.compiler.backend import builds, cuda, f32, i32, kernel, pointer
from dualops.cuda.compiler.compile import compile_kernel

ARCH = "sm_90a"


@builds
def build_plain(threads):
    @kernel(pointer(f32), pointer(f32), i32, threads=threads)
    def plain(y, x, N):
        shared = cuda.shared.array(100, f32)
        i = cuda.grid(1)
        if cuda.threadIdx.x < 100:
            shared[cuda.threadIdx.x] = x[i]
        cuda.syncthreads()
        if i < N:
            y[i] = shared[99 - i % 100]

    return plain


@builds
def build_stack():
    @kernel(pointer(f32), pointer(f32), pointer(i32), threads=64)
    def looked_up(y, x, where):
        kept = cuda.local.array(64, f32)
        for i in range(64):
            kept[where[i]] = x[i]  # an index that is known only when it runs: registers have none
        y[0] = kept[where[64]]

    return looked_up


@builds
def build_spills():
    @kernel(pointer(f32), pointer(f32), threads=1024, min_blocks=2)
    def crowded(y, x):
        kept = cuda.local.array(80, f32)
        for i in range(80):
            kept[i] = x[cuda.threadIdx.x + 1024 * i]
        cuda.syncthreads()
        for i in range(80):
            y[cuda.threadIdx.x + 1024 * i] = kept[i]

    return crowded


def test_a_plain_kernel():
    made = compile_kernel(build_plain(128), ARCH, 1000)
    report = made.report
    assert report.name == f"{__name__}.build_plain(128)" and report.arch == ARCH
    assert 8 <= report.registers <= 64
    assert (report.stack_bytes, report.spill_bytes) == (0, 0)
    assert (report.static_shared, report.dynamic_shared) == (400, 1000)
    assert report.cubin_bytes == len(made.cubin) and made.cubin[:4] == b"\x7fELF"
    assert "plain" in made.entry and made.entry.encode() in made.cubin
    assert report.complaints == () and report.allowed and report.seconds > 0


def test_a_stack_is_reported_and_not_allowed():
    report = compile_kernel(build_stack(), ARCH).report
    assert report.stack_bytes >= 256 and not report.allowed


def test_spills_are_reported_and_not_allowed():
    report = compile_kernel(build_spills(), ARCH).report
    assert report.registers <= 32 and report.spill_bytes > 0 and not report.allowed


def test_a_kernel_that_nothing_was_said_of_is_built_and_not_allowed(monkeypatch):
    real = compiler.link
    monkeypatch.setattr(compiler, "link", lambda *args: (real(*args)[0], ""))
    made = compile_kernel(build_plain(64), ARCH)
    assert not made.report.allowed and made.entry.encode() in made.cubin


@pytest.mark.parametrize(("dynamic", "allowed"), [(227 * 1024 - 400, True), (227 * 1024 - 399, False)])
def test_shared_memory_up_to_the_architectures_limit(dynamic, allowed):
    assert compile_kernel(build_plain(128), ARCH, dynamic).report.allowed is allowed


@pytest.mark.parametrize(
    ("log", "complaints", "allowed"),
    [
        ("Used 40 registers, used 1 barriers, 16 bytes smem\n", 0, True),
        ("ptxas info : (C7510) Potential Performance Loss: wgmma serialized\nUsed 40 registers\n", 1, False),
        (
            "ptxas info : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non "
            "wgmma instructions defining accumulator registers of a wgmma\nUsed 40 registers\n",
            1,
            False,
        ),
        ("ptxas info : (C7519) warpgroup.arrive is injected\nUsed 40 registers\n", 1, True),
        ("ptxas warning : Value of threads per SM is out of range\nUsed 40 registers\n", 1, True),
        ("Used 40 registers\n 8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n", 0, False),
        ("Used 255 registers\n", 0, True),
    ],
)
def test_what_the_assembler_says(log, complaints, allowed):
    report = compiler._report(build_plain(128), ARCH, 0, b"", log, 0.0)
    assert len(report.complaints) == complaints and report.allowed is allowed


def test_registers_that_leave_no_room_for_a_block():
    assert compiler._report(build_plain(256), ARCH, 0, b"", "Used 255 registers\n", 0.0).allowed
    assert not compiler._report(build_plain(256), ARCH, 0, b"", "", 0.0).allowed  # the linker said nothing
    assert not compiler._report(build_plain(512), ARCH, 0, b"", "Used 255 registers\n", 0.0).allowed


def test_a_cubin_without_a_kernel_is_an_error():
    with pytest.raises(RuntimeError, match="a cubin without a kernel"):
        compiler._entry(b"nothing")
