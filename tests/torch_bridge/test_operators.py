"""What holds of every operator in torch, made from its spec; what is special about one has a file of its own."""

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from dualops import testing
from dualops.spec import OPERATORS, ArrayMeta, Case
from dualops.spec.base import Input, Role
from dualops.spec.meta import FLOATS
from dualops.testing.truth import bind, named, reference_of, with_saved
from dualops.torch_bridge.arguments import as_numpy
from tests import checks

from .conftest import LAYOUTS
from .operators import (
    DIFFERENTIABLE,
    BridgeCall,
    Recorder,
    Tensors,
    bridge_call,
    compiled,
    covering_cases,
    equal,
    incoming_gradient,
    richest_case,
    same_bits,
    tensor,
)

PURE = [name for name, spec in OPERATORS.items() if not spec.updates]
COVERING = {f"{name}-{case.name}": (name, case) for name in PURE for case in covering_cases(name)}
EMPTY = {
    f"{name}-{case.name}": (name, case)
    for name in PURE
    for case in OPERATORS[name].cases
    if case.dtype == "float32" and not all(map(prod, case.shapes.values()))
}


def dtypes_of(name: str, case: Case) -> tuple[str, ...]:
    """Each case and dtype has kernels of its own, so few cases have several.

    float64 is for differences, and precisions are of float32 alone.
    """
    if "precision" in case.params:
        return ("float32",)
    return ("bfloat16", "float32", "float64") if case is richest_case(name) else ("float64",)


ONCE = {key: (name, case, dtypes_of(name, case)[0]) for key, (name, case) in COVERING.items()}
CALLS = {f"{key}-{dtype}": (*each, dtype) for key, each in COVERING.items() for dtype in dtypes_of(*each)}
CALLS |= {key: (*each, "float32") for key, each in EMPTY.items()}
LAID_OUT = {
    f"{key}-{layout}": (name, case, layout)
    for key, (name, case) in COVERING.items()
    for layout in ("transposed", "stepped", "offset", "broadcast")
    if case is richest_case(name) or (layout == "stepped" and "precision" not in case.params)
}
WITH_GRADIENTS = {
    key: each for key, each in COVERING.items() if each[0] in DIFFERENTIABLE and "precision" not in each[1].params
}
# of a sum of absolute values there is no gradient
SMOOTH = {key: each for key, each in WITH_GRADIENTS.items() if each[1].params.get("normalize") != "abs"}
differentiable = pytest.mark.parametrize("name", DIFFERENTIABLE)
every_case = pytest.mark.parametrize(("name", "case"), COVERING.values(), ids=COVERING)
case_once = pytest.mark.parametrize(("name", "case", "dtype"), ONCE.values(), ids=ONCE)
every_gradient = pytest.mark.parametrize(("name", "case"), WITH_GRADIENTS.values(), ids=WITH_GRADIENTS)
# floats that have no gradient
CONSTANTS = {
    name: keys
    for name in DIFFERENTIABLE
    if (
        keys := {entry.name for entry in OPERATORS[name].inputs if {*entry.dtypes} <= {*FLOATS}}
        - {key for case in covering_cases(name) for key in bridge_call(name, "cpu", "float64", case).leaves}
    )
}
# what data become under autocast in bfloat16, where that is not what they become
UNDER_AUTOCAST: dict[str, str] = dict.fromkeys(("softmax", "rms_norm", "layer_norm", "rope", "rope_tables"), "float32")
# calls by a number that their sizes grow with: shapes, parameters
Call = tuple[dict[str, tuple[int, ...]], dict[str, Any]]


def attention(n: int) -> Call:
    shapes = {"q": (n, 4, n + 1, 3), "k": (n, 2, n + 2, 3), "v": (n, 2, n + 2, 8), "bias": (4, n + 1, n + 2)}
    return shapes, {"causal": True, "window": (3, None), "softcap": 2.0}


def rotation(n: int) -> Call:
    shapes = {"q": (2, 3, n, 8), "k": (2, 1, n, 8), "cos": (n + 4, 3), "sin": (n + 4, 3), "positions": (n,)}
    return shapes, {"dim": 6}


