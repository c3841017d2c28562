"""Attention in torch: values, gradients, memory, schema, compilation, autocast, seeds, errors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from dualops.torch_bridge import flash_attention, flash_attention_varlen
from dualops.torch_bridge.flash_attention import _operator, _operator_varlen

from .attention import DV, LENGTHS_Q, SK, SQ, Arguments, B, H, plain, ranges, varlen
from .conftest import values
from .operators import Recorder, compiled, equal

OPERATORS = {"plain": _operator, "varlen": _operator_varlen, "ranges": _operator_varlen}
FORMS = {
    "plain": (flash_attention, plain),
    "varlen": (flash_attention_varlen, varlen),
    "ranges": (flash_attention_varlen, ranges),
}
BOTH_FORMS = pytest.mark.parametrize("form", FORMS)


def gradients(function: Callable[..., Any], arguments: Arguments, **more: Any) -> tuple[torch.Tensor, ...]:
    """Of a sum over o and lse that tells all of their elements apart."""
    o, lse = arguments(function, return_lse=True, **more)
    loss = (o * torch.arange(o.numel(), device=o.device).reshape(o.shape)).sum() + torch.where(
        lse.isfinite(), lse.square(), 0
    ).sum()
    return torch.autograd.grad(loss, tuple(arguments.tensors.values()))


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def special_rows() -> dict[str, tuple[Arguments, torch.Tensor | None]]:
    """Arguments of plain calls without masks, and a bias, by what is not finite in row 1 or in all rows."""
    found = {}
    for name in ("NaN in q", "inf in a score", "NaN with -inf", "inf with -inf", "-inf alone"):
        arguments, bias = plain(), None
        q, k, _ = (x.data for x in arguments.tensors.values())
        if name == "NaN in q":
            q[:, :, 1, 2] = torch.nan
        elif name == "inf in a score":  # +inf in row 1 and -inf in the others
            q[..., 2] = -1
            q[:, :, 1, 2] = 1
            k[:, :, 3, 2] = torch.inf
        else:
            bias = torch.zeros(B, H, SQ, SK, dtype=torch.float64)
            bias[..., 2] = -torch.inf
            bias[:, :, 1, 4] = {"NaN": torch.nan, "inf": torch.inf}.get(name.split()[0], 0)
            if name == "-inf alone":
                bias[:, :, 1] = -torch.inf
        found[name] = arguments, bias
    return found


@pytest.mark.parametrize("name", special_rows())
def test_special_rows_are_those_of_torchs_math_backend(name: str) -> None:
    arguments, bias = special_rows()[name]
    tensors = [*arguments.tensors.values(), *([] if bias is None else [bias.requires_grad_()])]
    with sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(*tensors[:3], attn_mask=bias, enable_gqa=True)
        o = arguments(flash_attention, **({} if bias is None else {"bias": bias}))
        do = values(o.shape, torch.float64, "cpu", seed=10)
        theirs = [expected, *torch.autograd.grad(expected, tensors, do)]
    ours = [o, *torch.autograd.grad(o, tensors, do)]
    dk, dv = ours[2:4]
    if name == "inf in a score":  # in the other rows torch has 0 * inf in dq, where the score of -inf is left out here
        rows = torch.arange(SQ) == 1
        assert theirs[1].isnan().any(dim=-1).all()
        assert torch.equal(ours[1].isnan(), rows[:, None].expand_as(ours[1]))
        del ours[1], theirs[1]
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-12, atol=1e-12, equal_nan=True)
    if name == "-inf alone":
        assert not o[:, :, 1].any()
        assert arguments(flash_attention, bias=bias, return_lse=True)[1][:, :, 1].isneginf().all()
    else:
        assert dk.isnan().all() and dv.isnan().all()


@BOTH_FORMS
def test_no_lse_unless_asked(form: str, device: str) -> None:
    function, make = FORMS[form]
    arguments = make("causal", "sinks", device=device)
    o, lse = arguments(function, return_lse=True)
    equal(arguments(function), o)
    assert lse.dtype is torch.float64
    assert tuple(lse.shape) == ((B, H, SQ) if form == "plain" else (H, sum(LENGTHS_Q)))


def test_axes_in_memory_are_those_of_q(device: str) -> None:
    """BSHD memory viewed as BHSD, with an incoming gradient in the same order, which is not copied."""
    memory = [
        values((B, seq, heads, width), torch.float32, device, seed=seq).requires_grad_()
        for seq, heads, width in ((SQ, H, 4), (SK, 2, 4), (SK, 2, DV))
    ]
    q, k, v = (x.transpose(1, 2) for x in memory)
    with Recorder() as recorder:
        o = flash_attention(q, k, v)
        assert o.transpose(1, 2).is_contiguous()
        o.backward(values((B, SQ, H, DV), torch.float32, device).transpose(1, 2))
    (_, given) = recorder.calls[-1]
    assert given["do"].transpose(1, 2).is_contiguous()
    assert all(x.grad is not None and x.grad.is_contiguous() for x in memory)
    plain_q, plain_k, plain_v = (x.detach().contiguous() for x in (q, k, v))
    torch.testing.assert_close(o, flash_attention(plain_q, plain_k, plain_v))


@pytest.mark.parametrize("shape", [(SK,), (SQ, 1), (B, 1, 1, SK), (1, H, SQ, SK), (B, H, SQ, SK)], ids=str)
def test_gradient_of_a_bias_that_broadcasts(shape: tuple[int, ...], device: str) -> None:
    q, k, v = plain(device=device).tensors.values()
    bias = values(shape, torch.float64, device, seed=8).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: flash_attention(q, k, v, bias=x, causal=True), (bias,), fast_mode=True)


def test_the_derivative_of_a_score_mod_is_given(device: str) -> None:
    arguments = plain("pair", "causal", device=device)
    function = lambda *leaves: arguments(flash_attention, *leaves)  # noqa: E731
    assert torch.autograd.gradcheck(function, tuple(arguments.tensors.values()), fast_mode=True)


@pytest.mark.parametrize("form", ["plain", "varlen"])
def test_schema(form: str) -> None:
    """What an exported program depends on: a change here is one that CHANGELOG.md must tell."""
    tokens = "Tensor q, Tensor k, Tensor v, "
    lengths = "Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? k_starts, Tensor? k_lengths, "
    options = (
        'float? scale=None, float? softcap=None, str score_mod="None", str causal="False", str window="None", '
        'str mask_mod="None", float dropout_p=0.'
    )
    expected = {
        "plain": (
            f"{tokens}Tensor? bias, Tensor? alibi_slopes, Tensor? key_padding_mask, Tensor? block_mask, "
            f"Tensor? sinks, Tensor? seed, {options}) -> (Tensor o, Tensor lse)",
            f"{tokens}Tensor o, Tensor lse, Tensor do, Tensor? dlse, Tensor? bias, Tensor? alibi_slopes, "
            f"Tensor? key_padding_mask, Tensor? block_mask, Tensor? sinks, Tensor? seed, {options}, "
            "bool bias_gradient=True) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
        ),
        "varlen": (
            f"{tokens}{lengths}Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, SymInt max_seqlen_q, "
            f"SymInt max_seqlen_k, SymInt? total_k_lengths=None, {options}) -> (Tensor o, Tensor lse)",
            f"{tokens}Tensor o, Tensor lse, Tensor do, {lengths}Tensor? dlse, Tensor? alibi_slopes, Tensor? sinks, "
            f"Tensor? seed, SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt? total_k_lengths=None, {options}) "
            "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
        ),
    }
    name = f"dualops::{FORMS[form][0].__name__}"
    backward = OPERATORS[form].backward
    assert backward is not None
    schemas = (str(OPERATORS[form].overload._schema), str(backward.overload._schema))
    assert schemas == (f"{name}({expected[form][0]}", f"{name}_backward({expected[form][1]}")


def test_varlen_compiled_once_for_all_lengths(device: str) -> None:
    """Their number and the longest of them too, even if it is more than all of them together; only the first call takes
    all of these for constants.
    """
    counter = CompileCounterWithBackend("aot_eager")

    def around(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int) -> Any:
        return flash_attention_varlen(q, k, v, ends, ends, longest, longest, causal=True)

    function = compiled(around, backend=counter)
    for lengths, more in (((3, 4), 0), ((5, 2, 6), 0), ((1, 1, 1, 9), 100), ((17, 3), 0), ((2, 3), 2), ((7, 1), 90)):
        ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        q, k, v = (values((sum(lengths), 2, 8), torch.float32, device, seed=seed) for seed in range(3))
        q.requires_grad_()
        found = [torch.autograd.grad(call(q, k, v, ends, max(lengths) + more).sum(), q) for call in (function, around)]
        equal(*found)
    assert counter.frame_count == 2


def test_key_ranges_compiled_once_for_all_numbers_and_lengths(device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def around(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: dict[str, torch.Tensor], longest: int, most: int
    ) -> Any:
        sizes: Any = {"max_seqlen_q": longest, "max_seqlen_k": longest, "total_k_lengths": most}
        return flash_attention_varlen(q, k, v, **where, **sizes, causal=True)

    function = compiled(around, backend=counter)
    for starts, lengths in (((0, 0), (3, 7)), ((4, 1, 0), (2, 4, 6)), ((3, 2, 1, 0), (1, 2, 3, 9)), ((5, 0), (3, 5))):
        ends = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device) * 3
        where = {"cu_seqlens_q": ends}
        for name, numbers in (("k_starts", starts), ("k_lengths", lengths)):
            where[name] = torch.tensor(numbers, dtype=torch.int32, device=device)
        total = max(start + length for start, length in zip(starts, lengths)) + 1
        q, k, v = (
            values((rows, 2, 8), torch.float32, device, seed=seed).requires_grad_()
            for seed, rows in enumerate((3 * len(lengths), total, total))
        )
        calls = [call(q, k, v, where, max(lengths), sum(lengths) + total) for call in (function, around)]
        equal(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in calls))
    assert counter.frame_count == 2


def test_compiled_with_a_length_from_the_data(device: str) -> None:
    def around(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        longest: Any = ends.diff().max().item()
        return flash_attention_varlen(q, k, v, ends, ends, longest, longest)

    q, k, v = (values((9, 2, 8), torch.float32, device, seed=seed) for seed in range(3))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        function = compiled(around)
        for lengths in ((3, 6), (1, 8)):
            ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
            equal(function(q, k, v, ends), around(q, k, v, ends))


def test_compiled_for_another_window() -> None:
    inputs = [x.detach() for x in plain().tensors.values()]
    function = compiled(lambda *tensors, left: flash_attention(*tensors, window=(left, 0)))
    for left in (1, 2, 3, 2):
        equal(function(*inputs, left=left), flash_attention(*inputs, window=(left, 0)))


@pytest.mark.parametrize("target", ["meta", "cuda"])
def test_fakes_need_no_device(target: str) -> None:
    """A seed on the CPU is a number, wherever the rest is."""
    with FakeTensorMode(), torch.no_grad():
        memory = (torch.empty(2, 5, heads, 8, dtype=torch.bfloat16, device=target) for heads in (4, 2, 2))
        q, k, v = (x.transpose(1, 2) for x in memory)
        for seed in (3, torch.tensor(3), torch.full((), 3, device=target), None):
            o, lse = flash_attention(q, k, v, dropout_p=0.1, seed=seed, return_lse=True)
            assert (o.device.type, o.stride(), o.dtype) == (target, q.stride(), torch.bfloat16)
            assert (lse.device.type, tuple(lse.shape), lse.dtype) == (target, (2, 4, 5), torch.float32)


@pytest.mark.parametrize(("form", "lower"), [("plain", torch.bfloat16), ("ranges", torch.float16)], ids=str)
def test_autocast_lowers_data_and_leaves_weights(lower: torch.dtype, form: str, device: str) -> None:
    function, make = FORMS[form]
    arguments = make("alibi", "padding", "bias", "sinks", "dropout", dtype=torch.float32, device=device)
    tensors = arguments.tensors
    lowered = {name: x.to(lower) if name in ("q", "k", "v", "bias") else x for name, x in tensors.items()}
    expected = function(**lowered, **arguments.more, return_lse=True)
    for call in (function, compiled(function)):
        with torch.autocast(device, lower):
            results = arguments(call, return_lse=True)
            # the result of a linear layer, with unchanged parameters
            mixed = call(**{**tensors, "q": lowered["q"]}, **arguments.more, return_lse=True)
        for found in (results, mixed):
            assert [x.dtype for x in found] == [lower, torch.float32]
            equal(found, expected)
    with torch.autocast(device, lower), torch.no_grad():
        o = arguments(function, alibi_slopes=arguments.more["alibi_slopes"].to(torch.float16))
        assert o.dtype is lower
        wide = Arguments({name: x.double() for name, x in tensors.items()}, arguments.more)
        wide.more["alibi_slopes"] = arguments.more["alibi_slopes"].double()
        assert wide(function).dtype is torch.float64
    wanted = torch.autograd.grad(expected[0].square().sum(), tuple(tensors.values()))
    equal(torch.autograd.grad(results[0].square().sum(), tuple(tensors.values())), wanted)


@BOTH_FORMS
def test_a_seed_is_a_number_or_a_tensor(form: str, device: str) -> None:
    function, make = FORMS[form]
    arguments = make("dropout", device=device)
    for seed in (0, 12345, -1, 2**63 - 1, -(2**63)):
        expected = arguments(function, seed=seed)
        for other in (torch.tensor(seed), torch.tensor(seed, device=device), np.int64(seed)):
            equal(arguments(function, seed=other), expected)
        close(gradients(function, arguments, seed=seed), gradients(function, arguments, seed=torch.tensor(seed)))
    assert not torch.equal(arguments(function, seed=1), arguments(function, seed=2))


@BOTH_FORMS
def test_torchs_generator_draws_a_seed(form: str, device: str) -> None:
    function, make = FORMS[form]
    arguments = make(device=device, dropout_p=0.5)
    ways = (function, compiled(function))
    drawn = []
    for call in ways:
        torch.manual_seed(3)
        drawn += [arguments(call), arguments(call)]
    equal(drawn[0], drawn[2])
    equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    state = torch.cuda.get_rng_state if device == "cuda" else torch.get_rng_state
    before = state()
    arguments(function, dropout_p=0.0)
    arguments(function, seed=1)
    assert torch.equal(state(), before), "nothing is drawn that is not needed"
    arguments(function)
    assert not torch.equal(state(), before)


def test_backward_drops_what_forward_dropped(device: str) -> None:
    arguments = plain(device=device, dropout_p=0.5)
    tensors = tuple(arguments.tensors.values())
    found = []
    for call in (
        lambda *x: arguments(flash_attention, *x),
        lambda *x: checkpoint(arguments, flash_attention, *x, use_reentrant=False),
    ):
        torch.manual_seed(5)
        found.append(torch.autograd.grad(call(*tensors).square().sum(), tensors))
    equal(*found)


def test_compiled_once_for_all_seeds() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    arguments = plain("dropout")
    function = compiled(flash_attention, backend=counter)
    with torch.no_grad():
        for seed in (1, 2, 3, -5, 2**63 - 1):
            equal(arguments(function, seed=seed), arguments(flash_attention, seed=seed))
        assert counter.frame_count == 2, "the first one was taken for a constant"
        for seed in (1, 2, 3):
            tensor = torch.tensor(seed)
            equal(arguments(function, seed=tensor), arguments(flash_attention, seed=seed))
        assert counter.frame_count == 3


Q, K, V = (x.detach() for x in plain(dtype=torch.float32).tensors.values())


def refused(error: type[Exception], message: str, call: Any, *args: Any, **more: Any) -> str:
    """Return the whole message of the error."""
    with pytest.raises(error) as caught:
        call(*args, **more)
    assert str(caught.value).startswith(message)
    return str(caught.value)


def test_seeds() -> None:
    large, axis = f"seed is {2**63}, expected an integer of 64 bits", "seed has 1 axes (1,), expected 0: []"
    for seed, message in ((2**63, large), (torch.tensor([1]), axis)):
        refused(ValueError, f"flash_attention: {message}", flash_attention, Q, K, V, seed=seed)


def test_devices() -> None:
    """A seed on the CPU counts as a number; other arrays on another device raise an error."""
    fakes = [x.to("meta") for x in (Q, K, V)]
    message = "flash_attention: key_padding_mask is on cpu, q on meta, expected one device"
    refused(ValueError, message, flash_attention, *fakes, key_padding_mask=torch.ones(2, 5).bool())
    message = "flash_attention: seed is on cpu, q on meta, expected one device"
    refused(ValueError, message, flash_attention, *fakes, seed=torch.tensor([1]))
    with FakeTensorMode():
        message = "flash_attention: sinks is on meta, q on cpu, expected one device"
        refused(
            ValueError, message, flash_attention, *(torch.ones(1, 1, 2, 3),) * 3, sinks=torch.ones(1, device="meta")
        )


def ranges_at(*numbers: tuple[int, ...]) -> dict[str, Any]:
    """Key ranges in place of cu_seqlens_k."""
    made = (torch.tensor(each, dtype=torch.int32) for each in numbers)
    return {"cu_seqlens_k": None, **dict(zip(("k_starts", "k_lengths"), made))}


# errors in values are found at run time, and only for arrays on the host
BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "start": ({"cu_seqlens_q": torch.tensor([1, 2, 2, 6, 7], dtype=torch.int32)}, "cu_seqlens_q starts at 1"),
    "longest": ({"max_seqlen_q": 3}, "max_seqlen_q is 3, "),
    "range": (ranges_at((0, 3, 6, 2), (1, 1, 2, 0)), "k_starts + k_lengths is 6 + 2 at 2, k has total_k=7"),
    "sum": (
        {**ranges_at((0, 3, 5, 2), (1, 1, 2, 0)), "total_k_lengths": 3},
        "total_k_lengths is 3, expected 4 or more",
    ),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_lengths_get_the_specs_words(name: str) -> None:
    given, message = BAD_VALUES[name]
    arguments = varlen(dtype=torch.float32)
    message = refused(ValueError, f"flash_attention_varlen: {message}", arguments, flash_attention_varlen, **given)
    with profile(), torch.no_grad():
        refused(ValueError, message, arguments, flash_attention_varlen, **given)
    torch._dynamo.reset()
    compiled = torch.compile(flash_attention_varlen, fullgraph=True, backend="aot_eager")
    with pytest.raises((TorchDynamoException, ValueError)) as caught:
        arguments(compiled, **given)
    assert message in str(caught.value).replace("\\'", "'")


def test_bad_calls_of_backward() -> None:
    arguments = plain(dtype=torch.float32)
    q, k, v = (x.detach() for x in arguments.tensors.values())
    o, lse = flash_attention(q, k, v, return_lse=True)
    backward = torch.ops.dualops.flash_attention_backward

    def call(do: torch.Tensor, dlse: torch.Tensor | None = None, **more: Any) -> Any:
        return backward(q, k, v, o, lse, do, dlse, None, None, None, None, None, None, **more)

    name = "flash_attention_backward"
    refused(TypeError, f"{name}: do has dtype float64, q has dtype float32, expected the same", call, o.double())
    refused(ValueError, f"{name}: dlse has Sq=1, q has Sq=3", call, o, lse[..., :1])
    refused(TypeError, f"{name}: dlse has dtype float16, q has dtype float32, expected float32", call, o, lse.half())
    refused(TypeError, f"{name}: window is '(1,', expected None or a pair (left, right)", call, o, window="(1,")
    assert [tuple(x.shape) for x in call(o)] == [tuple(x.shape) for x in (q, k, v)] + [(0,), (0,)]


def test_functions_of_another_process_are_refused() -> None:
    """A graph contains a function's name and digest; in a process without that function, the error says so."""
    given = (Q, K, V, None, None, None, None, None, None, None, None, "bent#0123456789abcdef")
    message = "flash_attention: score_mod is 'bent#0123456789abcdef'"
    refused(TypeError, message, torch.ops.dualops.flash_attention, *given)
