"""Tensor maps: what the driver is asked to encode, what can't be encoded, what is kept. The driver is a stand-in."""

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dualops.cuda.launch import driver, tensor_map
from dualops.cuda.launch.tensor_map import ROUNDED, Boxes, Mapped, Maps, boxes_of


class Names:
    """An enumeration whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class Map:
    """128 bytes: the address that was put there, and the other operands are in `arguments`."""

    def __init__(self, arguments: tuple[Any, ...]):
        self.arguments, self.memory = arguments, (ctypes.c_uint64 * 16)(*[7] * 16)

    def getPtr(self) -> int:
        return ctypes.addressof(self.memory)


class Driver(SimpleNamespace):
    """As much of cuda.bindings.driver as is needed; it counts."""

    def __init__(self, error: int = 0):
        super().__init__(error=error, encoded=[], replaced=0)
        names = ("CUtensorMapDataType", "CUtensorMapSwizzle", "CUtensorMapInterleave", "CUtensorMapL2promotion")
        vars(self).update(dict.fromkeys((*names, "CUtensorMapFloatOOBfill"), Names()))

    cuuint32_t = cuuint64_t = staticmethod(int)

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[int, Map]:
        self.encoded.append(arguments)
        return self.error, Map(arguments)

    def cuTensorMapReplaceAddress(self, found: Map, address: int) -> tuple[int]:
        self.replaced += 1
        found.memory[0] = address
        return (0,)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Driver:
    stand_in = Driver()
    monkeypatch.setattr(driver, "cu", stand_in)
    return stand_in


def test_what_the_driver_is_asked(asked):
    Boxes("bfloat16", (4, 300, 136), (300 * 144, 144, 1), (1, 128, 64), 128).encoded(0x7F00)
    ((dtype, rank, address, sizes, strides, box, steps, *modes),) = asked.encoded
    assert dtype == "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16" and rank == 3 and address % 16 == 0
    assert sizes == [136, 300, 4]  # the last axis first
    assert strides == [288, 300 * 288]  # bytes, but for the last axis
    assert box == [64, 128, 1] and steps == [1, 1, 1]
    assert modes == [
        "CU_TENSOR_MAP_INTERLEAVE_NONE",
        "CU_TENSOR_MAP_SWIZZLE_128B",
        "CU_TENSOR_MAP_L2_PROMOTION_L2_256B",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    ]


@pytest.mark.parametrize(("span", "name"), [(16, "NONE"), (32, "32B"), (64, "64B"), (128, "128B")])
def test_spans(span, name, asked):
    Boxes("float32", (8, 64), (64, 1), (8, span // 4), span).encoded(64)
    assert asked.encoded[0][8] == f"CU_TENSOR_MAP_SWIZZLE_{name}"


def test_loads_that_round_to_tf32(asked):
    boxes = Boxes(ROUNDED, (8, 64), (64, 1), (8, 32), 128)
    boxes.encoded(64)
    assert asked.encoded[0][0] == "CU_TENSOR_MAP_DATA_TYPE_TFLOAT32" and asked.encoded[0][4] == [256]
    assert boxes.nbytes == 8 * 32 * 4
    array = np.full((8, 64), 1 + 2.0**-11 + 2.0**-12, np.float32)
    assert set(boxes.simulated(array).load((0, 0)).view(np.float32)) == {np.float32(1 + 2.0**-10)}
    plain = Boxes("float32", (8, 64), (64, 1), (8, 32), 128).simulated(array)
    assert set(plain.load((0, 0)).view(np.float32)) == {array[0, 0]}


def test_a_stride_that_nobody_takes_is_a_multiple_of_16(asked):
    Boxes("float16", (1, 5, 64), (7, 64, 1), (1, 8, 64), 128).encoded(64)
    assert asked.encoded[0][4] == [128, 16]


def test_another_address_is_not_another_encoding(asked):
    boxes = Boxes("float16", (8, 64), (64, 1), (8, 64), 128)
    one, two = boxes.encoded(0x100), boxes.encoded(0x200)
    assert len(asked.encoded) == 1 and asked.replaced == 2
    (first, *rest), (second, *others) = ((ctypes.c_uint64 * 16).from_address(each.address) for each in (one, two))
    assert (first, second) == (0x100, 0x200) and rest == others == [7] * 15


def test_few_addresses_are_remembered_and_maps_outlive_that(asked, monkeypatch):
    monkeypatch.setattr(tensor_map, "MOST_KNOWN", 2)
    boxes = Boxes("float16", (8, 64), (64, 1), (8, 64), 128)
    found = [boxes.encoded(address) for address in (0x100, 0x200, 0x100, 0x300)]
    assert asked.replaced == 3 and found[0] is found[2] and found[0] is not boxes.encoded(0x100)
    assert [ctypes.c_uint64.from_address(each.address).value for each in found] == [0x100, 0x200, 0x100, 0x300]


def test_the_same_arguments_are_the_same_boxes():
    one = boxes_of("float16", (8, 64), (64, 1), (8, 64), 128)
    assert one is boxes_of("float16", (8, 64), (64, 1), (8, 64), 128)
    assert one is not boxes_of("float16", (8, 64), (64, 1), (4, 64), 128) and one.nbytes == 8 * 64 * 2


@pytest.mark.parametrize("address", [0, 8, 0x7F08])
def test_an_address_that_is_no_multiple_of_16(address, asked):
    with pytest.raises(ValueError, match=r"tensor map of float16 \(8, 64\): address is .*, expected a multiple of 16"):
        Boxes("float16", (8, 64), (64, 1), (8, 64), 128).encoded(address)
    assert not asked.encoded


def test_what_the_driver_refuses(monkeypatch):
    monkeypatch.setattr(driver, "cu", Driver(error=1))
    with pytest.raises(RuntimeError, match="tensor map: the CUDA driver answered 1"):
        Boxes("float16", (8, 64), (64, 1), (8, 64), 128).encoded(64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bool", (8, 64), (64, 1), (8, 64), 128), "expected a dtype of float64, "),
        (("float16", (64,), (1,), (64,), 128), "expected 2 to 5 axes"),
        (("float16", (8, 64), (1,), (8, 64), 128), "expected 2 to 5 axes and as many of each"),
        (("float16", (8, 64), (64, 1), (64,), 128), "expected 2 to 5 axes and as many of each"),
        (("float16", (0, 64), (64, 1), (8, 64), 128), "axis 0 has 0 elements"),
        (("float16", (8, 64), (64, 1), (257, 64), 128), "boxes have 257 elements along axis 0, expected 1 to 256"),
        (("float16", (8, 64), (64, 1), (0, 64), 128), "boxes have 0 elements along axis 0, expected 1 to 256"),
        (("float16", (8, 64), (128, 2), (8, 64), 128), "stride 2 along the last axis, expected 1"),
        (("float16", (8, 60), (60, 1), (8, 64), 128), "a stride of 120 bytes along axis 0, expected a multiple of 16"),
        (("float16", (8, 64), (0, 1), (8, 64), 128), "a stride of 0 bytes along axis 0"),
        (("float16", (8, 64), (2**39, 1), (8, 64), 128), "along axis 0, expected a multiple of 16 from 16 to 2"),
        (("float16", (8, 64), (64, 1), (8, 64), 256), "span is 256, expected one of 16, 32, 64, 128"),
        (
            ("float16", (8, 64), (64, 1), (8, 4), 16),
            "boxes have 8 bytes along the last axis, expected a multiple of 16",
        ),
        (("float16", (8, 128), (128, 1), (8, 128), 128), "boxes have 256 bytes along the last axis, expected the 128"),
        (("float16", (8, 128), (128, 1), (8, 32), 128), "boxes have 64 bytes along the last axis, expected the 128"),
    ],
)
def test_what_cannot_be_encoded(arguments, message):
    with pytest.raises(ValueError, match=f"tensor map of {arguments[0]} .*: .*{message}"):
        boxes_of(*arguments)


def test_the_record_of_the_simulator():
    boxes = Boxes("bfloat16", (8, 72), (72, 1), (4, 64), 128)
    array = np.zeros((8, 72), ml_dtypes.bfloat16)
    record = boxes.simulated(array)
    assert record.array is array and record.box == (64, 4) and record.span == 128 and record.nbytes == boxes.nbytes
    assert record.address % 128 == 0
    for other in (array[:, :64], array.astype(np.float16), array[:4]):
        with pytest.raises(ValueError, match=r"tensor map of bfloat16 \(8, 72\), strides \(144, 2\): the array is"):
            boxes.simulated(other)


ROWS = Mapped("x", "bfloat16", (64, 64), (64, 1), (8, 64))
COLUMNS = Mapped("y", "bfloat16", (32, 64), (64, 1), (16, 64))


def test_each_map_has_the_address_of_its_array(asked: Driver):
    found = Maps([COLUMNS, ROWS, COLUMNS], ["x", None, "y"])
    maps = found.encoded([0x1000, 0, 0x2000])
    gc.collect()
    assert [ctypes.c_uint64.from_address(each.address).value for each in maps] == [0x2000, 0x1000, 0x2000]
    assert maps[0] is maps[2], "one shape at one address is one map"
    assert Maps([ROWS], ["x"]).encoded([0x1000]) == [maps[1]], "for whatever plan"
