"""rope's errors: they come from the spec, name operator and argument, and are the same everywhere."""

from typing import Any

import numpy as np
import pytest

from dualops import reference
from dualops.spec import ArrayMeta, rope, rope_tables
from dualops.spec.base import Problem


def zeros(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """Arrays of a right call, or with other shapes."""
    right = {"q": (2, 3, 5, 8), "k": (2, 1, 5, 8), "cos": (5, 4), "sin": (5, 4)}
    return {name: np.zeros(shape, np.float32) for name, shape in {**right, **shapes}.items()}


def bound(arrays: dict[str, np.ndarray], **params: Any) -> Problem:
    return rope.bind({name: ArrayMeta.of_numpy(array) for name, array in arrays.items()}, params)


WRONG_SHAPES = [
    ({"q": (3, 5, 8)}, r"rope: q has 3 axes \(3, 5, 8\), expected 4: \[B, H, S, D\]"),
    ({"k": (1, 1, 5, 8)}, "rope: k has B=1, q has B=2"),
    ({"k": (2, 1, 4, 8)}, "rope: k has S=4, q has S=5"),
    ({"k": (2, 1, 5, 6)}, "rope: k has D=6, q has D=8"),
    ({"sin": (5, 3)}, r"rope: sin has shape \(5, 3\), cos has shape \(5, 4\), expected the same"),
    ({"cos": (4,), "sin": (4,)}, r"rope: cos has 1 axes \(4,\), expected \[Smax, R/2\], or \[B, S, R/2\]"),
    ({"cos": (5, 5), "sin": (5, 5)}, r"rope: cos has 5 columns, q has D=8, expected R/2=4 or R=8"),
    ({"cos": (5, 2), "sin": (5, 2)}, r"rope: cos has 2 columns, q has D=8, expected R/2=4 or R=8"),
    ({"q": (2, 3, 5, 7), "k": (2, 1, 5, 7)}, "rope: q has D=7, expected an even number, or dim"),
    ({"cos": (4, 4), "sin": (4, 4)}, "rope: cos has Smax=4, q has S=5, expected Smax to be S or more"),
    ({"cos": (3, 5, 4), "sin": (3, 5, 4)}, "rope: cos has B=3, q has B=2, expected the same or 1"),
    ({"cos": (2, 6, 4), "sin": (2, 6, 4)}, "rope: cos has S=6, q has S=5, expected the same"),
]


@pytest.mark.parametrize(("shapes", "message"), WRONG_SHAPES)
def test_wrong_shapes(shapes, message):
    arrays = zeros(**shapes)
    with pytest.raises(ValueError, match=f"^{message}"):
        bound(arrays)
    with pytest.raises(ValueError, match=f"^{message}"):
        reference.rope(**arrays)


@pytest.mark.parametrize("columns", range(1, 9))
@pytest.mark.parametrize("dim", [None, 4, 8, 0])
def test_what_a_tables_columns_are_follows_from_width_and_dim_alone(columns, dim):
    """Among them a table of both halves of 4 dimensions, of 8: it has the width of one for all of them."""
    arrays, R = zeros(cos=(5, columns), sin=(5, columns)), 8 if dim is None else dim
    if columns in (R // 2, R):
        assert bound(arrays, dim=dim).half == R // 2
    else:
        with pytest.raises(ValueError, match=rf"^rope: cos has {columns} columns, .*expected R/2={R // 2} or R={R}"):
            bound(arrays, dim=dim)


def test_tables_of_both_halves_are_for_half_rotated_pairs():
    with pytest.raises(ValueError, match=r"^rope: cos has R=8 columns, expected R/2=4 for interleaved pairs"):
        bound(zeros(cos=(5, 8), sin=(5, 8)), interleaved=True)


def test_tables_of_both_halves_of_half_the_dimensions():
    """They have the width of tables for all of D. Where values can be seen, as here, they are found out."""
    cos, sin = (np.concatenate((x, x), -1) for x in reference.rope_tables(np.arange(5), 4))
    arrays = zeros() | {"cos": cos, "sin": sin}
    for function in (reference.rope, reference.rope_backward):
        one, two = arrays["q"], arrays["k"]
        with pytest.raises(ValueError, match=r"cos has 4 columns, whose halves are alike, .* or dim=4$"):
            function(one, two, cos, sin)
        function(one, two, cos, sin, dim=4)
    reference.rope(**zeros())  # at position 0 all halves are alike


@pytest.mark.parametrize(
    ("dim", "error", "message"),
    [
        (10, ValueError, "dim is 10, q has D=8, expected D or less"),
        (3, ValueError, "dim is 3, expected an even number, 0 to 16777216"),
        (-2, ValueError, "dim is -2, expected an even number, 0 to 16777216"),
        (4.0, TypeError, "dim is 4.0, expected an integer"),
    ],
)
def test_wrong_rotary_dimensions(dim, error, message):
    with pytest.raises(error, match=f"^rope: {message}"):
        bound(zeros(), dim=dim)


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        (np.zeros(4, np.int64), ValueError, r"positions have shape \(4,\), expected \(5,\) or \(2, 5\)"),
        (np.zeros((1, 5), np.int32), ValueError, r"positions have shape \(1, 5\), expected \(5,\) or \(2, 5\)"),
        (np.zeros(5, np.float32), TypeError, "positions has dtype float32, expected one of int64, int32"),
        (np.array([0, 1, 2, 9, 5]), ValueError, r"positions has 9 at \(3,\), cos has Smax=5, expected 0 to 4"),
        (np.array([[0] * 5, [0, -1, 0, 0, 0]]), ValueError, r"positions has -1 at \(1, 1\), cos has Smax=5"),
        ([0, 1, 2, 3, 4], TypeError, "positions is a list, expected a numpy.ndarray"),
    ],
)
def test_wrong_positions(positions, error, message):
    with pytest.raises(error, match=f"^rope: {message}"):
        reference.rope(**zeros(), positions=positions)


