"""What is seen of arrays of a library that shows them as `__cuda_array_interface__`; the address is nobody's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dualops.cuda import arrays
from dualops.cuda.arrays import InterfaceAdapter
from dualops.spec import ArrayMeta

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


@pytest.mark.parametrize(
    "changed", [{"shape": (3, 2)}, {"strides": (16, 4)}, {"typestr": "<f2"}, {"data": (ADDRESS, True)}]
)
def test_what_metadata_depends_on_tells_plans_apart(changed):
    adapter, one, other = InterfaceAdapter(), shown(), shown(**changed)
    assert adapter.layouts([one]) == adapter.layouts([shown()])
    assert adapter.layouts([one]) != adapter.layouts([other])
    assert [list(each) for each in adapter.shapes([one])] != [list(each) for each in adapter.shapes([other])]