def decays(n: int) -> Call:
    shapes = {"q": (2, 3, n, 4), "k": (2, 3, n, 4), "v": (2, 3, n, 9)}
    return shapes, {"normalize": "signed", "return_state": True}


GROWING: dict[str, Callable[[int], Call]] = {
    "softmax": lambda n: ({"x": (n + 2, n)}, {"axis": 0}),
    "rms_norm": lambda n: ({"x": (n + 2, n), "w": (n,), "residual": (n + 2, n)}, {}),
    "layer_norm": lambda n: ({"x": (n + 2, n), "w": (n,), "b": (n,), "residual": (n + 2, n)}, {}),
    "rope": rotation,
    "rope_tables": lambda n: ({"positions": (n, n + 2)}, {"dim": 6}),
    "matmul": lambda n: ({"a": (n, n + 2, n + 3), "b": (n + 3, n + 4)}, {"activation": "relu"}),
    "retention": decays,
    "flash_attention": attention,
}
WITH_FLOATS = ("rms_norm", "layer_norm", "flash_attention")  # Dynamo starts over once when it meets eps or softcap


def arrays_of(call: BridgeCall) -> dict[str, np.ndarray]:
    return {key: testing.to_numpy(x.detach()) for key, x in call.tensors.items()}


def with_incoming(call: BridgeCall) -> dict[str, np.ndarray]:
    """The arrays of a gradient: those of the call, what it saves, and the gradients that `call.gradient` has arrive.

    Saved results are those of the call: on a GPU their last bits differ from the reference's, and gradients depend on
    them.
    """
    arrays, results = arrays_of(call), call()
    names = bind(call.spec, arrays, call.case.params, False).outputs()
    for name, result in zip(names, results, strict=True):
        if name in call.spec.saved:
            arrays[name] = testing.to_numpy(result.detach())
        if result.requires_grad:
            arrays[f"d{name}"] = testing.to_numpy(incoming_gradient(result))
    return with_saved(call.spec, arrays, call.case.params)


def gradients_of(call: BridgeCall, every: Any) -> list[Any]:
    """Of each leaf, from the gradients by name."""
    return [every[f"d{call.spec.gradient_shared.get(leaf, leaf)}"] for leaf in call.leaves]


def run(call: BridgeCall) -> Tensors:
    """The call, with its gradient where it has one."""
    return call.gradient() if call.leaves else call()


def gradients_named(call: BridgeCall) -> dict[str, torch.Tensor]:
    found = dict(zip(call.leaves, call.gradient(), strict=True))
    return {f"d{leaf}": x for leaf, x in found.items() if leaf not in call.spec.gradient_shared}


# --- values and gradients --------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "case", "dtype"), CALLS.values(), ids=CALLS)
def test_results_against_float64(name: str, case: Case, dtype: str, device: str) -> None:
    call = bridge_call(name, device, dtype, case)
    testing.check(name, call(), arrays_of(call), call.case.params)
    if call.leaves:
        testing.check(name, gradients_named(call), with_incoming(call), call.case.params, backward=True)


@pytest.mark.parametrize(("name", "case"), (COVERING | EMPTY).values(), ids=COVERING | EMPTY)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_the_bridge_adds_no_rounding(name: str, case: Case, dtype: str) -> None:
    """CPU tensors get the reference's results and gradients, bit for bit."""
    call = bridge_call(name, "cpu", dtype, case)

    def by_reference(inputs: tuple[Input, ...], arrays: dict[str, np.ndarray], backward: bool) -> Tensors:
        results = checks.call(reference_of(call.spec, backward), inputs, arrays, **call.case.params)
        return tuple(tensor(x, "cpu") for x in (results if isinstance(results, tuple) else (results,)))

    assert same_bits(call(), by_reference(call.spec.inputs, arrays_of(call), False))
    if call.leaves:
        arrays = with_incoming(call)
        names = list(bind(call.spec, arrays, call.case.params, True).outputs(call.spec.gradients))
        expected = named(by_reference(call.spec.gradient_inputs, arrays, True), names)
        assert same_bits(call.gradient(), tuple(gradients_of(call, expected)))


