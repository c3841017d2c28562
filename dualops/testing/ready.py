"""Problems that are ready to be tried: the cases of the specs, with their arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..spec import OPERATORS, Case, Spec, Tag
from .truth import bind, named, reference_of


@dataclass(frozen=True)
class Ready:
    """A problem of an operator, or of its gradient. `str(problem)` names it, for pytest's `ids=str`."""

    spec: Spec
    case: Case
    backward: bool

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the call that are not as by default, by name."""
        return dict(self.case.params)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the call by name, made anew and the same each time; bfloat16 is ml_dtypes'."""
        arrays = generated(self.spec, self.case)
        return gradient_arrays(self.spec, self.case, arrays) if self.backward else arrays

    def __str__(self) -> str:
        return self.case.id


def cases(
    operator: str,
    tags: Tag | str | Iterable[Tag | str] = Tag.TEST,
    *,
    backward: bool = False,
    dtype: str | None = None,
) -> list[Ready]:
    """The operator's problems that have one of the tags, in the order of its spec; of its gradient with `backward`.

    operator: a name of `dualops.spec.OPERATORS`
    tags: "test" (all that kernels are compared on), "edge" (ragged, empty, extreme), "sim" (small), "bench" (as people
        run them), or others of `dualops.spec.Tag`
    dtype: of that one alone, "float64", "float32", "float16" or "bfloat16"

    Raises ValueError for an operator, a tag or a dtype of which there is none, and for a gradient where there is none.
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


def spec_of(operator: str, backward: bool) -> Spec:
    """The spec of that name. Raises ValueError if there is none, or no gradient where one is wanted."""
    if operator not in OPERATORS:
        raise ValueError(f"operator is {operator!r}, expected one of {', '.join(OPERATORS)}")
    spec = OPERATORS[operator]
    if backward and not spec.gradients:
        raise ValueError(f"{operator}: backward is True, but it has no gradient")
    return spec


def generated(spec: Spec, case: Case) -> dict[str, np.ndarray]:
    """The case's arrays in the order of the spec's inputs, from the case's seed."""
    made = spec.generate(spec, case, np.random.default_rng(case.seed))
    return {entry.name: made[entry.name] for entry in spec.inputs if entry.name in made}


def gradient_arrays(
    spec: Spec, case: Case, arrays: Mapping[str, np.ndarray], special: Sequence[float] = ()
) -> dict[str, np.ndarray]:
    """What backward takes: inputs and results that forward saved, the results from the reference, and gradients.

    arrays: what forward takes. Results that forward returns on request alone are saved whether the case asks for them
    or not; it has a gradient of those that it asks for. Where a result is -inf, and no change of an input would move
    it, its gradient is 0. special: numbers of which some gradients have one.
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
