"""matmul's sm90 rung in the simulator: Configs that the SIM cases are too small for, every layout, what is refused."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

import dualops.cuda
from dualops.cuda.launch.operation import OPERATIONS
from dualops.cuda.matmul.sm90 import config as sm90_config, parts
from dualops.cuda.matmul.sm90.config import Sm90Config
from dualops.cuda.tile.boxes import Cluster
from dualops.cuda.tuning.tune import plan
from dualops.spec import OPERATORS, Case
from dualops.spec.matmul import shapes_of
from dualops.spec.meta import numpy_dtype
from tests.checks import check
from tests.problems import Layout

ROWS_OF_16_BYTES = Layout((0, 1), (0, 8))
BESIDE_THEM = Layout((0, 1), (0, 3), misalignment=1)
matmul = partial(dualops.cuda.matmul, kernel="sm90")

ONE, TWO, WIDE = Sm90Config(1, 64, 2, 64), Sm90Config(2, 128, 2, 64), Sm90Config(2, 256, 2, 128)
ABOVE, BESIDE = Sm90Config(2, 128, 3, 128, Cluster(2, 1), group=2), Sm90Config(1, 32, 3, 32, Cluster(1, 4))
SQUARE = Sm90Config(1, 64, 2, 64, Cluster(2, 2), group=4)
HALVES, THIRDS = Sm90Config(1, 64, 2, 64, splits=2), Sm90Config(2, 64, 2, 64, splits=3)
FLOATS = Sm90Config(1, 64, 2, 64, block_k=32, itemsize=4)
FLOATS_ABOVE = Sm90Config(2, 96, 3, 32, Cluster(2, 1), block_k=32, group=2, itemsize=4)
PIECES = Sm90Config(1, 32, 3, 32, block_k=64, itemsize=4, piece=1)
PIECES_ABOVE = Sm90Config(2, 64, 2, 64, Cluster(1, 2), block_k=32, itemsize=4, piece=3)
PIECES_OF_HALVES = Sm90Config(1, 32, 2, 32, block_k=32, splits=2, itemsize=4, piece=2)
TABLES = {False: ("TILES",), True: ("TF32_TILES", "PARTS_TILES")}  # by whether a Config has floats


@pytest.fixture
def only(request: pytest.FixtureRequest) -> Iterator[None]:
    """The rung has this Config alone, and plans are made again."""
    operation = OPERATIONS["matmul"][0]
    tables: dict[str, Any] = dict.fromkeys(TABLES[request.param.itemsize == 4], ((request.param, 1),))
    with (
        mock.patch.multiple(sm90_config, LEAST_SPLIT=1, **tables),
        mock.patch.multiple(operation, plans={}, families={}),
    ):
        yield


def hold(sizes: tuple[int, int, int], dtype: str, layout: str, places: dict[str, Layout], **options: Any) -> None:
    """Check a product on arrays that lie so."""
    out_layout = places.pop("out", None)
    batches = {name: options.pop(name) for name in ("a", "b") if name in options}
    shapes, transposes = shapes_of(*sizes, layout=layout, bias=options.pop("bias", False), **batches)
    case = Case("sm90", dtype, shapes, transposes | options)
    check(OPERATORS["matmul"], case, matmul, layouts=places, out_layout=out_layout, ways=("given",))


@pytest.mark.parametrize(
    ("only", "sizes", "layout", "dtype"),
    [
        (ONE, (136, 72, 200), "nn", "bfloat16"),
        (ONE, (65, 136, 64), "nt", "float16"),
        (TWO, (136, 136, 328), "tn", "bfloat16"),
        (TWO, (136, 264, 72), "tt", "float16"),
        (ABOVE, (264, 136, 136), "nn", "float16"),
        (ABOVE, (130, 136, 264), "nt", "bfloat16"),
        (BESIDE, (72, 200, 136), "nn", "bfloat16"),
        (BESIDE, (64, 136, 72), "nt", "float16"),
        (SQUARE, (200, 136, 136), "tn", "bfloat16"),
        (SQUARE, (136, 128, 72), "tt", "float16"),
        (WIDE, (136, 272, 72), "nn", "float16"),
        (WIDE, (136, 272, 72), "nt", "bfloat16"),
        (HALVES, (72, 136, 328), "nn", "bfloat16"),
        (THIRDS, (136, 72, 456), "nt", "float16"),
    ],
    indirect=["only"],
    ids=lambda value: value.replace(" ", "") if isinstance(value, str) else None,
)
def test_tiles(only, sizes, layout, dtype, order):
    """Several tiles a block, ragged ones, fewer and more slices than stages; results as boxes and one by one.

    Of the two products of a Config, one is stored as boxes and one row by row; in the other order the other way round.
    """
    places = {"a": ROWS_OF_16_BYTES, "b": ROWS_OF_16_BYTES}
    if (layout[1] == "n") == (order == "forward"):
        hold(sizes, dtype, layout, {**places, "out": ROWS_OF_16_BYTES})
    else:
        hold(sizes, dtype, layout, {**places, "out": BESIDE_THEM}, bias=True, activation="relu")


@pytest.mark.parametrize(
    ("only", "sizes", "layout", "precision"),
    [
        (FLOATS, (72, 72, 100), "nt", "tf32"),
        (FLOATS, (65, 130, 71), "nn", "tf32"),
        (FLOATS_ABOVE, (136, 100, 36), "tn", "tf32"),
        (PIECES, (72, 40, 131), "tt", "3xtf32"),
        (PIECES_ABOVE, (72, 132, 60), "nt", "3xtf32"),
        (PIECES_ABOVE, (65, 61, 35), "nn", "3xtf32"),
        (PIECES_OF_HALVES, (65, 40, 75), "tn", "3xtf32"),
    ],
    indirect=["only"],
    ids=lambda value: value.replace(" ", "") if isinstance(value, str) else None,
)
def test_float32(only, sizes, layout, precision, order):
    """Factors as they lie and copied along the sum, results as boxes and, of rows that are odd, one by one."""
    if sizes[1] % 4 == 0:
        hold(sizes, "float32", layout, {}, precision=precision)
    else:
        places = {"a": BESIDE_THEM, "b": ROWS_OF_16_BYTES, "out": BESIDE_THEM}
        hold(sizes, "float32", layout, places, precision=precision, bias=True, activation="relu")


@pytest.mark.parametrize(
    ("only", "precision", "batches"),
    [(FLOATS, "tf32", ((2, 2), (1, 2))), (PIECES, "3xtf32", ((2, 1), (2,)))],
    indirect=["only"],
    ids=["tf32", "3xtf32"],
)
def test_batches_of_copies(only, precision, batches):
    """A copy has the axes that its factor has, not those that it is broadcast along."""
    hold((24, 40, 20), "float32", "tn", {}, a=batches[0], b=batches[1], precision=precision)


@pytest.mark.parametrize("rung", ["sm80", "sm90"])
def test_what_is_infinite_in_float32(rung):
    """And what is NaN: with numbers that tf32 has, and such as are split in parts of two signs."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((24, 12), (12, 40)))
    a[2], b[:, 3] = a[2] * np.float32(1.1), b[:, 3] * np.float32(1.1)
    a[3, 5], a[7, 2], b[4, 6], b[5, 7], b[5, 8] = np.inf, np.nan, -np.inf, np.inf, 0.0
    with np.errstate(invalid="ignore"):
        expected = a @ b
    for precision in ("tf32", "3xtf32"):
        found = dualops.cuda.matmul(a, b, precision=precision, kernel=rung)
        non_finite = ~np.isfinite(expected)
        assert np.array_equal(found[non_finite], expected[non_finite], equal_nan=True)
        assert np.isfinite(found[~non_finite]).all()