@pytest.mark.parametrize(("name", "case"), SMOOTH.values(), ids=SMOOTH)
def test_gradients_against_differences(name: str, case: Case, device: str) -> None:
    call = bridge_call(name, device, "float64", case)

    def function(*leaves: torch.Tensor) -> Tensors:
        results = call._replace(tensors={**call.tensors, **dict(zip(call.leaves, leaves, strict=True))})()
        return tuple(torch.where(x.isfinite(), x, 0) for x in results if x.requires_grad)

    # a logarithm of a decay is at most 0
    most = {"log_decay": -0.01}
    leaves = tuple(
        x.detach().clamp(max=most.get(key)).requires_grad_() if key in most else x for key, x in call.leaves.items()
    )
    assert leaves and torch.autograd.gradcheck(function, leaves, fast_mode=True)


@every_gradient
def test_gradients_by_torch_func(name: str, case: Case, device: str) -> None:
    call = bridge_call(name, device, "float64", case)
    incoming = [incoming_gradient(x) if x.requires_grad else torch.zeros_like(x) for x in call()]

    def loss(leaves: dict[str, torch.Tensor]) -> Any:
        results = call._replace(tensors=call.tensors | leaves)()
        return sum((torch.where(x.isfinite(), x, 0) * by).sum() for x, by in zip(results, incoming, strict=True))

    found = torch.func.grad(loss)({key: leaf.detach() for key, leaf in call.leaves.items()})
    torch.testing.assert_close(tuple(found.values()), call.gradient(), rtol=1e-11, atol=1e-11)


@differentiable
def test_what_is_not_implemented_is_refused(name: str, device: str) -> None:
    """Gradients of the gradient, tangents and vmap must not be taken for something else."""
    call = bridge_call(name, device)
    results = [result for result in call() if result.requires_grad]
    incoming = [incoming_gradient(result).requires_grad_() for result in results]
    first, *_ = torch.autograd.grad(results, [*call.leaves.values()], incoming, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"^{name}_backward: its gradient is not implemented"):
        first.sum().backward()
    key, leaf = next(iter(call.leaves.items()))

    def function(x: torch.Tensor) -> Tensors:
        return call._replace(tensors=call.tensors | {key: x})()

    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(function, (leaf.detach(),), (leaf.detach(),))
    if name != "softmax":
        with pytest.raises(NotImplementedError, match=f"^{name}: vmap is not implemented; put the mapped axis"):
            torch.vmap(function)(leaf.detach()[None])


@every_gradient
def test_each_result_alone(name: str, case: Case, device: str) -> None:
    """Gradients of one result at a time add up to those of all. What arrives for the others is None, or zeros."""
    call = bridge_call(name, device, "float64", case)
    leaves, total = [*call.leaves.values()], [torch.zeros_like(x) for x in call.leaves.values()]
    names = [*bind(call.spec, arrays_of(call), case.params, False).outputs()]
    wanted = [place for place, x in enumerate(call()) if x.requires_grad]
    for place in wanted:
        with Recorder() as recorder:
            result = call()[place]
            found = torch.autograd.grad(result, leaves, incoming_gradient(result), materialize_grads=True)
        given = recorder.calls[-1][1]
        for entry in call.spec.gradient_inputs:
            if entry.name[1:] in {names[other] for other in wanted if other != place}:
                arrived = given[entry.name]
                assert arrived is None if entry.optional else not arrived.any()
        total = [x + y for x, y in zip(total, found, strict=True)]
    torch.testing.assert_close(tuple(total), call.gradient(), rtol=1e-11, atol=1e-11)


@every_gradient
def test_gradients_are_computed_where_they_are_wanted(name: str, case: Case, device: str) -> None:
    """Of each leaf alone, and of all others, they are those of all."""
    call = bridge_call(name, device, "float64", case)
    flags = {param.name for param in call.spec.gradient_params}
    whole = dict(zip(call.leaves, call.gradient(), strict=True))
    for chosen in filter(None, [*({key} for key in whole), *(whole.keys() - {key} for key in whole)]):
        tensors = {key: x if key in chosen else x.detach() for key, x in call.tensors.items()}
        some = call._replace(tensors=tensors)
        with Recorder() as recorder:
            found = some.gradient()
        torch.testing.assert_close(found, tuple(whole[key] for key in some.leaves), rtol=1e-11, atol=1e-11)
        given = recorder.calls[-1][1]
        assert all(given[f"{key}_gradient"] == (key in chosen) for key in whole if f"{key}_gradient" in flags)


