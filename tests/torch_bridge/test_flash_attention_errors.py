"""An invalid call of attention raises the spec's error, on every path through torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile

from dualops.torch_bridge import flash_attention, flash_attention_varlen

from .attention import plain, varlen
from .conftest import transposed

Q, K, V = (x.detach() for x in plain(dtype=torch.float32).tensors.values())


def one_argument(score: Any) -> Any:
    return score


# name -> arguments, exception, beginning of the message. `test_wrong_arguments` and tests/spec have more
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "stride": ({"v": transposed(V)}, ValueError, "v has stride 20 along its last axis Dv, expected 1"),
    "causal a text": ({"causal": "True"}, ValueError, "causal is 'True', expected False, True or 'top_left'"),
    "score_mod's arguments": ({"score_mod": one_argument}, TypeError, "score_mod is <function one_argument at"),
    "seed too large": ({"seed": 2**63}, ValueError, f"seed is {2**63}, expected an integer of 64 bits"),
    "seeds": ({"seed": torch.tensor([1])}, ValueError, "seed has 1 axes (1,), expected 0: []"),
}


def refused(error: type[Exception], message: str, call: Any, *args: Any, **more: Any) -> str:
    """Return the whole message of the error."""
    with pytest.raises(error) as caught:
        call(*args, **more)
    assert str(caught.value).startswith(message)
    return str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_get_the_specs_words(name: str) -> None:
    given, error, message = BAD[name]
    arguments = {"q": Q, "k": K, "v": V, **given}
    message = refused(error, f"flash_attention: {message}", flash_attention, **arguments)
    wanting = {
        key: x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for key, x in arguments.items()
    }
    refused(error, message, flash_attention, **wanting)
    with profile():
        refused(error, message, flash_attention, **arguments)
    with torch.autocast("cpu", torch.bfloat16):
        refused(error, message, flash_attention, **arguments)

    def scaled(factor: torch.Tensor) -> torch.Tensor:
        return flash_attention(**{key: x * factor if key == "q" else x for key, x in arguments.items()}).sum()

    refused(error, message, torch.func.grad(scaled), torch.tensor(1.0))
    torch._dynamo.reset()
    compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(TorchDynamoException) as caught:
        compiled(**arguments)
    assert message in str(caught.value).replace("\\'", "'")


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


BAD_LENGTHS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a float": ({"max_seqlen_k": 3.0}, TypeError, "max_seqlen_k is 3.0, expected an integer"),
    "ends and ranges": (
        {"k_starts": torch.zeros(4, dtype=torch.int32), "k_lengths": torch.zeros(4, dtype=torch.int32)},
        TypeError,
        "the keys are given by cu_seqlens_k and k_starts and k_lengths",
    ),
    "a sum without ranges": ({"total_k_lengths": 7}, ValueError, "total_k_lengths is 7, expected None"),
    "numbers differ": (
        {"cu_seqlens_q": torch.tensor([0, 7], dtype=torch.int32)},
        ValueError,
        "cu_seqlens_k has B+1=5, cu_seqlens_q has B+1=2",
    ),
}
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


@pytest.mark.parametrize("name", [*BAD_LENGTHS, *BAD_VALUES])
def test_bad_lengths_get_the_specs_words(name: str) -> None:
    given, error, message = BAD_LENGTHS[name] if name in BAD_LENGTHS else (BAD_VALUES[name][0], ValueError, None)
    message = f"flash_attention_varlen: {message or BAD_VALUES[name][1]}"
    arguments = varlen(dtype=torch.float32)
    message = refused(error, message, arguments, flash_attention_varlen, **given)
    with profile(), torch.no_grad():
        refused(error, message, arguments, flash_attention_varlen, **given)
    torch._dynamo.reset()
    compiled = torch.compile(flash_attention_varlen, fullgraph=True, backend="aot_eager")
    with pytest.raises((TorchDynamoException, error)) as caught:
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
