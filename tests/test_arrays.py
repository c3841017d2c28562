"""What is seen of arrays of a library that shows them as `__cuda_array_interface__`; the address is nobody's."""

from types import SimpleNamespace
from typing import Any

import pytest

from dualops.cuda.launch import arrays
from dualops.cuda.launch.arrays import InterfaceAdapter, adapter_of
from dualops.spec import ArrayMeta, softmax as SOFTMAX

ADDRESS = 0x7000_0000_0010


@pytest.fixture(autouse=True)
def no_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "device_of_address", lambda address: 1)


def shown(**changed: Any) -> SimpleNamespace:
    """A float32 array of 2 x 3 on GPU 1."""
    face = {"shape": (2, 3), "typestr": "<f4", "data": (ADDRESS, False), "version": 3, "strides": None}
    return SimpleNamespace(__cuda_array_interface__={**face, **changed})


def test_metadata():
    adapter = InterfaceAdapter()
    assert adapter.meta(shown()) == ArrayMeta((2, 3), "float32", (3, 1), "cuda:1", ADDRESS)
    assert adapter.meta(shown(strides=(32, 8))).strides == (8, 2)
    assert adapter.meta(shown(typestr="<V2")).dtype == "bfloat16"
    with pytest.raises(ValueError, match=r"strides are \(30, 6\) bytes, expected multiples of the 4 of an element"):
        adapter.meta(shown(strides=(30, 6)))
    assert not adapter.meta(shown()).read_only
    assert adapter.meta(shown(data=(ADDRESS, True))).read_only


def test_version_2_has_no_stream_and_may_leave_strides_out():
    old = shown(version=2)
    del old.__cuda_array_interface__["strides"]
    assert InterfaceAdapter().meta(old) == InterfaceAdapter().meta(shown())
    assert InterfaceAdapter().stream([old]) == 0


@pytest.mark.parametrize(
    ("typestr", "dtype"),
    [("<f8", "float64"), ("<f2", "float16"), ("<i8", "int64"), ("<i4", "int32"), ("|u1", "uint8"), ("|b1", "bool")],
)
def test_dtypes(typestr: str, dtype: str):
    assert InterfaceAdapter().meta(shown(typestr=typestr)).dtype == dtype


def test_another_order_of_bytes_is_another_dtype():
    with pytest.raises(
        TypeError, match="softmax: x has dtype >f4, expected one of float64, float32, float16, bfloat16"
    ):
        SOFTMAX.bind({"x": InterfaceAdapter().meta(shown(typestr=">f4"))})


def test_negative_strides_are_refused():
    for strides in ((-12, 4), (12, -4)):
        with pytest.raises(NotImplementedError, match=r"softmax: x has a negative stride in \("):
            SOFTMAX.bind({"x": InterfaceAdapter().meta(shown(strides=strides))})


@pytest.mark.parametrize(("typestr", "offset"), [("<f8", 4), ("<f4", 2), ("<f2", 1), ("<V2", 1)])
def test_an_address_between_elements_is_refused(typestr: str, offset: int):
    adapter, wrong = InterfaceAdapter(), shown(typestr=typestr, data=(ADDRESS + offset, False))
    for look in (
        adapter.meta,
        adapter.pointer,
        lambda array: adapter.layouts([array]),
        lambda a: adapter.pointers([a]),
    ):
        with pytest.raises(ValueError, match=r"address 0x[0-9a-f]+ is no place of an element, expected a multiple of"):
            look(wrong)
    with pytest.raises(ValueError, match="address 0x0 is no place of an element"):
        adapter.meta(shown(typestr=typestr, data=(0, False)))


def test_one_element_further_is_an_address():
    assert InterfaceAdapter().meta(shown(data=(ADDRESS + 4, False))).pointer == ADDRESS + 4


@pytest.mark.parametrize("address", [0, ADDRESS, ADDRESS + 1])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_without_elements_no_address_matters(shape: tuple[int, ...], address: int):
    found = InterfaceAdapter().meta(shown(shape=shape, data=(address, False)))
    assert (found.shape, found.pointer, found.size) == (shape, 0, 0)


def test_masked_arrays_are_refused():
    with pytest.raises(TypeError, match="it is a masked array, expected one without a mask"):
        InterfaceAdapter().meta(shown(mask=shown()))


def test_the_stream_is_the_one_that_arrays_name():
    adapter = InterfaceAdapter()
    assert adapter.stream([shown(stream=7)]) == 7
    assert adapter.stream([shown(stream=1)]) == 1  # CUDA's default stream, by its other name
    assert (
        adapter.stream([shown(), None, 0.5, shown(stream=None), shown(stream=7), shown(version=2), shown(stream=7)])
        == 7
    )
    with pytest.raises(ValueError, match=r"^softmax: arrays are of streams 5, 7, expected one, or a call with stream="):
        adapter.stream([shown(stream=7), shown(stream=5)], "softmax")


class Shown:
    """A class that shows its arrays."""

    @property
    def __cuda_array_interface__(self) -> Any:
        return shown().__cuda_array_interface__


def test_an_instance_may_have_the_interface_and_its_class_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrays, "SIMULATED", False)
    monkeypatch.setattr(arrays, "ADAPTERS", {})
    for array in (shown(), Shown()):
        assert isinstance(adapter_of(array, "softmax", "x"), InterfaceAdapter)
        assert adapter_of(array, "softmax", "x") is adapter_of(array, "softmax", "x")
    with pytest.raises(
        TypeError, match=r"softmax: x is a types\.SimpleNamespace, expected an array with __cuda_array_interface__"
    ):
        adapter_of(SimpleNamespace(), "softmax", "x")
    assert isinstance(adapter_of(shown(), "softmax", "x"), InterfaceAdapter)


@pytest.mark.parametrize(
    "changed",
    [{"shape": (3, 2)}, {"shape": (2, 0)}, {"strides": (16, 4)}, {"typestr": "<f2"}, {"data": (ADDRESS, True)}],
)
def test_what_metadata_depends_on_tells_plans_apart(changed):
    adapter, one, other = InterfaceAdapter(), shown(), shown(**changed)
    assert adapter.layouts([one]) == adapter.layouts([shown()])
    assert adapter.layouts([one]) != adapter.layouts([other])
    assert [list(each) for each in adapter.shapes([one])] != [list(each) for each in adapter.shapes([other])]
