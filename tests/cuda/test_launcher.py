"""What a launch passes to the driver: the words of its arguments, and where the driver finds each."""

from ctypes import c_double, c_float, c_int64, c_uint64, sizeof
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from dualops.cuda.compiler import backend
from dualops.cuda.compiler.backend import i32, i64, pointer, tensor_map, types
from dualops.cuda.launch import device, driver, step
from dualops.cuda.launch.step import Launcher, Step

pytestmark = pytest.mark.skipif(backend.SIMULATED, reason="the simulator has a launcher of its own")

f32, f64 = types.float32, types.float64


class Pair(NamedTuple):
    scale: Any
    count: Any


KINDS = (
    pointer(i64),
    types.NamedTuple((f32, i32), Pair),
    tensor_map,
    pointer(i64),
    pointer(i64),
    f64,
    f32,  # an array's address as a number
    i64,
)
NAMES = ("x", None, "map", "y", "z", "w")


class Launches:
    """What the driver was given, read when it was given."""

    def __init__(self) -> None:
        self.arguments: list[list[int]] = []

    def launch(self, config: Any, function: Any, addresses: int, extra: int) -> tuple[int]:
        count = len([*step.leaves(KINDS)])
        self.arguments.append([*(c_uint64 * count).from_address(addresses)])
        return (0,)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(step, "load", lambda *_: (SimpleNamespace(handle=0), [*step.leaves(KINDS)]))
    cu = SimpleNamespace(cuLaunchKernelEx=made.launch, CUfunction=int)
    monkeypatch.setattr(driver, "cu", cu, raising=False)
    monkeypatch.setattr(Launcher, "_config", lambda self, grid, handle: (grid, handle))
    return made


def at(address: int, kind: Any) -> Any:
    assert sizeof(kind) <= 8
    return kind.from_address(address).value


@pytest.mark.parametrize("count", [3, -7])
def test_the_driver_finds_every_argument(launches: Launches, count: int) -> None:
    kernel = backend.Kernel(lambda: None, KINDS, 128, 1, 1)
    made = Launcher(
        Step(kernel, (5,), ("x", Pair(0.5, count), "map", "y", "z", 2.5, "w", "x")), NAMES, device.every("sm_90a")[0]
    )
    grid, args = made.numbers()
    assert grid == (5,)
    assert args == [0, 0.5, count, 0, 0, 0, 2.5, 0, 0]
    run = made(grid, args)
    for first in (1 << 40, 1 << 41):
        pointers = [first + 64 * n for n in range(len(NAMES))]
        run(pointers, 0)
        x, scale, number, described, y, z, wide, narrow, again = launches.arguments[-1]
        assert [at(each, c_int64) for each in (x, y, z, again)] == [first, first + 192, first + 256, first]
        assert (at(scale, c_float), at(wide, c_double), at(number, c_int64)) == (0.5, 2.5, count)
        assert described == first + 128, "the bytes of a tensor map are passed where they are"
        assert at(narrow, c_float) == np.float32(first + 320)
