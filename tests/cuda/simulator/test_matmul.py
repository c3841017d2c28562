"""matmul's tiles that the SIM cases are too small for, and products whose axes fold."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from dualops.cuda.launch import device as devices
from dualops.cuda.launch.step import prepare
from dualops.cuda.matmul import simt
from dualops.cuda.matmul.product import Axis, Product, b_gradient_product, folded, forward_product
from dualops.cuda.tile.shared import Shared
from dualops.spec import OPERATORS, ArrayMeta, Case
from dualops.spec.matmul import shapes_of
from tests.checks import check
from tests.problems import Layout

SPEC = OPERATORS["matmul"]
LARGE, MEDIUM = (config for config, _ in simt.TILES[:2])
PADDED = Layout((0, 1), (0, 8))  # rows begin at multiples of 16 bytes
SHIFTED = Layout((0, 1), (0, 3), misalignment=1)


def launch(config: Any, *arrays: np.ndarray, out: np.ndarray, by: Any = simt, **params: Any) -> None:
    """What the public function does, with this Config."""
    given = dict(zip(("a", "b"), arrays)) | {"bias": params.pop("bias")}
    metas = {name: ArrayMeta.of_numpy(array) for name, array in (given | {"y": out}).items()}
    problem = SPEC.bind({name: metas[name] for name in given}, params)
    product = forward_product(problem, metas)
    (step,) = by.product_steps(product, problem, metas, config)
    prepare(step, list(metas), devices.current())([*given.values(), out])


@pytest.mark.parametrize(
    ("config", "dtype", "sizes", "layout", "place"),
    [
        (LARGE, "float32", (96, 72, 20), "nn", PADDED),
        (LARGE, "bfloat16", (120, 64, 16), "tn", PADDED),
        (LARGE, "float16", (131, 63, 9), "nt", SHIFTED),
        (MEDIUM, "float64", (64, 50, 18), "tt", PADDED),
        (MEDIUM, "bfloat16", (72, 64, 24), "nt", PADDED),
    ],
    ids=["large-nn", "large-tn", "large-nt", "medium-tt", "medium-nt"],
)
def test_tiles(config, dtype, sizes, layout, place, order):
    shapes, transposes = shapes_of(*sizes, layout=layout, bias=True)
    case = Case("tiles", dtype, shapes, {**transposes, "activation": "relu"})
    layouts = {"a": place, "b": place}
    check(SPEC, case, partial(launch, config), layouts=layouts, out_layout=place, ways=("given",))


def test_a_tile_that_threads_cannot_share_is_refused():
    with pytest.raises(ValueError, match="256 threads can't share a slice of 128 x 8 in loads of 8"):
        simt.loader("bfloat16", simt.Reading("depth", 8), Shared("bfloat16", 256).tile(8, 128), 256)


def bound(dtype: str, shapes: dict[str, tuple[int, ...]], backward: bool = False, **params: Any) -> Any:
    arrays = {name: np.empty(shape, dtype) for name, shape in shapes.items()}
    metas = {name: ArrayMeta.of_numpy(array) for name, array in arrays.items()}
    problem = (SPEC.bind_backward if backward else SPEC.bind)(metas, params)
    return problem, {**metas, **problem.outputs(SPEC.gradients if backward else SPEC.outputs)}


def test_a_batch_of_rows_that_meet_one_matrix_is_a_taller_one():
    """x [2, 5, 3] @ w [3, 4] is [10, 3] @ [3, 4]; dw is one product, summed over all ten rows."""
    shapes = {"a": (2, 5, 3), "b": (3, 4)}
    found = forward_product(*bound("float32", shapes))
    assert (found.batch, found.m.size, found.n.size, found.k.size) == ((), 10, 4, 3)
    problem, metas = bound("float32", {**shapes, "dy": (2, 5, 4)}, backward=True)
    found = b_gradient_product(problem, metas, "dy")
    assert (found.batch, found.outer, found.k.size, found.rounds) == ((), (), 10, 1)


def test_what_does_not_lie_as_one_axis_is_a_sum_of_products():
    """a is [K, M] in memory, so that its rows of two batches are not evenly apart."""
    shapes, transposes = shapes_of(5, 4, 3, layout="tn", a=(2,))
    problem, metas = bound("float32", {**shapes, "dy": (2, 5, 4)}, backward=True, **transposes)
    found = b_gradient_product(problem, metas, "dy")
    assert (found.batch, [axis.size for axis in found.outer], found.k.size) == ((), [2], 5)
    assert forward_product(*bound("float32", shapes, **transposes)).batches == 2


def test_columns_are_what_lies_side_by_side_in_the_result():
    m, n, k = Axis(7, y=1, a=3), Axis(5, y=7, b=1), Axis(3, a=1, b=5)
    found = folded(Product(("y", "", "a", "b", ""), (), (), m, n, k))
    assert found.names == ("y", "", "b", "a", "")
    assert (found.m, found.n) == (Axis(5, y=7, a=1), Axis(7, y=1, b=3))
    with_bias = folded(Product(("y", "", "a", "b", "bias"), (), (), m, n, k))
    assert (with_bias.m, with_bias.n) == (m, n)


def test_no_batches_sum_to_nothing():
    m, n, k = Axis(2, y=2, a=2), Axis(2, y=1, b=1), Axis(2, a=1, b=2)
    found = folded(Product(("da", "", "a", "b", ""), (), (Axis(0, a=4, b=4),), m, n, k))
    assert (found.rounds, found.k.size) == (1, 0)