@every_gradient
def test_gradients_that_arrive_broadcast(name: str, case: Case, device: str) -> None:
    """As that of a sum does, with strides of 0. Other strides may have another kernel."""
    call = bridge_call(name, device, "float64", case)
    results, leaves = [x for x in call() if x.requires_grad], [*call.leaves.values()]
    ones = [torch.ones((), dtype=x.dtype, device=device).expand(x.shape) for x in results]
    found, expected = (
        torch.autograd.grad(results, leaves, incoming, retain_graph=True)
        for incoming in (ones, [x.contiguous() for x in ones])
    )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11, check_stride=True)


@pytest.mark.parametrize(("name", "keys"), CONSTANTS.items(), ids=CONSTANTS)
def test_gradients_that_there_are_none_of_are_refused(name: str, keys: set[str], device: str) -> None:
    for key in keys:
        case = next(case for other, case in COVERING.values() if other == name and key in case.shapes)
        call = bridge_call(name, device, "float64", case)
        constant = call.tensors[key].detach().clone().requires_grad_()
        asking = call._replace(tensors=call.tensors | {key: constant})
        with pytest.raises(NotImplementedError, match=f"^{name}_backward: {key} requires a gradient"):
            asking()[0].sum().backward()
        with torch.no_grad():
            equal(asking(), call())


@differentiable
def test_no_graph_without_gradient(name: str, device: str) -> None:
    call = bridge_call(name, device)
    detached = call._replace(tensors={key: x.detach() for key, x in call.tensors.items()})
    with torch.no_grad():
        assert not any(x.requires_grad for x in call())
    with torch.inference_mode():
        assert all(x.is_inference() for x in call())
    assert not any(x.requires_grad for x in detached())
    assert call()[0].requires_grad


# --- memory ----------------------------------------------------------------------------------------


def laid_out(x: torch.Tensor, entry: Input, layout: str) -> torch.Tensor:
    """In the layout, but for a last axis that must be contiguous: then whole rows are."""
    if not entry.contiguous_last:
        return LAYOUTS[layout](x)
    if layout == "transposed":
        return x.transpose(0, -2).contiguous().transpose(0, -2)
    return torch.cat((x, x), dim=-1)[..., : x.shape[-1]] if layout == "stepped" else LAYOUTS[layout](x)


@pytest.mark.parametrize(("name", "case", "layout"), LAID_OUT.values(), ids=LAID_OUT)
def test_strides_change_no_number_and_results_have_the_specs(name: str, case: Case, layout: str, device: str) -> None:
    call = bridge_call(name, device, "float64", case)
    data = {entry.name: entry for entry in call.spec.inputs if entry.role is Role.DATA and entry.name in call.tensors}
    moved = {key: laid_out(call.tensors[key].detach(), entry, layout) for key, entry in data.items()}
    tensors = {key: moved.get(key, x).detach().requires_grad_(x.requires_grad) for key, x in call.tensors.items()}
    dense = {key: x.detach().contiguous().requires_grad_(x.requires_grad) for key, x in tensors.items()}
    odd, plain = call._replace(tensors=tensors), call._replace(tensors=dense)
    close: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11, "equal_nan": True}
    torch.testing.assert_close(run(odd), run(plain), **close)
    metas = {
        key: ArrayMeta(tuple(x.shape), str(x.dtype).removeprefix("torch."), x.stride(), device, 0)
        for key, x in tensors.items()
    }
    expected = call.spec.bind(metas, call.case.params).outputs().values()
    found = odd()
    torch.testing.assert_close(found, plain(), **close)
    assert [(tuple(x.shape), x.stride()) for x in found] == [(each.shape, each.strides) for each in expected]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPERATORS)
