"""Functions that read variables from outside, which change: between calls, before backward, before a recomputation.

A call and its gradient know the variables of the moment when the call is made. Where torch makes the call again, or
compiled it long ago, they are those of then, or there is an error: never a gradient of something else.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from dualops.torch_bridge import flash_attention, flash_attention_varlen, recomputed, schema
from dualops.torch_bridge.flash_attention import _operator

from .conftest import values

S, D = 6, 4
GLOBAL = 1


class Mods(NamedTuple):
    """Functions that read a variable: they scale scores by it, and let a query see that many keys after its own."""

    score_mod: Callable[..., Any]
    mask_mod: Callable[..., Any]
    set: Callable[[int], None]

    def __call__(self, q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        return flash_attention(q, *(kv or (q, q)), score_mod=self.score_mod, mask_mod=self.mask_mod)


def of_cell() -> Mods:
    variable = 1

    def change(value: int) -> None:
        nonlocal variable
        variable = value

    return Mods(lambda score, b, h, i, j: score * variable, lambda b, h, i, j: j - i <= variable, change)


def of_global() -> Mods:
    def change(value: int) -> None:
        global GLOBAL
        GLOBAL = value

    change(1)
    return Mods(lambda score, b, h, i, j: score * GLOBAL, lambda b, h, i, j: j - i <= GLOBAL, change)


def of_array() -> Mods:
    table = np.array([7, 1])

    def change(value: int) -> None:
        table[1] = value

    return Mods(lambda score, b, h, i, j: score * table[1], lambda b, h, i, j: j - i <= table[1], change)


NUMBERS, ARRAYS = (of_cell, of_global), (of_array,)
EVERY_KIND = pytest.mark.parametrize("make", [*NUMBERS, *ARRAYS])  # tests/spec/test_frozen.py has more


def leaf(device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return values((1, 2, S, D), torch.float64, device, seed).requires_grad_()


def expected(value: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the gradient of a sum, where the variable had this value."""
    x = x.detach().requires_grad_()
    o = flash_attention(x, x, x, scale=value / math.sqrt(D), window=(None, value))
    return o.detach(), torch.autograd.grad(sum_of(o), x)[0]


def sum_of(o: torch.Tensor) -> torch.Tensor:
    return (o * torch.arange(o.numel(), device=o.device).reshape(o.shape)).sum()


def gradient(function: Callable[..., Any], mods: Mods, first: int, then: int, x: torch.Tensor) -> torch.Tensor:
    """Of a call with the first value of the variable, taken when it has the second; the call's result is checked."""
    mods.set(first)
    o = function(x)
    close(o.detach(), expected(first, x)[0])
    mods.set(then)
    x.grad = None
    sum_of(o).backward()
    assert x.grad is not None
    return x.grad


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True, **options})


# --- eager -------------------------------------------------------------------------------------------


@EVERY_KIND
def test_backward_knows_what_forward_knew(make: Callable[[], Mods], device: str) -> None:
    mods = make()
    for first, then in ((1, 1), (1, 3), (3, 3), (3, 1)):
        x = leaf(device)
        close(gradient(mods, mods, first, then, x), expected(first, x)[1])


@pytest.mark.parametrize("make", [of_cell, of_array])
def test_varlen_too(make: Callable[[], Mods]) -> None:
    mods = make()
    q, k, v = (values((S, 2, D), torch.float64, "cpu", seed).requires_grad_() for seed in range(3))
    ends = torch.tensor([0, 2, S], dtype=torch.int32)

    def call(**options: Any) -> torch.Tensor:
        return flash_attention_varlen(q, k, v, ends, ends, S, S, **options)

    o = call(score_mod=mods.score_mod, mask_mod=mods.mask_mod)
    mods.set(3)
    plain = call(scale=1 / math.sqrt(D), window=(None, 1))
    for found, wanted in zip(*(torch.autograd.grad(sum_of(x), (q, k, v)) for x in (o, plain))):
        close(found, wanted)


