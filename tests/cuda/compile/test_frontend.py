"""Numba's passes without what they do over and over: the machine code is that of `cuda.compile`."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from numba.cuda.core.untyped_passes import IRProcessing  # pyright: ignore[reportMissingImports]

from dualops.cuda.compiler.backend import Kernel, Namespace, NumbaError, cuda, f32, i32, kernel, pointer, types, verb
from dualops.cuda.compiler.compile import link, lto_ir
from dualops.cuda.compiler.frontend import answers, known
from dualops.cuda.compiler.frontend.members import settle_members
from dualops.cuda.compiler.frontend.passes import StripPhis
from dualops.cuda.launch.device import compute_capability
from dualops.cuda.launch.step import Step
from dualops.spec import OPERATORS
from tests.cuda.compile.ptx import compile_list
from tests.cuda.compile.small import build, build_wrong

ARCH = "sm_90a"
# of each way to write a kernel the one that is soonest compiled; the whole list was compared when this was written
KINDS = (
    "flash_attention.naive_backward.build_bend",
    "lion.dense.build_table",
    "matmul.gradient.build_dz",
    "norm.sums.build_sums",
    "retention.simt_states.build_walk",
    "rope.simt.build",
    "rows.cluster.build",
    "rows.registers.build",
)


def sample() -> list[Any]:
    """The build with the shortest name of each kind."""
    steps = [step for operator in OPERATORS for step, _ in compile_list(operator, ARCH).values()]
    found: dict[str, Step] = {}
    for step in sorted(steps, key=lambda step: len(step.kernel.identity)):
        found.setdefault(step.kernel.identity.partition("(")[0].removeprefix("dualops.cuda."), step)
    return [pytest.param(found[kind].kernel, id=kind) for kind in KINDS]


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Numba's own passes see the constants that nouns and records are settled to."""

    def run_pass(self: Any, state: Any) -> bool:
        done = process(self, state)
        settle_members(state.func_ir)
        return done

    process = IRProcessing.run_pass
    monkeypatch.setattr(IRProcessing, "run_pass", run_pass)


def usual(kernel: Kernel) -> bytes:
    made, _ = cuda.compile(
        kernel.function,
        types.void(*kernel.argtypes),
        cc=compute_capability(ARCH),
        device=False,
        abi="numba",
        output="ltoir",
        launch_bounds=(kernel.threads, kernel.min_blocks),
    )
    return made


