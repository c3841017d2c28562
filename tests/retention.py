"""Arrays and calls of retention that several of its tests have."""

from dataclasses import replace
from typing import Any

import numpy as np

from dualops.spec import Case


def with_steps(case: Case) -> Case:
    """The same with log_decay in place of gamma; as it is where it can't have that."""
    q, k = case.shapes["q"], case.shapes["k"]
    if "mask" in case.shapes or q[-2] != k[-2]:
        return case
    shapes = {name: shape for name, shape in case.shapes.items() if name != "gamma"}
    return replace(case, name=f"{case.name}_steps", shapes=shapes | {"log_decay": q[:-1]})


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def qkv(B=2, H=3, S=70, D=5, Dv=4) -> dict[str, Any]:
    return {"q": normal(B, H, S, D, seed=1), "k": normal(B, H, S, D, seed=2), "v": normal(B, H, S, Dv, seed=3)}
