"""Verbs that are compiled once, called, and inlined by NVVM."""

import gc
from typing import Any
from weakref import ref

import pytest

from dualops.cuda.compiler.backend import Kernel, NumbaError, called_verb, cuda, f32, i32, kernel, pointer, types, verb
from dualops.cuda.compiler.compile import link, lto_ir
from dualops.cuda.compiler.frontend import called
from tests.cuda.compile.test_frontend import ARCH, code, machine_code

PLACES = 16


def bending(declared: Any, factor: Any) -> Any:
    """A verb with a loop, a branch and an array that it changes."""

    @declared
    def bend(frag, place, options):
        x, total = frag[place] * options[0], f32(0)
        for n in range(3):
            total = total * x + f32(n)
        shown = total if total > options[1] else factor
        frag[place] = shown
        return shown, abs(total)

    return bend


def at_many_places(bend: Any) -> Kernel:
    def one_of(place: int) -> Any:
        @verb
        def one(frag, options):
            return bend(frag, place, options)

        return one

    def all_from(first: int) -> Any:
        one = one_of(first)
        if first == PLACES - 1:
            return one
        rest = all_from(first + 1)

        @verb
        def some(frag, options):
            ours, theirs = one(frag, options), rest(frag, options)
            return ours[0] + theirs[0], ours[1] * theirs[1]

        return some

    bend_all = all_from(0)

    @kernel(pointer(f32), i32, threads=32)
    def bent(y, N):
        frag, i = cuda.local.array(PLACES, f32), cuda.grid(1)
        for k in range(PLACES):
            frag[k] = y[i + k]
        first, second = bend_all(frag, (y[0], y[1]))
        for k in range(PLACES):
            y[i + k] = frag[k]
        y[N], y[N + 1] = first, second

    return bent


@pytest.fixture
def compiled(monkeypatch) -> list[Any]:
    """Of each function that is compiled to be called, its name and the types of its arguments."""

    def compile_extra(typing: Any, target: Any, function: Any, args: Any, *more: Any, **options: Any) -> Any:
        found.append((function.__name__, args))
        return theirs(typing, target, function, args, *more, **options)

    found, theirs = list[Any](), called.compile_extra
    monkeypatch.setattr(called, "compile_extra", compile_extra)
    return found


def test_a_called_verb_is_compiled_once_and_its_code_is_that_of_an_inlined_one(compiled):
    inlined, calls = (lto_ir(at_many_places(bending(each, f32(2))), ARCH) for each in (verb, called_verb))
    assert [name for name, _ in compiled] == ["bend"]
    assert len(calls) < 0.6 * len(inlined)
    ours, others = (machine_code(link(each, ARCH)[0]) for each in (calls, inlined))
    assert len(ours) == len(others) > 500
    assert not called.MADE


def test_constants_are_variables_of_a_called_verb(compiled):
    lto_ir(at_many_places(bending(called_verb, f32(2))), ARCH)
    ((_, (_, place, options)),) = compiled
    assert place == types.int64 and options == types.UniTuple(f32, 2)


def test_verbs_of_one_code_object_have_their_own_constants(compiled):
    def added(factor: Any) -> Any:
        @called_verb
        def add(x):
            return x + factor

        return add

    def of(factor: float, other: float) -> bytes:
        first, second = added(f32(factor)), added(f32(other))

        @kernel(pointer(f32), threads=32)
        def both(y):
            y[0], y[1] = first(y[2]), second(y[3])

        return code(both)

    assert len({of(2, 3), of(3, 2), of(2, 2)}) == 3 and len(compiled) == 6


def test_a_called_verb_calls_another_and_may_return_nothing(compiled):
    def storing(declared: Any) -> Kernel:
        @declared
        def larger(x, limit):
            return x if x > limit else limit

        @declared
        def store(y, i):
            if i < 4:
                y[i] = larger(y[i], f32(1)) + larger(y[i + 1], y[i])

        @kernel(pointer(f32), threads=32)
        def stored(y):
            store(y, cuda.grid(1))

        return stored

    assert len(code(storing(called_verb))) == len(code(storing(verb)))
    assert [name for name, _ in compiled] == ["store", "larger"]


def test_a_local_array_is_no_result():
    @called_verb
    def fragment():
        return cuda.local.array(4, f32)

    @kernel(pointer(f32), threads=32)
    def wrong(y):
        frag = fragment()
        frag[0] = y[0]
        y[0] = frag[cuda.grid(1)]

    with pytest.raises(NumbaError, match=r"fragment is called, and returns array.*, expected numbers"):
        lto_ir(wrong, ARCH)
    assert not called.MADE


def test_a_called_verb_that_is_gone_is_not_kept():
    bend = bending(called_verb, f32(2))
    gone = ref(bend)
    lto_ir(at_many_places(bend), ARCH)
    del bend
    gc.collect()
    assert gone() is None
