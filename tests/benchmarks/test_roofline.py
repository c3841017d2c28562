"""The roof: which of the two it is, and that its call stands for the work of the case."""

from typing import Any

import pytest

from benchmarks import roofline
from benchmarks.tree import spec
from benchmarks.work import Work
from dualops.cuda.tuning import roof as memory
from dualops.spec.attention.cases import documents


class Moving:
    """A stream whose launch moves twice the bytes that were asked for."""

    scale = 0.5

    def __init__(self, *wanted: int):
        self.wanted = wanted

    def __call__(self) -> None:
        raise AssertionError("called")


@pytest.mark.parametrize(("flops", "moves"), [(3000, True), (5000, False)])
def test_the_roof_is_the_longer_of_moving_and_computing(
    flops: int, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def best_blocking(read: int, written: int, enough: float) -> memory.Blocking:
        asked.append(enough)
        return memory.Blocking(read / 100 + written / 50, 128, 4)  # 10 seconds

    product: Any = lambda: None  # noqa: E731
    monkeypatch.setattr(memory, "best_blocking", best_blocking)
    monkeypatch.setattr(memory, "Stream", Moving)
    monkeypatch.setattr(roofline, "matmul_rate", lambda dtype: {"bfloat16": 400.0}[dtype])
    monkeypatch.setattr(roofline, "matrix_product", lambda dtype: product)
    found = roofline.roof(Work(flops, 600, 200), "bfloat16")
    assert asked == [flops / 400.0]
    if moves:
        assert isinstance(found.call, Moving)
        assert found.call.wanted == (600, 200, 128, 4)
        assert found.scale == 0.5
    else:
        assert found == (product, 5000 / (2 * 8192**3))


def test_the_rate_is_that_of_a_product_that_fills_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "burst", lambda call: {"float32": 2.0, "float16": 4.0}[call()])
    monkeypatch.setattr(roofline, "matrix_product", lambda dtype: lambda: dtype)
    assert roofline.matmul_rate("float32") == 4096**3
    assert roofline.matmul_rate("float16") == 8192**3 / 2
    roofline.matmul_rate.cache_clear()


@pytest.mark.parametrize(
    ("params", "pairs"),
    [
        ({}, 4096**2),
        ({"mask_mod": documents}, 4 * 1000**2 + 96**2),
        ({"mask_mod": documents, "causal": True}, 4 * 1000 * 1001 // 2 + 96 * 97 // 2),
        ({"mask_mod": documents, "window": (0, 0)}, 4096),
    ],
)
def test_pairs_that_a_mask_hides_are_no_work(params: dict[str, Any], pairs: int) -> None:
    operator = spec.OPERATORS["flash_attention"]
    shapes = dict.fromkeys("qkv", (2, 3, 4096, 64))
    work = Work.of(operator, spec.Case("any", "bfloat16", shapes, params), "forward")
    assert work.flops == 2 * 2 * 3 * pairs * (64 + 64)
