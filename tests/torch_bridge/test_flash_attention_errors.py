"""An invalid call of attention raises the spec's error: what `test_interop` and `test_wrong_arguments` do not have."""

from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile

from dualops.torch_bridge import flash_attention, flash_attention_varlen

from .attention import plain, varlen

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