@pytest.mark.parametrize("only", [TWO, BESIDE], indirect=True)
def test_what_is_applied_to_a_product(only, order):
    for activation in ("gelu", "silu"):
        hold((72, 136, 72), "bfloat16", "nt", {}, bias=True, activation=activation, return_preactivation=True)
    hold((72, 130, 64), "float16", "nt", {}, bias=True, activation="relu", return_preactivation=True)


@pytest.mark.parametrize("only", [ONE, SQUARE], indirect=True)
def test_batches(only):
    """One batch axis, two, those that a or b is broadcast along, and a batch that is more rows."""
    for a, b in (((3,), (3,)), ((2, 1), (3,)), ((2, 3), (1, 3)), ((), (2,)), ((3,), ()), ((2, 1, 2), (2, 1, 2))):
        hold((24, 40, 72), "bfloat16", "nn" if len(a) == 2 else "tt", {}, a=a, b=b)


@pytest.mark.parametrize("only", [ONE], indirect=True)
def test_factors_that_are_copied(only, order, monkeypatch):
    """Those whose rows are not a multiple of 16 bytes, or begin elsewhere."""
    monkeypatch.setattr(parts, "OFTEN", 1)
    hold((72, 75, 73), "bfloat16", "nn", {}, bias=True)
    hold((40, 33, 41), "float16", "tt", {}, a=(2, 1), b=(3,), activation="relu")
    hold((40, 32, 48), "bfloat16", "nt", {"a": BESIDE_THEM})


