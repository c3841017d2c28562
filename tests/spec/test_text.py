"""Problems as text: every word is understood, or is in the message."""

import pytest

from dualops.spec import OPERATORS
from dualops.spec.text import case_of, value_of


def read(text: str):
    return case_of(text, OPERATORS)


def test_arrays_and_parameters():
    spec, case = read("flash_attention q=2x32x64x128:bfloat16 k=2x8x64x128 v=2x8x64x96 causal=True window=(7,None)")
    assert spec is OPERATORS["flash_attention"] and case.dtype == "bfloat16"
    assert case.shapes == {"q": (2, 32, 64, 128), "k": (2, 8, 64, 128), "v": (2, 8, 64, 96)}
    assert case.params == {"causal": True, "window": (7, None)}
    assert {case.dtype_of(given) for given in spec.inputs if given.name in "qkv"} == {"bfloat16"}


def test_dtypes_follow_the_first():
    spec, case = read("rms_norm x=4x8:float16 w=8 residual=4x8")
    assert {given.name: case.dtype_of(given) for given in spec.inputs} == dict.fromkeys(
        ("x", "w", "residual"), "float16"
    )
    spec, case = read("layer_norm x=4x8:bfloat16 w=8:float32 b=8")
    dtypes = {given.name: case.dtype_of(given) for given in spec.inputs}
    assert (dtypes["x"], dtypes["w"], dtypes["b"]) == ("bfloat16", "float32", "bfloat16")
    assert read("softmax x=3x5")[1].dtype == "float32"
    spec, case = read("flash_attention q=1x1x2x4 k=1x1x2x4 v=1x1x2x4 key_padding_mask=1x2")
    assert {case.dtype_of(given) for given in spec.inputs if given.name == "key_padding_mask"} == {"bool"}


def test_orders_of_axes():
    _, case = read("softmax x=3x5x7@201:float64")
    assert case.orders == {"x": (2, 0, 1)} and case.dtype == "float64"


@pytest.mark.parametrize("word", ["", "lr=0.1", "lr=()", "lr=():float32"])
def test_a_number_may_be_left_out(word):
    _, case = read(f"lion params=5 grads=5 momenta=5 {word}")
    assert case.shapes["lr"] == ()
    assert "seed" not in read("flash_attention q=1x1x2x4")[1].shapes
    assert read("flash_attention q=1x1x2x4 seed=7 dropout_p=0.5")[1].shapes["seed"] == ()


@pytest.mark.parametrize(
    ("text", "value"), [("3", 3), ("True", True), ("None", None), ("(1,2)", (1, 2)), ("top_left", "top_left")]
)
def test_values(text, value):
    assert value_of(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty problem is no operator, expected one of flash_attention, "),
        ("softmin x=3", "softmin is no operator, expected one of flash_attention, "),
        ("softmax x=3x5 y=3", "softmax: y=3, expected name=..., each once, of x, axis"),
        ("softmax x", "softmax: x, expected name="),
        ("softmax x=3 x=4", "softmax: x=4, expected name=..., each once"),
        ("softmax x=3*5", r"softmax: x=3\*5, expected a shape such as"),
        ("softmax x=3x", "softmax: x=3x, expected a shape such as"),
        ("softmax x=-3", "softmax: x=-3, expected a shape such as"),
        ("softmax x=3x5@1", "softmax: x=3x5@1, expected each of its 2 axes once after the @"),
        ("softmax x=3x5@02", "softmax: x=3x5@02, expected each of its 2 axes once after the @"),
    ],
)
def test_what_can_not_be_read(text, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        read(text)
