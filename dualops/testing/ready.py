"""Problems with arrays: the cases of the specs, and random ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..spec import OPERATORS, Case, Spec, Tag
from ..spec.meta import FLOATS
from .truth import bind, named, reference_of


@dataclass(frozen=True)
class Ready:
    """A problem of an operator, or of its gradient. `str(problem)` names it, for pytest's `ids=str`."""

    spec: Spec
    case: Case
    backward: bool

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of the call that differ from their defaults, by name."""
        return dict(self.case.params)

    def arrays(self) -> dict[str, np.ndarray]:
        """Make the arrays of the call by name, the same each time; bfloat16 is ml_dtypes'."""
        arrays = generated(self.spec, self.case)
        return gradient_arrays(self.spec, self.case, arrays) if self.backward else arrays

    def __str__(self) -> str:
        return self.case.id


def cases(
    operator: str, tags: Tag | str | Iterable[Tag | str] = Tag.TEST, *, backward: bool = False, dtype: str | None = None
) -> list[Ready]:
    """Return the operator's problems with one of the tags, in the order of its spec; with `backward`, of its gradient.

    operator: a name of `dualops.spec.OPERATORS`
    tags: "test" (all that kernels are compared on), "edge" (ragged, empty, extreme), "sim" (small), "bench" (common
        sizes), or others of `dualops.spec.Tag`
    dtype: only this one, "float64", "float32", "float16" or "bfloat16"

    Raises ValueError for an unknown operator, tag or dtype, and for a gradient that does not exist.
    """
    spec = spec_of(operator, backward)
    wanted = frozenset(Tag(tag) for tag in ([tags] if isinstance(tags, str) else tags))
    found = [case for case in spec.cases if case.tags & wanted and (case.backward or not backward)]
    if dtype is not None:
        there = list(dict.fromkeys(case.dtype for case in found))
        found = [case for case in found if case.dtype == dtype]
        if not found:
            raise ValueError(f"{operator}: no case of dtype {dtype}, expected one of {', '.join(there) or 'none'}")
    return [Ready(spec, case, backward) for case in found]


def random_cases(
    operator: str,
    count: int,
    *,
    seed: int = 0,
    max_elements: int = 1 << 14,
    dtypes: str | Iterable[str] = FLOATS,
    backward: bool = False,
) -> list[Ready]:
    """Return `count` random valid problems of the operator, or with `backward` of its gradient, as its spec draws them.

        for problem in testing.random_cases("softmax", 100, dtypes="float32"):
            arrays = problem.arrays()
            testing.check("softmax", my_softmax(**arrays, **problem.params), arrays, problem.params)

    operator: a name of `dualops.spec.OPERATORS`
    count: how many; a longer list begins with a shorter one's problems
    seed: 0 or more; the same arguments give the same problems, another seed others
    max_elements: of the largest array of a problem (rope's tables may have four rows more), and of the scores
        of attention and of a parallel retention; at least 64
    dtypes: one or several to draw from, of "float64", "float32", "float16" and "bfloat16"

    Sizes are 0, 1, primes, powers of two and their neighbours, and all others. Options appear together, alone or not at
    all, whether a kernel supports them or not: see `problem.params` and the names of `problem.arrays()`.

    Raises ValueError for an unknown operator or dtype, a gradient that does not exist, and a number that is too small.
    Also raises it if the operator's spec draws no problems.
    """
    spec = spec_of(operator, backward)
    if spec.draw is None:
        raise ValueError(f"{operator}: its Spec has no draw, expected a function that makes a random problem")
    for name, number, least in (("count", count, 0), ("seed", seed, 0), ("max_elements", max_elements, 64)):
        if number < least:
            raise ValueError(f"{operator}: {name} is {number}, expected {least} or more")
    wanted = [dtypes] if isinstance(dtypes, str) else list(dtypes)
    if not wanted or not {*wanted} <= {*FLOATS}:
        raise ValueError(f"{operator}: dtypes are {', '.join(wanted) or 'none'}, expected some of {', '.join(FLOATS)}")
    return [Ready(spec, case, backward) for case in drawn(spec, count, seed, max_elements, wanted)]


def drawn(spec: Spec, count: int, seed: int, max_elements: int, dtypes: Sequence[str]) -> Iterator[Case]:
    """Yield random cases of an operator. Case i depends only on seed, max_elements and dtypes."""
    assert spec.draw is not None
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        dtype = str(rng.choice(list(dtypes)))
        shapes, params = spec.draw(rng, max_elements)
        if dtype != "float32":
            params.pop("precision", None)  # only float32 has it
        if any(param.name == "dtype" for param in spec.params):  # the results' dtype, if no input has it
            params["dtype"] = dtype
        backward = bool(spec.gradients)
        tags = frozenset({Tag.TEST})
        yield Case(f"fuzz{seed}_{i}", dtype, shapes, params, tags, backward, seed=int(rng.integers(1 << 31)))


def spec_of(operator: str, backward: bool) -> Spec:
    """Return the spec of that name. Raises ValueError for an unknown one, or a gradient that does not exist."""
    if operator not in OPERATORS:
        raise ValueError(f"operator is {operator!r}, expected one of {', '.join(OPERATORS)}")
    spec = OPERATORS[operator]
    if backward and not spec.gradients:
        raise ValueError(f"{operator}: backward is True, but it has no gradient")
    return spec


def generated(spec: Spec, case: Case) -> dict[str, np.ndarray]:
    """Generate the case's arrays in the order of the spec's inputs, from the case's seed."""
    made = spec.generate(spec, case, np.random.default_rng(case.seed))
    return {entry.name: made[entry.name] for entry in spec.inputs if entry.name in made}


def gradient_arrays(
    spec: Spec, case: Case, arrays: Mapping[str, np.ndarray], special: Sequence[float] = ()
) -> dict[str, np.ndarray]:
    """Return backward's arrays: inputs and results that forward saves (computed by the reference), and incoming
    gradients.

    arrays: forward's inputs. Results that backward needs are saved whether the case requests them or not; only
    requested ones have an incoming gradient. Where a result is -inf and constant in its inputs, its gradient is 0.
    special: numbers that are put into some gradients.
    """
    params = {**case.params, **spec.requests}
    names = list(bind(spec, arrays, params, False).outputs())
    results = named(reference_of(spec, False)(**arrays, **params), names)
    rng = np.random.default_rng([case.seed, 3])
    incoming = {}
    for name in bind(spec, arrays, case.params, False).outputs():
        gradient = rng.standard_normal(results[name].shape)
        if special and gradient.size and rng.random() < 0.5:
            gradient.reshape(-1)[rng.integers(gradient.size)] = rng.choice(special)
        incoming[f"d{name}"] = np.where(results[name] == -np.inf, 0, gradient).astype(results[name].dtype)
    instead = {name: results[out] for name, out in spec.saved_instead.items() if out in results}
    saved = {**arrays, **incoming, **results, **instead}
    return {wanted.name: saved[wanted.name] for wanted in spec.gradient_inputs if wanted.name in saved}