def of(shape: tuple[int, ...], dtype: str = "bfloat16") -> np.ndarray:
    return np.ones(shape, numpy_dtype(dtype))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (of((16, 16), "float32"), of((16, 16), "float32")),
        (of((16, 9)), of((9, 16))),  # rows of 18 bytes
        (of((16, 0)), of((0, 16))),
        (of((16, 48))[:, ::3], of((16, 16))),
        (of((2, 1, 2, 1, 2, 16, 16)), of((3, 1, 3, 1, 16, 16))),  # three batch axes
    ],
    ids=["float32", "rows of 18 bytes", "an empty sum", "no axis contiguous", "three batch axes"],
)
def test_what_it_does_not_do(a, b):
    with pytest.raises(NotImplementedError, match="rung sm90 does not do"):
        matmul(a, b)
    assert plan("matmul", a, b).choice.rung in ("simt", "sm80")


def test_what_it_is_chosen_for():
    assert plan("matmul", of((256, 64)), of((64, 512))).choice.rung == "sm90"
    found = plan("matmul", of((257, 65)), of((65, 512))).choice
    assert found.rung == "sm90" and list(found.workspace) == ["y: a along the sum"]
    assert found.workspace["y: a along the sum"].shape == (1, 257, 72)


def test_float32_in_a_precision_of_tensor_cores():
    a, b, small = of((256, 64), "float32"), of((64, 512), "float32"), of((7, 5), "float32")
    for precision in ("tf32", "3xtf32"):
        found = plan("matmul", a, b, precision=precision).choice
        assert found.rung == "sm90"
        copied = ["y: b along the sum"] if precision == "tf32" else ["y: a along the sum", "y: b along the sum"]
        assert list(found.workspace) == copied
        for rung in ("naive", "simt"):
            with pytest.raises(NotImplementedError, match=f"rung {rung} does not do"):
                dualops.cuda.matmul(a, b, precision=precision, kernel=rung)
    assert plan("matmul", small, of((5, 7), "float32"), precision="tf32").choice.rung == "sm90"
    assert not plan("matmul", a, of((512, 64), "float32"), transpose_b=True, precision="tf32").choice.workspace
    assert plan("matmul", a, b).choice.rung == "simt"


def test_a_plan_says_its_maps():
    found = plan("matmul", of((72, 64)), of((64, 40))).choice
    assert {name: mapped.array for name, mapped in found.maps.items()} == {
        "y: a_map": "a",
        "y: b_map": "b",
        "y: y_map": "y",
    }
    assert found.maps["y: a_map"].shape == (1, 72, 64) and found.maps["y: b_map"].shape == (1, 64, 40)
