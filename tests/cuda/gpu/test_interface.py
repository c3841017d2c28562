"""Arrays of a library that nobody knows, each instance of which has its `__cuda_array_interface__`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dualops.cuda
from tests.cuda.gpu.library import LATE, Foreign, same_bits


def shown(array: torch.Tensor, **changed: Any) -> Any:
    face: Any = array.__cuda_array_interface__
    return SimpleNamespace(memory=array, __cuda_array_interface__={**face, **changed})


def pair(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """An input, and a result to be written; other libraries' arrays are used on another stream than torch's."""
    x, y = torch.randn(shape, device="cuda").to(dtype), torch.full(shape, torch.nan, device="cuda", dtype=dtype)
    torch.cuda.synchronize()
    return x, y


def softmax(x: Any, out: Any, **options: Any) -> None:
    assert dualops.cuda.softmax(x, out=out, **options) is out
    torch.cuda.synchronize()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_each_version(version: int, dtype: torch.dtype):
    x, y = pair(33, 70, dtype=dtype)
    more = {"stream": None} if version == 3 else {}
    for _ in range(2):  # the second call has the plan of the first
        y.fill_(torch.nan)
        torch.cuda.synchronize()
        softmax(shown(x, version=version, **more), shown(y, version=version, **more))
        assert same_bits(y, dualops.cuda.softmax(x))


def test_an_instance_without_it_is_refused_after_one_with_it():
    x, y = pair(3, 40)
    softmax(shown(x), shown(y))
    message = r"softmax: x is a types\.SimpleNamespace, expected an array with __cuda_array_interface__"
    with pytest.raises(TypeError, match=message):
        dualops.cuda.softmax(SimpleNamespace())
    with pytest.raises(TypeError, match=r"softmax: out y is a types\.SimpleNamespace, expected an array with __cuda"):
        dualops.cuda.softmax(shown(x), out=SimpleNamespace())
    softmax(shown(x), Foreign(y))  # a class that has it, of the same library as far as anybody can tell
    assert same_bits(y, dualops.cuda.softmax(x))


@pytest.mark.parametrize("which", ["both", "input", "result"])
def test_work_goes_to_the_stream_that_arrays_name(which: str):
    """The input is written late on a side stream: a kernel on another one reads zeros."""
    x, y = pair(64, 1000)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE)
        late.copy_(x)
    named = {"version": 3, "stream": side.cuda_stream}
    dualops.cuda.softmax(
        shown(late, **named if which != "result" else {}), out=shown(y, **named if which != "input" else {})
    )
    side.synchronize()
    assert same_bits(y, dualops.cuda.softmax(x))


def test_two_streams_in_one_call():
    """Nobody can tell on which of them the other's work is done; who calls can, and says stream=."""
    x, y = pair(33, 70)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    arrays = shown(x, version=3, stream=one.cuda_stream), shown(y, version=3, stream=two.cuda_stream)
    with pytest.raises(
        ValueError, match=r"^softmax: arrays are of streams \d+, \d+, expected one, or a call with stre"
    ):
        dualops.cuda.softmax(arrays[0], out=arrays[1])
    softmax(*arrays, stream=two)
    assert same_bits(y, dualops.cuda.softmax(x))
    lists = [[shown(torch.ones(5, device="cuda"), version=3, stream=each.cuda_stream)] for each in (one, two, two)]
    with pytest.raises(ValueError, match=r"^lion: arrays are of streams"):
        dualops.cuda.lion(*lists, lr=0.1)


def test_read_only_arrays_are_no_results():
    x, y = pair(33, 70)
    read_only = {"data": (x.data_ptr(), True)}
    softmax(shown(x, **read_only), shown(y))
    assert same_bits(y, dualops.cuda.softmax(x))
    with pytest.raises(ValueError, match="softmax: out y is read-only, expected an array that can be written"):
        dualops.cuda.softmax(shown(y), out=shown(x, **read_only))


@pytest.mark.parametrize("address", [0, 1, 4096])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_arrays_without_elements(shape: tuple[int, int], address: int):
    x, y = (torch.empty(shape, device="cuda") for _ in range(2))
    softmax(shown(x, data=(address, False)), shown(y, data=(address, False)))


def test_keys_without_elements():
    q, o = pair(1, 2, 8, 16)
    nothing = shown(torch.empty(1, 2, 0, 16, device="cuda"), data=(0, False))
    dualops.cuda.flash_attention(shown(q), nothing, nothing, out=shown(o))
    torch.cuda.synchronize()
    assert (o == 0).all()