def layers(x: torch.Tensor, run: Callable[..., torch.Tensor]) -> torch.Tensor:
    for slope in (1.0, -2.0, 3.0):

        def mod(score, b, h, i, j):
            return score * slope  # noqa: B023  the trap: when backward comes, it is the last one everywhere

        x = run(lambda q, mod=mod: flash_attention(q, q, q, score_mod=mod), x)
    return x


def test_a_loop_over_layers(device: str) -> None:
    x = leaf(device)
    found = torch.autograd.grad(sum_of(layers(x, lambda layer, x: layer(x))), x)
    y = x
    for slope in (1.0, -2.0, 3.0):
        y = flash_attention(y, y, y, scale=slope / math.sqrt(D))
    close(found[0], torch.autograd.grad(sum_of(y), x)[0])


@EVERY_KIND
def test_by_way_of_the_dispatcher(make: Callable[[], Mods]) -> None:
    mods = make()

    def in_bfloat16(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):  # which leaves float64 alone
            return mods(x)

    for first, then in ((1, 3), (3, 1)):
        x = leaf()
        close(gradient(in_bfloat16, mods, first, then, x), expected(first, x)[1])


def test_texts_of_functions_are_kept_for_a_while() -> None:
    """Long enough for a call, and for an exported program in a process that has called them."""
    before = len(schema._KNOWN)
    mods, x = of_cell(), leaf().detach()
    for value in range(2 * schema.MOST_RECENT):
        mods.set(value)
        schema.remember(repr(value), mods)
    mods.set(1)
    mods(x)
    assert len(schema._RECENT) == schema.MOST_RECENT and len(schema._KNOWN) == before
    text = next(text for text in reversed(schema._RECENT) if text.startswith("<lambda>#"))
    assert repr(schema.from_text(text)) == repr(schema.from_text(f"{text}{schema.MARK}7")) == text


# --- compiled ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", NUMBERS)
def test_compiled_for_every_number(make: Callable[[], Mods]) -> None:
    mods, counter = make(), CompileCounterWithBackend("aot_eager")
    function = compiled(mods.__call__, backend=counter)
    for first, then in ((1, 1), (1, 3), (3, 3), (3, 1), (1, 3)):
        x = leaf()
        close(gradient(function, mods, first, then, x), expected(first, x)[1])
    assert counter.frame_count == 2


@pytest.mark.parametrize("make", ARRAYS)
def test_compiled_for_an_array_that_must_stay(make: Callable[[], Mods], device: str) -> None:
    mods = make()
    function = compiled(mods.__call__)
    x = leaf(device)
    close(gradient(function, mods, 1, 3, x), expected(1, x)[1])
    with pytest.raises(RuntimeError, match=r"table, which <lambda> reads, has changed since it was compiled"):
        function(x)
    mods.set(1)
    close(gradient(function, mods, 1, 1, x), expected(1, x)[1])


def reading(value: Any) -> Callable[..., Any]:
    return lambda score, b, h, i, j: score * value[0]


def scaled_by(value: float) -> Callable[..., Any]:
    return lambda score, b, h, i, j: score * value


def with_default(value: Any) -> Callable[..., Any]:
    return lambda score, b, h, i, j, value=value: score * value


