"""The oracle: compares anybody's operators, with arrays of any library, with the float64 reference.

    def test_my_softmax():
        for problem in testing.cases("softmax", "sim", dtype="float32"):
            arrays = problem.arrays()
            testing.check("softmax", my_softmax(**arrays, **problem.params), arrays, problem.params)

check         checks one call: truth, baseline, tolerance and NaNs follow from the operator's name
cases         problems with arrays, including ragged and empty ones
random_cases  problems of random sizes, with random options
Wrong         what `check` raises for a wrong result, an AssertionError
Vacuous       what `check` raises if any result would pass, a ValueError

Needs only numpy and ml_dtypes, apart from the library of the arrays.
"""

from .arrays import to_numpy
from .oracle import Vacuous, Wrong, check
from .ready import Ready, cases, random_cases

__all__ = ["Ready", "Vacuous", "Wrong", "cases", "check", "random_cases", "to_numpy"]
