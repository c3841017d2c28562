"""What holds of every reference and its gradient on random problems: layouts, dtypes, shapes, inputs, no warnings."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dualops import reference
from dualops.spec import OPERATORS, Spec
from tests.checks import check, gradient_inputs
from tests.problems import layouts_of, random_problems, values

DIRECTIONS = [(spec, backward) for spec in OPERATORS.values() for backward in (False, True)[: 1 + bool(spec.gradients)]]


def writing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reference with an argument for its results, which have the dtype and shape that it gives them."""

    def run(*arrays: Any, out: Any, **options: Any) -> None:
        results = function(*arrays, **options)
        outs, results = ((x if isinstance(x, tuple) else (x,)) for x in (out, results))
        for given, result in zip(outs, results, strict=True):
            assert (given.shape, given.dtype) == (result.shape, result.dtype)
            assert not any(np.shares_memory(result, x) for x in arrays if isinstance(x, np.ndarray))
            given[...] = result

    return run


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("spec", "backward"), DIRECTIONS, ids=lambda value: getattr(value, "name", str(value)))
def test_random_problems_in_any_layout(spec: Spec, backward: bool) -> None:
    """Results are those of the spec, by the rule of accuracy, and nothing else is written. Every other problem has NaN,
    infinities and large numbers.
    """
    function = writing(getattr(reference, f"{spec.name}_backward" if backward else spec.name))
    for number, case in enumerate(random_problems(spec.name, 7, 40, max_elements=1500)):
        arrays = gradient_inputs(spec, case) if backward else values(spec, case)
        inputs = spec.gradient_inputs if backward else spec.inputs
        shapes = {name: array.shape for name, array in arrays.items()}
        layouts = layouts_of(inputs, shapes, np.random.default_rng([case.seed, 1]))
        check(spec, case, function, backward=backward, layouts=layouts, special=bool(number % 2), ways=("given",))
