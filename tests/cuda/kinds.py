"""Many problems for few kernels: other sizes, values and layouts for a trial of attention, which is slow to build."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dualops.cuda import device as devices
from dualops.cuda.launch import OPERATIONS
from dualops.cuda.offline import absent_problem
from dualops.spec import Case
from tests.attention import LONGEST
from tests.cuda.fuzz import Trial, consistent
from tests.cuda.operators import Direction, shapes_of, without_broadcast
from tests.problems import layouts_of, random_layout
from tests.sizes import random_size

ATTEMPTS = 50


def others(trial: Trial, count: int) -> Iterator[Trial]:
    """`count` trials that the same kernels do, the first of them the trial itself."""
    yield trial
    rng = np.random.default_rng([trial.case.seed, 5])
    wanted = _choice(trial.direction, trial.case, trial.rung)
    made = 1
    for _ in range(ATTEMPTS * count):
        if made == count:
            return
        case = _resized(trial.case, rng)
        if _choice(trial.direction, case, trial.rung) != wanted:
            continue
        made += 1
        yield _redrawn(trial, case, rng)


def _choice(direction: Direction, case: Case, rung: str | None) -> str:
    """Which kernels do a case."""
    problem = absent_problem(direction.spec, case, direction.backward)
    operation = OPERATIONS[direction.spec.name][direction.backward]
    choices = operation.choices(problem, problem.outputs(direction.outputs), devices.current())
    found = next(choice for choice in choices if rung in (None, choice.rung))
    return f"{found.rung} {found.config} {[step.kernel.identity for step in found.steps()]}"


def _resized(case: Case, rng: np.random.Generator) -> Case:
    """The same options, dtype and widths, with other batches, heads and tokens."""
    D, varlen = case.shapes["q"][-1], "cu_seqlens_q" in case.shapes
    B, Hkv, group = (int(rng.integers(1, 4)) for _ in range(3))
    H = Hkv * group
    Sq, Sk = (max(random_size(rng, LONGEST), 1) for _ in range(2))
    new: dict[str, tuple[int, ...]] = {"alibi_slopes": (H,), "sinks": (H,), "seed": (), "key_padding_mask": (B, Sk)}
    new |= {"cu_seqlens_q": (B + 1,), "cu_seqlens_k": (B + 1,)}
    Dv, params = case.shapes["v"][-1], dict(case.params)
    if varlen:
        new |= {"q": (Sq, H, D), "k": (Sk, Hkv, D), "v": (Sk, Hkv, Dv)}
        params |= {"max_seqlen_q": Sq, "max_seqlen_k": Sk}
    else:
        new |= {"q": (B, H, Sq, D), "k": (B, Hkv, Sk, D), "v": (B, Hkv, Sk, Dv)}
    if "bias" in case.shapes:
        own = case.shapes["bias"]
        full = (B, H, Sq, Sk)[4 - len(own) :]
        new["bias"] = tuple(1 if old == 1 else size for old, size in zip(own, full, strict=True))
    shapes = {name: new[name] for name in case.shapes}
    return replace(case, name=f"{case.name}_again", shapes=shapes, params=params, seed=int(rng.integers(2**31)))


def _redrawn(trial: Trial, case: Case, rng: np.random.Generator) -> Trial:
    """The trial on another case, with layouts for its shapes."""
    direction = trial.direction
    shapes, first = shapes_of(direction, case), direction.inputs[0]
    layouts = consistent(direction, layouts_of(direction.inputs, shapes, rng))
    if trial.way == "in place":
        layouts[first.name] = without_broadcast(layouts[first.name])
    out_layout = None
    if trial.way == "given":
        out_layout = random_layout(shapes[first.name], rng, contiguous_last=first.contiguous_last, broadcast=False)
    special = bool(rng.random() < 0.3)
    return replace(trial, case=case, layouts=layouts, out_layout=out_layout, special=special)