def test_positions_are_rows_of_tables_that_all_batches_share():
    arrays = zeros(cos=(2, 5, 4), sin=(2, 5, 4)) | {"positions": np.zeros(5, np.int64)}
    with pytest.raises(ValueError, match=r"^rope: positions are given and cos has 3 axes \(2, 5, 4\), expected 2"):
        bound(arrays)


def test_tables_shorter_than_the_sequence_do_with_positions():
    arrays = zeros(cos=(3, 4), sin=(3, 4)) | {"positions": np.array([0, 1, 2, 1, 0])}
    assert bound(arrays).rows == 3


def test_wrong_dtypes_and_strides():
    for name, dtype, message in (
        ("k", np.float16, "k has dtype float16, q has dtype float32, expected the same"),
        ("cos", np.float16, "cos has dtype float16, q has dtype float32, expected float32"),
        ("q", np.int32, "q has dtype int32, expected one of float64"),
    ):
        arrays = zeros()
        with pytest.raises(TypeError, match=f"^rope: {message}"):
            bound(arrays | {name: arrays[name].astype(dtype)})
    half = {name: array.astype(np.float16) for name, array in zeros().items()}
    with pytest.raises(TypeError, match=r"^rope: sin has dtype float32, cos has dtype float16, expected the same$"):
        bound(half | {"sin": half["sin"].astype(np.float32)})
    assert bound(half | {name: half[name].astype(np.float32) for name in ("cos", "sin")}).dtype == "float16"
    stepped = zeros(cos=(5, 8), sin=(5, 8))
    with pytest.raises(ValueError, match=r"^rope: cos has stride 2 along its last axis, expected 1$"):
        bound(zeros() | {name: stepped[name][:, ::2] for name in ("cos", "sin")})