def test_memory_is_not_shared_and_can_be_resized_afterwards(name: str, dtype: str, device: str) -> None:
    """As FSDP resizes that of parameters: arguments, results and gradients."""
    call = bridge_call(name, device, dtype)
    own = {key: given.detach().clone().requires_grad_(given.requires_grad) for key, given in call.tensors.items()}
    call = call._replace(tensors=own)
    results = [result for result in call() if result is not None]
    wanted = [result for result in results if result.requires_grad]
    gradients: Tensors = ()
    if wanted:
        gradients = torch.autograd.grad(wanted, [*call.leaves.values()], [incoming_gradient(one) for one in wanted])
    assert results or OPERATORS[name].updates
    shared = [key in OPERATORS[name].gradient_shared for key in call.leaves]  # one tensor, which autograd hands on
    tensors = (*own.values(), *results, *(x for x, same in zip(gradients, shared) if not same))
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)
    for each in tensors:
        each.untyped_storage().resize_(0)
        assert each.untyped_storage().nbytes() == 0


def test_arrays_of_tensors_are_their_memory() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.bool):
        made = torch.arange(12).reshape(3, 4).to(dtype)
        for view in (made, made.t(), made[:, 1::2], made[:0], made[0, 0], made[:1].expand(3, 4)):
            array = as_numpy(view)
            assert array.shape == view.shape
            assert array.tolist() == view.tolist()
        as_numpy(made)[1, 2] = 0
        assert made[1, 2] == 0
    with pytest.raises(TypeError, match=r"^expected a tensor that is not lazily negated: resolve_neg\(\) it$"):
        as_numpy(torch.zeros(3, dtype=torch.complex64).conj().imag)


# --- what torch demands of an operator ---------------------------------------------------------------


@case_once
def test_opcheck(name: str, case: Case, dtype: str, device: str) -> None:
    """Of the calls that a call and its gradient make; statistics of bfloat16 have another dtype than data."""
    call = bridge_call(name, device, dtype, case)
    with Recorder() as recorder:
        run(call)
    assert [operator for operator, _ in recorder.calls] == [name, *([f"{name}_backward"] if call.leaves else [])]
    for operator, given in recorder.calls:
        leaves = call.leaves if operator == name else {}
        tensors = {key: x.detach().requires_grad_(key in leaves) for key, x in given.items() if torch.is_tensor(x)}
        torch.library.opcheck(getattr(torch.ops.dualops, operator).default, (), given | tensors)


@every_case
def test_flops_are_the_specs(name: str, case: Case) -> None:
    call = bridge_call(name, "cpu", "float32", case)
    with FlopCounterMode(display=False) as counter:
        run(call)
    forward = call.spec.forward_cost.flops(bind(call.spec, arrays_of(call), case.params, False))
    expected = {getattr(torch.ops.dualops, name): forward}
    if call.leaves:
        assert call.spec.backward_cost is not None
        problem = bind(call.spec, with_incoming(call), case.params, True)
        expected[getattr(torch.ops.dualops, f"{name}_backward")] = call.spec.backward_cost.flops(problem)
    assert counter.get_flop_counts()["Global"] == expected


@every_case
@pytest.mark.parametrize("target", ["meta", "cuda"])
def test_fakes_need_no_device(name: str, case: Case, target: str) -> None:
    call = bridge_call(name, "cpu", "bfloat16", case)
    results = [(x.shape, x.stride(), x.dtype, target) for x in call()]
    with FakeTensorMode():
        tensors = {
            key: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=target)
            for key, x in call.tensors.items()
        }
        found = call._replace(tensors=tensors)()
    assert [(x.shape, x.stride(), x.dtype, x.device.type) for x in found] == results


# --- compilation, autocast -----------------------------------------------------------------------------


@case_once
def test_compiled_is_eager(name: str, case: Case, dtype: str, device: str) -> None:
    call = bridge_call(name, device, dtype, case)
    results = compiled(lambda tensors: call._replace(tensors=tensors)())(call.tensors)
    assert same_bits(results, call())
    wanted = [result for result in results if result.requires_grad]
    if call.leaves:
        found = torch.autograd.grad(wanted, [*call.leaves.values()], [incoming_gradient(one) for one in wanted])
        assert same_bits(found, call.gradient())


