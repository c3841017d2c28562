"""A plan's tensor maps: whose addresses they have, and who keeps them. Nothing is launched."""

import ctypes
import gc

from dualops.cuda.launch.tensor_map import Mapped, Maps

from .test_tensor_map import Driver, asked as asked

ROWS = Mapped("x", "bfloat16", (64, 64), (64, 1), (8, 64))
COLUMNS = Mapped("y", "bfloat16", (32, 64), (64, 1), (16, 64))


def test_each_map_has_the_address_of_its_array(asked: Driver):
    found = Maps([COLUMNS, ROWS, COLUMNS], ["x", None, "y"])
    maps = found.encoded([0x1000, 0, 0x2000])
    gc.collect()
    assert [ctypes.c_uint64.from_address(each.address).value for each in maps] == [0x2000, 0x1000, 0x2000]
    assert maps[0] is maps[2], "one shape at one address is one map"
    assert Maps([ROWS], ["x"]).encoded([0x1000]) == [maps[1]], "for whatever plan"
