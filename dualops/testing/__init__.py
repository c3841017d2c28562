"""The oracle: anybody's operators, in any library's arrays, held against the float64 reference.

    def test_my_softmax():
        for problem in testing.cases("softmax", "sim", dtype="float32"):
            arrays = problem.arrays()
            testing.check("softmax", my_softmax(**arrays, **problem.params), arrays, problem.params)

check         one call: truth, baseline, tolerance and NaNs by the operator's name
cases         problems that are ready to be tried, ragged and empty ones among them
random_cases  as many more, of random sizes, with random options
Wrong         what `check` raises for a wrong result, an AssertionError
Vacuous       what `check` raises where any result would pass, a ValueError

Needs numpy and ml_dtypes alone; the package of an array's library is there already.
"""

from .arrays import to_numpy
from .oracle import Vacuous, Wrong, check
from .ready import Ready, cases, random_cases

__all__ = ["Ready", "Vacuous", "Wrong", "cases", "check", "random_cases", "to_numpy"]