def calling(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda score, b, h, i, j: function(score)


def doubled(x: Any) -> Any:
    return 2 * x


def tripled(x: Any) -> Any:
    return x * 3


class Module(torch.nn.Module):
    """Attention by a function that is an argument, or an attribute; with a derivative of its own, or without."""

    score_mod: Any = None
    derivative: Any = None

    def forward(self, x: torch.Tensor, score_mod: Any = None) -> torch.Tensor:
        score_mod = score_mod or self.score_mod
        return flash_attention(x, x, x, score_mod=(score_mod, self.derivative) if self.derivative else score_mod)


@pytest.mark.parametrize(
    ("make", "two", "three"),
    [
        (scaled_by, 2.0, 3.0),
        (reading, np.array([2.0]), np.array([3.0])),
        (reading, (np.float32(2),), (np.float32(3),)),
        (reading, [2.0], [3.0]),
        (with_default, 2.0, 3.0),
        (calling, doubled, tripled),
        (calling, with_default(2.0), with_default(3.0)),
    ],
    ids=["number", "array", "NumPy's number", "list", "default", "code of a helper", "value of a helper"],
)
@pytest.mark.parametrize("way", ["argument", "attribute", "pair"])
def test_compiled_functions_of_one_code_are_distinguished(make: Any, two: Any, three: Any, way: str) -> None:
    if make is calling and two is not doubled:
        two, three = (lambda x, own=own: own(x, 0, 0, 0, 0) for own in (two, three))
    counter, module = CompileCounterWithBackend("aot_eager"), Module()
    module.derivative = scaled_by(1.0) if way == "pair" else None
    function = compiled(module, backend=counter)
    x, functions = leaf().detach(), {2: make(two), 3: make(three)}
    counts = []
    for factor in (2, 3, 2, 3):
        module.score_mod = functions[factor] if way == "attribute" else None
        found = function(x) if way == "attribute" else function(x, functions[factor])
        close(found, flash_attention(x, x, x, scale=factor / math.sqrt(D)))
        counts.append(counter.frame_count)
    assert counts[0] < counts[1] == counts[3]


def test_compiled_once_for_equal_functions() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(lambda x, mod: flash_attention(x, x, x, score_mod=mod), backend=counter)
    for _ in range(3):
        function(leaf(), with_default(0.5))
    assert counter.frame_count == 1


def test_a_function_made_inside_what_is_compiled_keeps_its_globals() -> None:
    function = compiled(lambda x: flash_attention(x, x, x, score_mod=lambda score, b, h, i, j: score * GLOBAL))
    mods, x = of_global(), leaf().detach()
    wanted = flash_attention(x, x, x)
    close(function(x), wanted)
    mods.set(3)
    with pytest.raises(RuntimeError, match=r"GLOBAL, which .*<lambda> reads, has changed since it was compiled"):
        function(x)
    mods.set(1)
    close(function(x), wanted)


def test_a_variable_that_is_set_inside_what_is_compiled() -> None:
    """torch.compile sets it when all is done: what reads the function until then would see the old value."""
    mods = of_cell()

    def around(x: torch.Tensor, value: int) -> torch.Tensor:
        mods.set(value)
        return mods(x)

    x = leaf().detach()
    with pytest.raises(Unsupported):
        compiled(around)(x, 3)
    assert torch.equal(compiled(around, fullgraph=False)(x, 3), expected(3, x)[0])


def test_compiled_loop_over_layers() -> None:
    x = leaf()
    run: Any = lambda layer, x: layer(x)  # noqa: E731
    found = torch.autograd.grad(sum_of(compiled(layers)(x, run)), x)
    close(found[0], torch.autograd.grad(sum_of(layers(x, run)), x)[0])


def test_an_exported_program_keeps_its_values_and_finds_functions_after_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mods(x)

    mods, x = of_cell(), leaf().detach()
    program = torch.export.export(Module(), (x,)).module()
    mods.set(3)
    close(program(x), expected(1, x)[0])
    for table in ("_KNOWN", "_RECENT"):  # as in another process
        monkeypatch.setattr(schema, table, type(getattr(schema, table))())
    with pytest.raises(TypeError, match=r"score_mod is '<lambda>#.*', of type str, expected a Python function"):
        program(x)
    mods.set(1)
    mods(x)
    mods.set(3)
    close(program(x), expected(1, x)[0])


# --- recomputed --------------------------------------------------------------------------------------

REENTRY = pytest.mark.parametrize("reentrant", [False, True])
AGAIN = r"a call had .*#.* when torch.utils.checkpoint made it again: what score_mod or mask_mod reads has changed"


def hold(around: Callable[..., torch.Tensor], mods: Mods) -> None:
    """A recomputed call has the gradient of forward's values, or there is an error."""
    for value in (1, 3):
        x = leaf()
        close(gradient(around, mods, value, value, x), expected(value, x)[1])
        with pytest.raises(RuntimeError, match=AGAIN):
            gradient(around, mods, value, 4 - value, leaf())


@EVERY_KIND
@REENTRY
def test_recomputed_with_the_same_values_or_not_at_all(make: Callable[[], Mods], reentrant: bool) -> None:
    mods = make()

    def around(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(mods.__call__, x * 1, use_reentrant=reentrant)

    hold(around, mods)


def test_recomputed_by_others_than_torch_utils_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their regions nothing is known, but what is saved in the second call says it too."""
    monkeypatch.setattr(recomputed, "Frame", ())
    test_recomputed_with_the_same_values_or_not_at_all(of_cell, reentrant=False)


@REENTRY
def test_recomputed_loop_over_layers(reentrant: bool, device: str) -> None:
    """Every slope was one of some layer's: it must be this one's."""
    with pytest.raises(RuntimeError, match=AGAIN):
        sum_of(layers(leaf(device), lambda layer, x: checkpoint(layer, x * 1, use_reentrant=reentrant))).backward()


@REENTRY
def test_recomputed_functions_that_are_made_inside(reentrant: bool) -> None:
    """They are others each time, and read what the region around them reads."""

    def around(x: torch.Tensor, slopes: list[float]) -> torch.Tensor:
        for slope in slopes:

            def region(x: torch.Tensor) -> torch.Tensor:
                return flash_attention(x, x, x, score_mod=lambda score, b, h, i, j: score * slope)  # noqa: B023

            x = checkpoint(region, x * 1, use_reentrant=reentrant)
        return x

    x = leaf()
    sum_of(around(x, [2.0, 2.0])).backward()
    with pytest.raises(RuntimeError, match=AGAIN):
        sum_of(around(x, [2.0, 3.0])).backward()


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_recomputed_in_a_region_within_a_region(outer: bool, inner: bool) -> None:
    mods = of_cell()

    def region(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(mods.__call__, x * 1, use_reentrant=inner)

    def around(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(region, x * 1, use_reentrant=outer)

    hold(around, mods)


@REENTRY
def test_recomputed_under_autocast(reentrant: bool) -> None:
    mods = of_cell()

    def around(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return checkpoint(mods.__call__, x * 1, use_reentrant=reentrant)

    hold(around, mods)


@REENTRY
def test_compiled_and_recomputed(reentrant: bool) -> None:
    """The graph of another value is there already, and would be taken."""
    if torch.cuda.is_available():
        torch.cuda.init()  # which a recomputed call may not be the first to do
    mods = of_cell()
    function = compiled(mods.__call__)

    def around(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, x * 1, use_reentrant=reentrant)

    hold(around, mods)


def test_a_region_in_what_is_compiled() -> None:
    mods = of_cell()
    function = compiled(lambda x: checkpoint(mods.__call__, x * 1, use_reentrant=False))
    for first, then in ((1, 3), (3, 1)):
        x = leaf()
        close(gradient(function, mods, first, then, x), expected(first, x)[1])


def test_tensors_that_are_saved_elsewhere() -> None:
    """Hooks may move or copy what is saved, and with it what says which functions it belongs to."""
    mods, x = of_cell(), leaf()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        close(gradient(mods, mods, 1, 3, x), expected(1, x)[1])
    with torch.autograd.graph.save_on_cpu():
        close(gradient(mods, mods, 1, 3, x), expected(1, x)[1])


def test_backward_twice() -> None:
    mods, x = of_cell(), leaf()
    o = mods(x)
    mods.set(3)
    one, two = (torch.autograd.grad(sum_of(o), x, retain_graph=True)[0] for _ in range(2))
    close(one, two)
    close(one, expected(1, x)[1])


def test_without_functions_nothing_more_is_saved() -> None:
    x = leaf()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        flash_attention(x, x, x)
    assert {x.dtype for x in saved} == {torch.float64} and len(saved) == len(_operator.spec.saved) - 6