def machine_code(cubin: bytes) -> bytes:
    """The section .text.<kernel> of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in sections:
        if cubin[sections[names][4] + name :].startswith(b".text."):
            return cubin[offset : offset + length]
    raise AssertionError("a cubin without code")


def code(kernel: Kernel) -> bytes:
    return machine_code(link(lto_ir(kernel, ARCH), ARCH)[0])


@pytest.mark.parametrize("kernel", sample())
def test_the_machine_code_is_the_same(kernel):
    assert code(kernel) == machine_code(link(usual(kernel), ARCH)[0]) and len(code(kernel)) > 500


def test_errors_are_numbas():
    messages = []
    for compiled in (lambda kernel: lto_ir(kernel, ARCH), usual):
        with pytest.raises(NumbaError) as caught:
            compiled(build_wrong(10))
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "a word" in messages[0]


def test_answers_about_types_are_kept_and_asked_for_again():
    lto_ir(build(11), ARCH)
    known = answers.ANSWERS, answers.SIGNATURES
    before = [len(kept) for kept in known]
    lto_ir(build(12), ARCH)
    assert before == [len(kept) for kept in known] and min(before) > 0
    kept = {type(part) for question in answers.ANSWERS for part in question}
    assert kept <= {int, tuple}, "a question holds numbers of types, and no type that would live as long"


@kernel(pointer(f32), i32, threads=32)
def with_a_closure(y, N):
    i = cuda.grid(1)

    def twice(value):
        return value * f32(2) + f32(i)

    for k in range(3):
        if i + k < N:
            y[i + k] = twice(y[i + k])
            i = i + 3


@kernel(pointer(f32), i32, threads=32)
def assigned_again(y, N):
    """Variables that reach a place by several ways, through loops and past them."""
    i, step = cuda.grid(1), i32(1)
    while i < N:
        if y[i] > f32(0):
            value, step = y[i], step + i32(1)
        elif y[i] < f32(-1):
            value = -y[i]
        else:
            i, value = i + step, f32(1)
            continue
        for k in range(step):
            if value > f32(100):
                break
            value = value * value + f32(k)
        y[i] = value
        i = i + step


@pytest.mark.parametrize("kernel", [with_a_closure, assigned_again], ids=lambda kernel: kernel.name)
def test_what_our_own_kernels_do_not_have(kernel):
    assert code(kernel) == machine_code(link(usual(kernel), ARCH)[0])


@dataclass(frozen=True)
class Shape:
    """A record with what a kernel may ask of it."""

    lines: int
    wide: bool
    more: str | None

    @property
    def size(self) -> int:
        return 2 * self.lines


class Line(Namespace):
    shape: Shape
    fill: Any  # (frag, x)
    fragment: Any  # () -> a local array


def line_of(shape: Shape) -> Line:
    @verb
    def fill(frag, x):
        for i in range(shape.size):
            frag[i] = x

    @verb
    def fragment():
        return cuda.local.array(shape.size, f32)

    return Line(shape=shape, fill=fill, fragment=fragment)


def asking(shape: Shape) -> Kernel:
    """Asks nouns and records for what must be known while compiling."""
    line = line_of(shape)

    @kernel(pointer(f32), threads=32)
    def asked(y):
        frag = line.fragment()
        more = cuda.local.array(2 * line.shape.lines + shape.size, f32)
        line.fill(frag, y[0])
        line.fill(more, y[1])
        if shape.wide:
            y[0] = frag[cuda.threadIdx.x % line.shape.size] + more[cuda.threadIdx.x % 3]
        else:
            y[0] = "what can't be compiled"
        if shape.more is not None:
            y[1] = "nor this"

    return asked


def named(lines: int) -> Kernel:
    """The same, as Numba knows it."""
    SIZE, MORE = 2 * lines, 4 * lines

    @kernel(pointer(f32), threads=32)
    def asked(y):
        frag = cuda.local.array(SIZE, f32)
        more = cuda.local.array(MORE, f32)
        first = y[0]
        for i in range(SIZE):
            frag[i] = first
        second = y[1]
        for i in range(SIZE):
            more[i] = second
        y[0] = frag[cuda.threadIdx.x % SIZE] + more[cuda.threadIdx.x % 3]

    return asked


def test_members_of_nouns_and_records_are_constants():
    assert code(asking(Shape(3, True, None))) == code(named(3))
    for wrong in (Shape(3, False, None), Shape(3, True, "more")):
        with pytest.raises(NumbaError, match="Cannot cast"):
            lto_ir(asking(wrong), ARCH)


def test_labels_count_blocks(monkeypatch):
    """Of functions within functions: Numba's own would double with each, and NVVM refuses names that are too long."""

    def within(inner: Any) -> Any:
        @verb
        def outer(x):
            if x > f32(2):
                return inner(x)
            return x + f32(1)

        return outer

    @verb
    def nested(x):
        return x * f32(3)

    for _ in range(16):
        nested = within(nested)

    @kernel(pointer(f32), threads=32)
    def deep(y):
        y[0] = nested(y[0])

    def run_pass(self: Any, state: Any) -> bool:
        done = strip(self, state)
        labels.extend(state.func_ir.blocks)
        return done

    labels, strip = list[int](), StripPhis.run_pass
    monkeypatch.setattr(StripPhis, "run_pass", run_pass)
    lto_ir(deep, ARCH)
    assert 2 * 16 < len(labels) < 100 and max(labels) < 100


def test_a_copied_function_is_compiled_as_what_it_is():
    """With the attributes of another, as `functools.wraps` copies them."""

    def of(number: float) -> bytes:
        kept = f32(number)

        def value():
            return kept

        value.__dict__.update(attributes)

        @kernel(pointer(f32), threads=32)
        def asked(y):
            y[0] = value()

        made = code(asked)
        attributes.update(value.__dict__)
        return made

    attributes: dict[str, Any] = {}
    assert of(1) != of(2) and attributes


def test_the_compiler_that_the_front_end_knows_is_the_one_that_is_asked_for():
    bounds = f">={'.'.join(map(str, known.FIRST))},<{'.'.join(map(str, known.BEYOND))}"
    for toolkit in ("cu12", "cu13"):
        assert f'"numba-cuda[{toolkit}]{bounds}"' in (Path(__file__).parents[3] / "pyproject.toml").read_text()
    for right in ("0.30.4", "0.30.5", "0.30.4.post1", "0.30.12"):
        known.check(right)
    for wrong in ("0.30.3", "0.29", "0.31", "0.31.0", "1.0"):
        with pytest.raises(ImportError, match=rf"numba-cuda is {wrong}, expected >= 0.30.4 and < 0.31"):
            known.check(wrong)
