"""A case on a device: what is laid out, and what the check sees."""

import numpy as np
import pytest
import torch

from benchmarks import workload
from benchmarks.contestant import Contestant
from benchmarks.samples import rows
from benchmarks.tree import spec
from benchmarks.workload import Workload, WrongResult, to_torch
from dualops.spec.matmul import shapes_of
from dualops.spec.meta import numpy_dtype
from dualops.testing import to_numpy

SOFTMAX = spec.OPERATORS["softmax"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few enough bytes for a CPU: inputs of more than 512 elements repeat."""
    monkeypatch.setattr(workload, "ROTATION_BYTES", 20_000)
    monkeypatch.setattr(workload, "GENERATED_ELEMENTS", 512)


def softmax_workload(dtype: str = "float32") -> Workload:
    return Workload(SOFTMAX, spec.Case("toy", dtype, {"x": (21, 64)}), rows, device="cpu")


def torch_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def torch_backward(y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)


RIGHT = Contestant("torch", torch_softmax, torch_backward)


class TestData:
    def test_generated_rows_repeat_to_the_whole_case(self) -> None:
        seen: list[torch.Tensor] = []
        Workload.call(softmax_workload(), Contestant("spy", lambda x: seen.append(x)), "forward")()
        (x,) = seen
        assert x.shape == (21, 64)
        assert torch.equal(x[8:16], x[:8])
        assert torch.equal(x[16:], x[:5])
        assert not torch.equal(x[0], x[1])

    def test_calls_take_turns_over_more_than_the_rotation(self) -> None:
        addresses: list[int] = []
        call = softmax_workload().call(Contestant("spy", lambda x: addresses.append(x.data_ptr())), "forward")
        for _ in range(12):
            call()
        copies = len(set(addresses))
        assert copies * 21 * 64 * 4 >= 20_000
        assert addresses[:copies] == addresses[copies : 2 * copies]
        assert len(set(addresses[:copies])) == copies

    def test_results_live_as_long_as_their_copy_waits(self) -> None:
        results: list[int] = []

        def forward(x: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x)
            results.append(y.data_ptr())
            return y

        call = softmax_workload().call(Contestant("spy", forward), "forward")
        for _ in range(4):
            call()
        assert len(set(results)) == 4

    @pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
    def test_arrays_cross_to_torch_and_back_bit_for_bit(self, dtype: str) -> None:
        array = np.random.default_rng(0).standard_normal((5, 7)).astype(numpy_dtype(dtype))
        tensor = to_torch(array, "cpu")
        assert str(tensor.dtype) == f"torch.{dtype}"
        assert to_numpy(tensor).dtype == array.dtype
        assert to_numpy(tensor).tobytes() == array.tobytes()


class TestCheck:
    @pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
    def test_torch_softmax_passes_both_ways(self, dtype: str) -> None:
        work = softmax_workload(dtype)
        assert work.check(RIGHT, "forward").passed
        work.prepare_backward(RIGHT)
        assert work.check(RIGHT, "backward").passed

    @pytest.mark.parametrize("row", [0, 3, 7])
    def test_one_wrong_row_among_the_generated_is_found(self, row: int) -> None:
        def forward(x: torch.Tensor) -> torch.Tensor:
            y = torch_softmax(x)
            y[row::8] *= 1.001
            return y

        assert not softmax_workload().check(Contestant("wrong", forward), "forward").passed

    def test_one_wrong_element_among_the_repeated_is_found(self) -> None:
        def forward(x: torch.Tensor) -> torch.Tensor:
            y = torch_softmax(x)
            y[20, 63] = 0
            return y

        with pytest.raises(WrongResult, match="row 0 on and row 16 on"):
            softmax_workload().check(Contestant("wrong", forward), "forward")

    def test_a_direction_that_is_not_there(self) -> None:
        with pytest.raises(NotImplementedError, match="spy has no backward"):
            softmax_workload().check(Contestant("spy", torch_softmax), "backward")


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("size", [64, 65])
def test_matrices_do_not_repeat_though_they_are_square(layout: str, size: int) -> None:
    """Half of the rows of both would be another problem."""
    operator = spec.OPERATORS["matmul"]
    shapes, transposes = shapes_of(size, size, size, layout=layout)
    assert workload.generated_batch(operator, spec.Case("toy", "float32", shapes, transposes)) is None
    shapes, transposes = shapes_of(8, 8, 8, layout=layout, a=(20,), b=(20,))
    assert workload.generated_batch(operator, spec.Case("toy", "float32", shapes, transposes)) == 8  # batches do


def test_data_that_was_written_over_is_restored() -> None:
    work = softmax_workload()
    work.prepare_backward(RIGHT)
    for direction in ("forward", "backward"):
        before = [{name: x.clone() for name, x in arrays.items()} for arrays in work._sets(direction)]
        places = [x.data_ptr() for arrays in work._sets(direction) for x in arrays.values()]
        assert len(places) > 2
        call = work.call(Contestant("zero", lambda x: x.zero_(), lambda y, dy: (y.zero_(), dy.zero_())), direction)
        for _ in before:
            call()
        assert all(not x.any() for arrays in work._sets(direction) for x in arrays.values())
        work.restore(direction)
        assert [x.data_ptr() for arrays in work._sets(direction) for x in arrays.values()] == places
        for arrays, were in zip(work._sets(direction), before, strict=True):
            assert all(torch.equal(x, were[name]) for name, x in arrays.items())


def test_every_bench_case_is_cut_to_what_is_generated_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 2^24 elements of the largest input; 2^27, drawn in seconds, where no axis is common to all."""
    monkeypatch.setattr(workload, "GENERATED_ELEMENTS", 2**24)
    for operator in spec.OPERATORS.values():
        for case in (*operator.tagged(spec.Tag.BENCH), *operator.tagged(spec.Tag.COMPARE)):
            largest = max(case.shapes.values(), key=lambda shape: int(np.prod(shape)))
            batch = workload.generated_batch(operator, case)
            if batch is None:
                assert int(np.prod(largest)) <= 2**27
            else:
                assert batch < largest[0]
                assert 2**23 < batch * int(np.prod(largest[1:])) <= 2**24 or batch == 1
