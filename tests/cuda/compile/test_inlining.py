"""Functions are put into a kernel in one walk, and their bytecode is interpreted once."""

import gc
from types import FunctionType
from typing import Any
from weakref import ref

import pytest
from numba.cuda.core.bytecode import ByteCode, FunctionIdentity  # pyright: ignore[reportMissingImports]

from dualops.cuda.compiler.backend import Kernel, NumbaError, cuda, f32, i32, kernel, pointer, verb
from dualops.cuda.compiler.compile import link, lto_ir, without_collections
from dualops.cuda.compiler.frontend import verbs
from dualops.cuda.compiler.frontend.inlining import Inliner
from tests.cuda.compile.small import build, build_wrong, run
from tests.cuda.compile.test_frontend import ARCH, code, machine_code, settled, usual  # noqa: F401  settled: for all of them

FACTOR = f32(2)


def like_numba(kernel: Kernel) -> bytes:
    """The machine code, which is Numba's."""
    ours = code(kernel)
    assert ours == machine_code(link(usual(kernel), ARCH)[0])
    return ours


def calling(function: Any) -> Kernel:
    """A kernel that calls it, as Numba's own passes know it too."""

    @kernel(pointer(f32), i32, threads=32)
    def called(y, N):
        i = cuda.grid(1)
        for k in range(N):
            y[i + k] = function(y[i], k)

    return called


def with_factor(factor: Any) -> Any:
    @verb
    def scaled(x, k):
        return x * factor + f32(k)

    return scaled


@verb
def by_global(x, k):
    return x * FACTOR + f32(k)


def test_one_code_object_is_interpreted_once_and_each_closure_has_its_own_values(monkeypatch):
    def interpret(self: Any, code: Any) -> Any:
        found.append(self.func_id.func_name)
        return theirs(self, code)

    found, theirs = list[str](), verbs.Interpreter.interpret
    monkeypatch.setattr(verbs.Interpreter, "interpret", interpret)
    for kept in verbs.INTERPRETED.values():
        kept.clear()
    made = [code(calling(with_factor(f32(factor)))) for factor in (3, 5, 3)]
    assert made[0] == made[2] != made[1]
    assert sorted(found) == ["called", "scaled"]


def with_a_context(x):
    with x:
        return x


def with_dictionaries(x):
    others = {"b": x}
    return {"a": x, **others}


def with_names(x, *more):
    for k in (*more, x):
        print(k, sep="")
    return [each + x for each in more]


@pytest.mark.parametrize("interpreter", verbs.INTERPRETED)
@pytest.mark.parametrize("function", [with_a_context, with_dictionaries, with_names, by_global])
def test_rewrites_of_bytecode_are_left_out_where_they_change_nothing(function, interpreter):
    ours, numbas = (
        kind(identity := FunctionIdentity.from_function(function)).interpret(ByteCode(identity)).dump_to_string()
        for kind in (interpreter, interpreter.__mro__[2])
    )
    assert ours == numbas and "_update_from_bytecode" not in ours


def test_a_changed_global_is_noticed(monkeypatch):
    before = code(calling(by_global))
    monkeypatch.setitem(globals(), "FACTOR", f32(7))
    after = code(calling(by_global))
    assert after != before and after == code(calling(with_factor(f32(7))))


def test_a_changed_closure_is_noticed():
    function = with_factor(f32(2))
    before = code(calling(function))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    cells["factor"].cell_contents = f32(7)
    after = code(calling(function))
    assert after != before and after == code(calling(with_factor(f32(7))))


def test_a_changed_default_and_a_changed_body_are_noticed():
    @verb
    def shifted(x, k, by=1.0):
        return x + f32(by)

    @verb
    def other(x, k, by=1.0):
        return x - f32(by)

    before = code(calling(shifted))
    shifted.__defaults__ = (2.0,)
    changed = code(calling(shifted))
    shifted.__code__ = other.__code__
    assert len({before, changed, code(calling(shifted))}) == 3