def at_size(name: str, n: int, device: str) -> BridgeCall:
    """A call whose axes all differ, since torch takes two that are equal to be one; n: what they grow with."""
    shapes, params = GROWING[name](n)
    return bridge_call(name, device, "float32", Case(f"size {n}", "float32", shapes, params))


@pytest.mark.parametrize("name", GROWING)
def test_compiled_once_for_every_size(name: str, device: str) -> None:
    counter, counts = CompileCounterWithBackend("aot_eager"), []
    call = at_size(name, 5, device)
    function = compiled(lambda tensors: call._replace(tensors=tensors)(), backend=counter, dynamic=True)
    for n in (5, 9, 13):
        call = at_size(name, n, device)
        results, expected = function(call.tensors), call()
        equal(results, expected)
        pairs = [(x, y) for x, y in zip(results, expected, strict=True) if x.requires_grad]
        leaves, incoming = [*call.leaves.values()], [incoming_gradient(x) for x, _ in pairs]
        if leaves:
            equal(*(torch.autograd.grad(each, leaves, incoming) for each in zip(*pairs, strict=True)))
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] and (counts[0] == 1 or name in WITH_FLOATS)


class Exported(torch.nn.Module):
    """A call of an operator; sizes of its tensors may be others later."""

    def __init__(self, call: BridgeCall) -> None:
        super().__init__()
        self.call = call

    def forward(self, tensors: dict[str, torch.Tensor]) -> Tensors:
        return self.call._replace(tensors=tensors)()


@pytest.mark.parametrize("name", GROWING)
def test_export(name: str, device: str) -> None:
    call, later = at_size(name, 5, device), at_size(name, 13, device)
    tensors, others = ({key: x.detach() for key, x in each.tensors.items()} for each in (call, later))
    sizes = {key: dict.fromkeys(range(x.ndim), torch.export.Dim.AUTO) for key, x in tensors.items()}
    program = torch.export.export(Exported(call), (tensors,), dynamic_shapes=(sizes,))
    assert getattr(torch.ops.dualops, name).default in {node.target for node in program.graph.nodes}
    equal(program.module()(tensors), call._replace(tensors=tensors)())
    equal(program.module()(others), later._replace(tensors=others)())


@pytest.mark.parametrize("name", PURE)
@pytest.mark.parametrize("way", ["eager", "compiled", "dispatcher"])
def test_autocast(name: str, way: str, device: str) -> None:
    """In bfloat16: data get the operator's own dtype under autocast; float64 stays as it is, and so do weights of
    float32, and what is neither.
    """
    raised = name in UNDER_AUTOCAST and not name.startswith("rope")  # which is not changed
    call = bridge_call(name, device, "bfloat16" if raised else "float32")
    wanted = UNDER_AUTOCAST.get(name, "bfloat16")
    data = {entry.name for entry in call.spec.inputs if entry.role is Role.DATA}
    tensors = {key: x.detach() for key, x in call.tensors.items()}
    for key in data & tensors.keys():
        tensors[key] = tensors[key].to(getattr(torch, wanted))
    tensors = {key: x.requires_grad_(key in call.leaves) for key, x in tensors.items()}
    expected = call._replace(tensors=tensors)

    def function(tensors: dict[str, torch.Tensor]) -> Tensors:
        return call._replace(tensors=tensors)()

    wide = bridge_call(name, device, "float64")
    with torch.autocast(device, torch.bfloat16), Recorder() if way == "dispatcher" else torch.enable_grad():
        found = (compiled(function) if way == "compiled" else function)(call.tensors)
        kept = wide()
    assert same_bits(kept, wide())
    assert same_bits(found, expected())
    if call.leaves:
        results = [x for x in found if x.requires_grad]
        gradients = torch.autograd.grad(results, [*call.leaves.values()], [incoming_gradient(x) for x in results])
        narrow = (x.to(leaf.dtype) for x, leaf in zip(expected.gradient(), call.leaves.values(), strict=True))
        assert same_bits(gradients, tuple(narrow))
