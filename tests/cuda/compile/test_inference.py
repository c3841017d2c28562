"""Types by a worklist are those of Numba's rounds."""

import warnings
from typing import Any

import pytest
from numba.cuda.core.errors import NumbaWarning  # pyright: ignore[reportMissingImports]
from numba.cuda.core.typed_passes import type_inference_stage  # pyright: ignore[reportMissingImports]

from dualops.cuda.compiler.backend import NumbaError, cuda, f32, i32, kernel, pointer, verb
from dualops.cuda.compiler.compile import lto_ir
from dualops.cuda.compiler.frontend import answers, inference
from tests.cuda.compile.ptx import compile_list
from tests.cuda.compile.test_frontend import ARCH, assigned_again, with_a_closure

# of each operator, forward and gradient: kernels with many kinds of statements that are soon compiled
KINDS = (
    ("flash_attention", "sm90.split_kv.build_merge"),
    ("flash_attention", "simt_forward"),
    ("flash_attention", "simt_gradient.build_dq"),
    ("lion", "dense.build_table"),
    ("matmul", "sm90.persistent"),
    ("retention", "sm80.states"),
    ("rms_norm", "norm.ring_backward"),
    ("layer_norm", "rows.registers.build"),
    ("rope", "rope.simt"),
    ("softmax", "rows.chunks.build"),
)


@pytest.fixture
def compared(monkeypatch):
    """Infers each kernel's types also as Numba does, with Numba's own context; tells how many were the same."""

    def both(state: Any) -> Any:
        theirs = type_inference_stage(
            plain(state), state.targetctx, state.func_ir, state.args, state.return_type, state.locals
        )
        types, result, calls, failed = ours(state)
        assert types == theirs.typemap and result == theirs.return_type and not failed
        assert [str(each) for each in calls.values()] == [str(each) for each in theirs.calltypes.values()]
        same.append(len(types))
        return types, result, calls, failed

    def plain(state: Any) -> Any:
        twin = object.__new__(type(state.typingctx).__mro__[2])
        twin.__dict__ = state.typingctx.__dict__
        assert not isinstance(twin, answers.Twin)
        return twin

    same, ours = list[int](), answers.inferred
    monkeypatch.setattr(answers, "inferred", both)
    return same


def smallest(operator: str, kind: str) -> Any:
    """The build with the shortest name."""
    steps = [step for step, _ in compile_list(operator, ARCH).values() if kind in step.kernel.identity]
    return min((step.kernel for step in steps), key=lambda kernel: len(kernel.identity))


@pytest.mark.parametrize(("operator", "kind"), KINDS)
def test_types_of_operators_are_numbas(compared, operator, kind):
    lto_ir(smallest(operator, kind), ARCH)
    assert compared and compared[0] > 100


@verb
def counted(n):
    """A number that begins as a literal, and one that is unified on the way."""
    total, last = 0, i32(0)
    for k in range(n):
        if k % 3 == 0:
            total = total + last
        last = i32(k)
    return total


@kernel(pointer(f32), i32, threads=32)
def unified(y, N):
    """Types that change after others were made of them: in loops, by tuples and by items."""
    pair = (N, 1)
    mixed = 0
    for k in range(N):
        before = mixed
        mixed = before + y[k]
        if before > f32(3):
            pair = (i32(k), pair[1] + 1)
    y[0] = mixed + f32(pair[0]) + f32(counted(N)) + f32(pair[1])


@pytest.mark.parametrize("kernel", [unified, assigned_again, with_a_closure], ids=lambda kernel: kernel.name)
def test_types_that_change_on_the_way_are_numbas(compared, kernel):
    lto_ir(kernel, ARCH)
    assert compared


@kernel(pointer(f32), i32, threads=32)
def untyped(y, N):
    value = N
    for k in range(N):
        value = (value, k)
    y[0] = value[0]


def test_what_cannot_be_typed_is_numbas_error(monkeypatch):
    messages = []
    for settles in (inference.Inferer._settle, lambda self: False):
        monkeypatch.setattr(inference.Inferer, "_settle", settles)
        with pytest.raises(NumbaError) as caught:
            lto_ir(untyped, ARCH)
        messages.append(" ".join(str(caught.value).split()))  # Numba indents the same error further each time
    assert messages[0] == messages[1] and "getitem" in messages[0]


def test_a_constraint_is_asked_again_only_if_what_it_reads_changed(monkeypatch):
    def ask(inferer: Any, each: Any) -> None:
        asked.append(each)
        call(inferer, each)

    asked = list[Any]()
    call = inference.ASKED[inference.numbas.CallConstraint]
    monkeypatch.setitem(inference.ASKED, inference.numbas.CallConstraint, ask)
    lto_ir(smallest("rms_norm", "norm.ring_backward"), ARCH)
    different = len({id(each) for each in asked})
    assert 100 < different <= len(asked) < 1.3 * different  # Numba asks at least twice


def test_warnings_keep_their_place(monkeypatch):
    def call(inferer: Any, each: Any) -> None:
        warnings.warn(NumbaWarning("noticed"), stacklevel=1)
        asked(inferer, each)

    asked = inference.ASKED[inference.numbas.CallConstraint]
    monkeypatch.setitem(inference.ASKED, inference.numbas.CallConstraint, call)
    with pytest.warns(NumbaWarning, match="noticed") as caught:
        lto_ir(with_a_call, ARCH)
    first = with_a_call.function.__code__.co_firstlineno
    assert {(each.filename, each.lineno - first) for each in caught} == {(__file__, 3)}


@kernel(pointer(f32), threads=32)
def with_a_call(y):
    # the line after this one is the only call
    y[cuda.threadIdx.x] = f32(1)
