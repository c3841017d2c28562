"""Many problems for few kernels: other sizes, values and layouts for a trial whose kernels take seconds to build.

A batch of an operator that has few kernels is just the next of its trials.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from math import prod

import numpy as np

from dualops.cuda.launch.device import Device
from dualops.spec import Case, retention_draws as retention
from dualops.spec.attention import draws as attention
from dualops.spec.attention.cases import AXES, lists_shape
from dualops.spec.draws import Drawn, Shapes, random_size
from dualops.spec.matmul import shapes_of as matmul_shapes
from dualops.spec.rope_cases import shapes_of as rope_shapes
from tests.cuda.calls import call_of, kernels_of, steps_of
from tests.cuda.fuzz import Trial, consistent, trials
from tests.cuda.operators import Direction, shapes_of, without_broadcast
from tests.problems import layouts_of, random_layout

BATCH = 20
SEED, MAX_ELEMENTS = 30, 1 << 15
ATTEMPTS = 50
CANDIDATES = 4  # trials that a kind is looked for among: some are empty, some their rung refuses

Resized = Drawn  # shapes, and the parameters that follow from them


def batch(direction: Direction, number: int, device: Device, *, same: bool = True) -> Iterator[tuple[Trial, bool]]:
    """Batch `number` of a direction's random problems, always the same, and of each whether a kernel serves it.

    They are BATCH, or a few more. Where kernels are dear, all but CANDIDATES of them need the same ones; without
    `same` one of those stands for all.
    """
    dear = direction.spec.name in RESIZED
    each = CANDIDATES if dear else BATCH
    drawn = islice(trials(direction, SEED, (number + 1) * each, MAX_ELEMENTS), number * each, None)
    for trial in drawn:
        steps = steps_of(call_of(trial), device)
        if dear and steps and not is_empty(trial.case):
            yield from ((other, True) for other in (others(trial, BATCH, device) if same else (trial,)))
            return
        yield trial, steps is not None


def is_empty(case: Case) -> bool:
    """Whether there is nothing to compute, for which a call may need fewer kernels."""
    longest = (value for name, value in case.params.items() if name.startswith("max_seqlen"))
    return 0 in map(prod, case.shapes.values()) or 0 in longest


def others(trial: Trial, count: int, device: Device) -> Iterator[Trial]:
    """`count` trials that the same kernels do, the first of them the trial; fewer where they are hard to find."""
    yield trial
    rng = np.random.default_rng([trial.case.seed, 5])
    wanted = kernels_of([call_of(trial)], device)
    made = 1
    for _ in range(ATTEMPTS * count):
        if made == count:
            return
        shapes, params = RESIZED[trial.direction.spec.name](trial.case, rng)
        shapes = {name: shapes[name] for name in trial.case.shapes}
        params, seed = {**trial.case.params, **params}, int(rng.integers(2**31))
        case = replace(trial.case, name=f"{trial.case.name}_again", shapes=shapes, params=params, seed=seed)
        other = _redrawn(trial, case, rng)
        if kernels_of([call_of(other)], device) == wanted:
            made += 1
            yield other


def _redrawn(trial: Trial, case: Case, rng: np.random.Generator) -> Trial:
    """The trial on another case, with the layouts that it had in half of the draws, where these fit."""
    direction = trial.direction
    shapes, first = shapes_of(direction, case), direction.inputs[0]
    special = bool(rng.random() < 0.3)
    ranks = {name: len(layout.order) for name, layout in trial.layouts.items()}
    if rng.random() < 0.5 and ranks == {name: len(shape) for name, shape in shapes.items() if name in ranks}:
        return replace(trial, case=case, special=special)
    layouts = consistent(direction, layouts_of(direction.inputs, shapes, rng))
    if trial.way == "in place":
        layouts |= {output.like: without_broadcast(layouts[output.like]) for output in direction.outputs}
    out_layout = None
    if trial.way == "given":
        out_layout = random_layout(shapes[first.name], rng, contiguous_last=first.contiguous_last, broadcast=False)
    return replace(trial, case=case, layouts=layouts, out_layout=out_layout, special=special)


# --- other sizes ---------------------------------------------------------------------------------
# Options, dtypes and widths stay, which kernels are built for; batches, heads, rows and tokens change.


def _attention(case: Case, rng: np.random.Generator) -> Resized:
    D, Dv = case.shapes["q"][-1], case.shapes["v"][-1]
    B, Hkv, group = (int(rng.integers(1, 4)) for _ in range(3))
    H = Hkv * group
    Sq, Sk = (max(random_size(rng, attention.LONGEST), 1) for _ in range(2))
    sizes = {"B": B, "H": H, "Sk": Sk}
    new: Shapes = {name: tuple(sizes[axis] for axis in axes) for name, axes in AXES.items()}
    new |= {"cu_seqlens_q": (B + 1,), "cu_seqlens_k": (B + 1,), "k_starts": (B,), "k_lengths": (B,)}
    if "cu_seqlens_q" in case.shapes:
        new |= {"q": (Sq, H, D), "k": (Sk, Hkv, D), "v": (Sk, Hkv, Dv)}
        return new, {"max_seqlen_q": Sq, "max_seqlen_k": Sk}
    new |= {"q": (B, H, Sq, D), "k": (B, Hkv, Sk, D), "v": (B, Hkv, Sk, Dv)}
    if "bias" in case.shapes:
        own = case.shapes["bias"]
        full = (B, H, Sq, Sk)[4 - len(own) :]
        new["bias"] = tuple(1 if old == 1 else size for old, size in zip(own, full, strict=True))
    if "block_mask" in case.shapes:
        own_B, own_H = (1 if old == 1 else size for old, size in zip(case.shapes["block_mask"], (B, H)))
        new["block_mask"] = lists_shape(own_B, own_H, Sq, Sk)
    return new, {}


def _retention(case: Case, rng: np.random.Generator) -> Resized:
    D, Dv = case.shapes["q"][-1], case.shapes["v"][-1]
    B, H = (int(rng.integers(1, 4)) for _ in range(2))
    Sq, Sk = (max(random_size(rng, retention.LONGEST), 1) for _ in range(2))
    new: Shapes = {"gamma": (H,), "cu_seqlens": (B + 1,), "initial_state": (B, H, D, Dv), "initial_norm": (B, H, D)}
    if "cu_seqlens" in case.shapes:
        return new | {"q": (Sq, H, D), "k": (Sq, H, D), "v": (Sq, H, Dv), "log_decay": (Sq, H)}, {"max_seqlen": Sq}
    if case.shapes["q"][2] == case.shapes["k"][2]:
        Sk = Sq
    new |= {"q": (B, H, Sq, D), "k": (B, H, Sk, D), "v": (B, H, Sk, Dv)}
    return new | {"mask": (H, Sq, Sk), "log_decay": (B, H, Sk)}, {}


def _matmul(case: Case, rng: np.random.Generator) -> Resized:
    M, N, K = (max(random_size(rng, 150), 1) for _ in range(3))
    layout = "".join("t" if case.params.get(f"transpose_{name}") else "n" for name in "ab")
    batches = [tuple(1 if size == 1 else 3 for size in case.shapes[name][:-2]) for name in "ab"]
    return matmul_shapes(M, N, K, layout=layout, a=batches[0], b=batches[1], bias=True)[0], {}


def _rows(case: Case, rng: np.random.Generator) -> Resized:
    """The kernels of norms are built for the length of a row."""
    N = case.shapes["x"][-1]
    rows = max((1 << 15) // max(N, 1), 1)
    shape = tuple(random_size(rng, max(int(rows**0.5), 1)) for _ in case.shapes["x"][:-1])
    return {"x": (*shape, N), "residual": (*shape, N), "w": (N,), "b": (N,)}, {}


def _rope(case: Case, rng: np.random.Generator) -> Resized:
    D, table = case.shapes["q"][-1], case.shapes["cos"]
    B, H, Hkv = (int(rng.integers(1, 6)) for _ in range(3))
    S = max(random_size(rng, 200), 1)
    positions, options = len(case.shapes.get("positions", ())), {}
    if len(table) == 3:
        options = {"batches": 1 if table[0] == 1 else B}
    elif "positions" in case.shapes:
        options = {"rows": int(rng.integers(1, 300)), "positions": positions}
    return rope_shapes((B, H, S, D), Hkv, table[-1], **options), {}


# the operators whose random problems need nearly as many kernels as they are
RESIZED: dict[str, Callable[[Case, np.random.Generator], Resized]] = {
    "flash_attention": _attention,
    "flash_attention_varlen": _attention,
    "matmul": _matmul,
    "retention": _retention,
    "retention_varlen": _retention,
    "rms_norm": _rows,
    "layer_norm": _rows,
    "rope": _rope,
}
