"""Lion in NumPy: one step of the optimizer of Chen et al. 2023 (arXiv:2302.06675), Algorithm 2.

Every operation is one of `number`, float32 or float64, and rounded by itself: kernels give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..spec import lion as SPEC
from ..spec.lion import LISTS, check_lengths, numbered
from ._rounding import arithmetic, bound

Arrays = np.ndarray | Sequence[np.ndarray]


def lion(
    params: Arrays,
    grads: Arrays,
    momenta: Arrays,
    lr: Any,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    master: Arrays | None = None,
) -> tuple[Any, ...]:
    """One step: return the new params and momenta, and the new master if there is one. Nothing is overwritten.

    params: an array of float64, float32, float16 or bfloat16 (ml_dtypes), or a list of arrays; then grads, momenta and
    master are lists of the same length. grads: in the params' dtype or in float32; momenta: in any of the three
    narrower dtypes; master: the params in float32. With float64 params all are float64.
    lr: a number, or a float array without axes. betas: two numbers from 0 to 1; weight_decay: 0 or more.

    Returns (params, momenta) or (params, momenta, master), as arrays or lists like the arguments, in their dtypes.
    Raises ValueError for different shapes or lengths and values out of range, TypeError for other dtypes.

    >>> p, m = lion(np.ones(3), np.array([5.0, -1.0, 0.0]), np.zeros(3), lr=0.5)
    >>> p.tolist()
    [0.5, 1.5, 1.0]
    """
    options = {"betas": betas, "weight_decay": weight_decay}
    if not isinstance(params, (list, tuple)):
        return _lion(params, grads, momenta, lr, master, **options)
    given = dict(zip(LISTS, (params, grads, momenta, master)))
    lists: dict[str, Any] = {name: each for name, each in given.items() if each is not None}
    for name, each in lists.items():
        if not isinstance(each, (list, tuple)):
            raise TypeError(f"lion: {name} is a {type(each).__name__}, params is a list, expected a list")
    check_lengths(SPEC.name, lists)
    results: tuple[list[np.ndarray], ...] = tuple([] for _ in range(3 if master is not None else 2))
    for i in range(len(params)):
        one = {name: each[i] for name, each in lists.items()}
        try:
            found = _lion(one["params"], one["grads"], one["momenta"], lr, one.get("master"), **options)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise numbered(error, SPEC.name, i) from None
        for each, result in zip(results, found, strict=True):
            each.append(result)
    return results


def _lion(params: Any, grads: Any, momenta: Any, lr: Any, master: Any, **options: Any) -> tuple[np.ndarray, ...]:
    """Compute the step of one array."""
    given = {"params": params, "grads": grads, "momenta": momenta, "lr": lr, "master": master, **options}
    problem, _ = bound(SPEC, given)
    g, m = arithmetic(grads), arithmetic(momenta)
    p = arithmetic(params if master is None else master)
    number = p.dtype.type
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        lr, weight_decay, one = number(lr), number(problem.weight_decay), number(1)
        (beta1, rest1), (beta2, rest2) = ((number(beta), number(1 - beta)) for beta in problem.betas)
        c = beta1 * m + rest1 * g
        p = p * (one - lr * weight_decay) - lr * np.sign(c)
        m = beta2 * m + rest2 * g
        results = (p.astype(params.dtype), m.astype(momenta.dtype), p)
    return tuple(map(np.asarray, results[: 2 if master is None else 3]))