def test_the_code_of_a_function_that_is_gone_is_not_kept():
    """As score_mod's, which is compiled from its source for each call that brings a new one."""
    names: dict[str, Any] = {"f32": f32}
    exec(compile("def brought(x, k):\n    return x * f32(k)", "brought.py", "exec"), names)
    function: FunctionType = names["brought"]
    gone = ref(function.__code__)
    code(calling(function))
    assert gone() in verbs.INTERPRETED[verbs.OfVerbs]
    names.clear()
    del function
    gc.collect()
    assert gone() is None


@verb
def early(x, k):
    """Returns from three places, one of them in a loop."""
    if x > f32(3):
        return x
    for j in range(k):
        x = x * x
        if x > f32(2):
            return x + f32(j)
    return f32(1)


@verb
def reassigned(x, k):
    """Changes its arguments, which are the caller's variables."""
    k = k * 2
    while x < f32(k):
        x, k = x + f32(1), k - 1
    return x


@verb
def unchanged(x, k):
    return x


@verb
def applied(function, x, k):
    return function(x, k)


@verb
def through_another(x, k):
    return applied(reassigned, x, k) + applied(early, x, k=k)


@verb
def last_of_loop(x, k):
    """`kept` is assigned in one way round the loop and read in the other."""
    kept = x
    for j in range(k):
        if j % 2 == 0:
            kept = early(x, j)
        else:
            x = x + kept
    return unchanged(x, k) + kept


@verb
def nothing(y, i, k):
    if k > 2:
        y[i] = f32(k)


@kernel(pointer(f32), i32, threads=32)
def without_results(y, N):
    for k in range(N):
        nothing(y, cuda.grid(1), k)
        nothing(y, k=k, i=k)


@pytest.mark.parametrize(
    "function",
    [early, reassigned, unchanged, through_another, last_of_loop],
    ids=lambda function: getattr(function, "__name__", "") or function.py_func.__name__,
)
def test_ways_to_return_and_to_change_arguments(function):
    assert len(like_numba(calling(function))) > 300


def test_functions_without_results():
    like_numba(without_results)


def test_statements_are_copied_once(monkeypatch):
    def run(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        counted.append((self.instances, sum(len(block.body) for block in self.blocks.values())))

    counted, init = list[tuple[int, int]](), Inliner.__init__
    monkeypatch.setattr(Inliner, "__init__", run)
    code(calling(through_another))
    ((instances, statements),) = counted
    assert instances == 5 and statements < 120


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


def test_collections_wait_within_and_come_back_after_an_error():
    def fail() -> None:
        with without_collections():
            assert not gc.isenabled()
            raise KeyError

    with without_collections():
        with pytest.raises(KeyError):
            fail()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_nothing_is_collected_while_the_first_kernel_imports_the_front_end():
    done = run("""
import gc
from dualops.cuda.compiler.compile import lto_ir
from tests.cuda.compile.small import ARCH, build
kernel, begun = build(3), []
gc.callbacks.append(lambda phase, info: phase == "start" and begun.append(info["generation"]))
assert len(lto_ir(kernel, ARCH)) > 0
print(begun in ([], [0]))  # of what is new, when collections come back
""")
    assert done.stdout == "True\n", done.stderr


def test_exceptions_that_numba_keeps_hold_neither_statements_nor_types():
    done = run("""
import gc
from dualops.cuda.compiler.compile import lto_ir
from dualops.cuda.compiler.frontend import prepare
from tests.cuda.compile.small import ARCH, build
prepare()
gc.collect()
gc.disable()
gc.set_debug(gc.DEBUG_SAVEALL)
assert len(lto_ir(build(3), ARCH)) > 0
gc.collect()
left = {type(each).__name__ for each in gc.garbage}
print("TypingError" in left, left & {"Assign", "Expr", "TypeVar"})
""")
    assert done.stdout == "True set()\n", done.stderr


def test_a_kernel_leaves_little_to_collect():
    """Numba's own passes leave many times as much."""
    kernel = calling(through_another)
    lto_ir(kernel, ARCH)
    gc.collect()
    gc.disable()
    try:
        lto_ir(kernel, ARCH)
        ours = gc.collect()
        usual(kernel)
        numbas = gc.collect()
    finally:
        gc.enable()
    assert 4 * ours < numbas