def test_the_gradients_errors_name_its_own_arguments():
    arrays = zeros()
    given = {"dq_rotated": arrays["q"], "dk_rotated": arrays["k"][:, :, :4], "cos": arrays["cos"], "sin": arrays["sin"]}
    with pytest.raises(ValueError, match=r"^rope_backward: dk_rotated has S=4, dq_rotated has S=5"):
        reference.rope_backward(**given)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({}, TypeError, "dim is None, expected an integer"),
        ({"dim": 7}, ValueError, "dim is 7, expected an even number, 2 to 16777216"),
        ({"dim": 0}, ValueError, "dim is 0, expected an even number, 2 to 16777216"),
        ({"dim": 8.0}, TypeError, "dim is 8.0, expected an integer"),
        ({"dim": 8, "base": 0}, ValueError, "base is 0, expected a number above 0"),
        ({"dim": 8, "base": "x"}, TypeError, "base is 'x', expected a number"),
        ({"dim": 8, "dtype": "int32"}, ValueError, "dtype is 'int32', expected one of 'float64', 'float32'"),
        ({"dim": 8, "scaling": "linear"}, TypeError, "scaling is 'linear', expected None, a tuple or a dict"),
        ({"dim": 8, "scaling": ("ntk", 2.0)}, ValueError, "expected a rope_type among 'default', 'linear', 'llama3'"),
        ({"dim": 8, "scaling": ("linear",)}, ValueError, "expected 'linear' with factor; factor missing"),
        ({"dim": 8, "scaling": ("linear", 2, 3)}, ValueError, "expected 'linear' with factor$"),
        ({"dim": 8, "scaling": ("linear", -1)}, ValueError, "expected a number above 0"),
        ({"dim": 8, "scaling": ("llama3", 8, 4, 1, 8192)}, ValueError, "expected low_freq_factor to be less than"),
        ({"dim": 8, "scaling": {"factor": 2.0}}, ValueError, "expected a rope_type among"),
        ({"dim": 8, "scaling": {"rope_type": "default", "factor": 2.0}}, ValueError, "expected no factor"),
        ({"dim": 8, "scaling": {"full_attention": {"rope_type": "default"}}}, ValueError, "one kind of layers: 'fu"),
        ({"dim": 8, "scaling": {"rope_type": "longrope"}}, NotImplementedError, "scaling has 'longrope', which is not"),
        ({"dim": 8, "scaling": {"rope_type": "default", "mrope_section": [2]}}, NotImplementedError, "'mrope_section'"),
        ({"dim": 8, "scaling": {"rope_type": "yarn", "factor": None}}, ValueError, "factor, original_max.* missing"),
        ({"dim": 8, "scaling": ("yarn", 2, 64, 1, 32)}, ValueError, "expected beta_slow to be less than beta_fast"),
        ({"dim": 8, "scaling": ("yarn", 2, 64, 32, 1, 1, 1)}, TypeError, "expected True or False"),
        ({"dim": 8, "base": 1, "scaling": ("yarn", 2, 64)}, ValueError, "base is 1.0, expected more than 1 for yarn"),
        ({"dim": 8, "scaling": {"rope_type": "dynamic", "factor": 2}}, ValueError, "max_position_embeddings, seq_len"),
        ({"dim": 2, "scaling": ("dynamic", 2, 8, 9)}, ValueError, "R is 2, expected 4 or more for dynamic"),
        ({"dim": 8, "base": 7, "scaling": {"rope_type": "default", "rope_theta": 9}}, ValueError, "expected one of"),
        (
            {"dim": 8, "scaling": {"rope_type": "default", "partial_rotary_factor": 0.4}},
            ValueError,
            "partial_rotary_factor 0.4, of dim=8 that is R=3, expected an even number from 2 to 8",
        ),
        ({"dim": 8, "scaling": {"rope_type": "linear", "factor": 2, "x": 1}}, ValueError, "expected no x"),
        ({"dim": 8, "scaling": {"rope_type": "llama3", "factor": 2}}, ValueError, "expected 'llama3' with factor, low"),
    ],
)
def test_wrong_parameters_of_tables(params, error, message):
    with pytest.raises(error, match=f"^rope_tables: .*{message}"):
        reference.rope_tables(np.arange(3), **params)


def test_wrong_positions_of_tables():
    for positions, error, message in (
        (np.array(3), ValueError, r"positions has 0 axes \(\), expected 1 or 2: \[S\] or \[B, S\]"),
        (np.zeros((2, 2, 2), int), ValueError, "positions has 3 axes"),
        (np.zeros(3), TypeError, "positions has dtype float64, expected one of int64, int32"),
    ):
        with pytest.raises(error, match=f"^rope_tables: {message}"):
            reference.rope_tables(positions, 8)


def test_costs_by_hand():
    arrays = {name: x.astype(np.float16) for name, x in zeros().items()} | {
        name: x for name, x in zeros(cos=(9, 3), sin=(9, 3)).items() if name in ("cos", "sin")
    }
    cost = rope.forward_cost
    elements = 2 * 5 * (3 + 1) * 8
    assert cost.flops(bound(arrays, dim=6)) == 6 * 2 * 5 * (3 + 1) * 3
    assert cost.bytes_read(bound(arrays, dim=6)) == 2 * elements + 4 * 2 * 5 * 3  # of the tables, five tokens' rows
    assert cost.bytes_written(bound(arrays, dim=6)) == 2 * elements
    assert cost.bytes_written(bound(arrays, dim=6, inplace=True)) == 2 * elements * 6 // 8
    positions = arrays | {"positions": np.zeros((2, 5), np.int32)}
    assert cost.bytes_read(bound(positions, dim=6)) == 2 * elements + 4 * 2 * 9 * 3 + 4 * 10
    places = {"positions": ArrayMeta.of_numpy(np.zeros((2, 5), np.int32))}
    problem = rope_tables.bind(places, {"dim": 6, "dtype": "bfloat16"})
    assert rope_tables.forward_cost.bytes_read(problem) == 40
    assert rope_tables.forward_cost.bytes_written(problem) == 2 * 10 * 3 * 2
