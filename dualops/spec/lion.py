"""The spec of lion(params, grads, momenta, lr). Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms".

For each element, in float32 (float64 for float64 params), every operation rounded by itself and in this order:

    c = beta1 * m + (1 - beta1) * g
    p = p * (1 - lr * weight_decay) - lr * sign(c)         sign(0) = 0, sign(NaN) = NaN
    m = beta2 * m + (1 - beta2) * g

lr, weight_decay, the betas and their differences from 1 are first rounded from float64 to float32, once each. The
product lr * weight_decay and 1 minus it are float32 operations like the others, since lr may be on the device. So the
result is defined bit for bit, and kernels give the reference's bits.

The spec describes one tensor; the public functions take lists of them, which `bind_list` binds. In a call with
`master`, float32 copies of the params, p is read from master and written to it, and params get it rounded to their
dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .base import Case, Cost, Input, Output, Param, Problem, Role, Spec, Tag, standard_normal
from .domains import finite
from .draws import Drawn, random_size
from .meta import FLOATS, HUGE, ArrayMeta, compute_dtype

LISTS = ("params", "grads", "momenta", "master")  # a public function takes one array or a list for each


def measure(op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Count the elements N, in any shape."""
    shape = arrays["params"].shape
    for name in LISTS[1:]:
        if name in arrays and arrays[name].shape != shape:
            raise ValueError(
                f"{op}: {name} has shape {arrays[name].shape}, params has shape {shape}, expected the same"
            )
    return {"N": arrays["params"].size}


def betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError("expected two numbers")
    first, second = map(finite, value)
    if not (0 <= first <= 1 and 0 <= second <= 1):
        raise ValueError("expected two numbers from 0 to 1")
    return first, second


def decay(value: Any) -> float:
    if (number := finite(value)) < 0:
        raise ValueError("expected 0 or more")
    return number


# --- lists of tensors ----------------------------------------------------------------------------


def check_lengths(op: str, lists: Mapping[str, Sequence[Any]]) -> None:
    """Raise ValueError for lists of different lengths."""
    (first, expected), *others = ((name, len(each)) for name, each in lists.items())
    for name, count in others:
        if count != expected:
            raise ValueError(f"{op}: {name} has {count} tensors, {first} has {expected}, expected the same")


def bind_list(
    op: str, lists: Mapping[str, Sequence[ArrayMeta]], lr: ArrayMeta, params: Mapping[str, Any]
) -> list[Problem]:
    """Validate each tensor and return its problem; errors have the tensor's number: `lion: grads[3] has shape ...`."""
    problems = []
    for i in range(len(lists["params"])):
        try:
            problems.append(SPEC.bind({name: each[i] for name, each in lists.items()} | {"lr": lr}, params))
        except (TypeError, ValueError, NotImplementedError) as error:
            raise numbered(error, op, i) from None
        device, expected = lists["params"][i].device, lists["params"][0].device
        if device != expected:
            raise ValueError(f"{op}: params[{i}] is on {device}, params[0] on {expected}, expected one device")
    return problems


def numbered(error: Exception, op: str, i: int) -> Exception:
    """Add the tensor's number in its list to an error."""
    message = str(error).removeprefix(f"{op}: ").removeprefix(f"{SPEC.name}: ")
    return type(error)(f"{op}: " + re.sub(rf"\b({'|'.join(LISTS)})\b", rf"\1[{i}]", message))


def check_apart(
    op: str,
    names: Sequence[str],
    starts: Sequence[int] | np.ndarray,
    nbytes: Sequence[int] | np.ndarray,
    written: Sequence[bool] | np.ndarray,
    source: Sequence[int] | np.ndarray | None = None,
) -> None:
    """Raise ValueError if written memory overlaps other memory that is written or read.

    For each array: its name for messages, its address, its bytes, whether it is written, and a number. That is the
    array that a result may overwrite, else the array itself.
    """
    begin = np.array(starts, np.uint64)
    end = begin + np.array(nbytes, np.uint64)
    number = np.arange(len(names))
    replaced = number if source is None else np.array(source)
    end[replaced[(begin[replaced] == begin) & (replaced != number)]] = 0  # overwritten by their own results
    order = np.argsort(begin, kind="stable")
    order = order[end[order] > begin[order]]
    later, mine = order[1:], np.array(written, bool)[order]
    reach = np.maximum.accumulate(end[order])[:-1]
    written_reach = np.maximum.accumulate(np.where(mine, end[order], 0))[:-1]
    overlaps = (begin[later] < written_reach) | (mine[1:] & (begin[later] < reach))
    if overlaps.any():
        place = int(np.argmax(overlaps))
        second = int(later[place])
        first = next(int(i) for i in order[: place + 1] if end[i] > begin[second] and (written[i] or written[second]))
        one, two = sorted((first, second), key=lambda i: (not written[i], i))
        raise ValueError(f"{op}: {names[one]} overlaps {names[two]} in memory, expected memory of its own")


# --- the record ----------------------------------------------------------------------------------


def _read(problem: Problem) -> int:
    """Count the bytes read; params are not read if there is a master."""
    source = "master" if "master" in problem.arrays else "params"
    return problem.nbytes(source, "grads", "momenta")


def _result(name: str, **options: Any) -> Output:
    """Return the output that replaces an input."""
    return Output(f"new_{name}", lambda p: p.arrays[name].shape, lambda p: p.arrays[name].dtype, like=name, **options)


def _cases() -> tuple[Case, ...]:
    cases = []
    half = ("bfloat16",)

    def add(
        name: str,
        shape: tuple[int, ...],
        dtypes: tuple[str, ...],
        tags: set[Tag],
        *,
        wide: str = "",
        master: bool = False,
        **params: Any,
    ) -> None:
        """wide: which of grads and momenta have the compute dtype; the others have the params'."""
        shapes: dict[str, tuple[int, ...]] = {**dict.fromkeys(LISTS[:3], shape), "lr": ()}
        if master:
            shapes["master"] = shape
        for dtype in dtypes:
            own = {each: compute_dtype(dtype) if each in wide else dtype for each in ("grads", "momenta")}
            cases.append(Case(name, dtype, shapes, params, frozenset(tags), backward=False, dtypes=own))

    decayed: dict[str, Any] = {"weight_decay": 0.1}
    # common problems: 10 bytes a parameter, 20, and 22 with master weights
    add("params268m", (2**28,), half, {Tag.BENCH}, **decayed)
    add("params67m", (2**26,), ("float32",), {Tag.BENCH}, **decayed)
    add("master67m", (2**26,), half, {Tag.BENCH}, wide="momenta", master=True, **decayed)
    add("params4096x4096", (4096, 4096), ("float32", "bfloat16"), {Tag.DEMO}, **decayed)
    add("master4096x4096", (4096, 4096), half, {Tag.DEMO}, wide="momenta", master=True, **decayed)
    # sizes around a vector, around a block's share, and several blocks
    for size in (1, 7, 9, 4099, 100_003):
        add(f"size{size}", (size,), FLOATS, {Tag.TEST, Tag.EDGE}, **decayed)
    add("size70000", (70_000,), FLOATS, {Tag.TEST}, wide="momenta", master=True, betas=(0.95, 0.98), weight_decay=1.0)
    add("size8195", (8195,), FLOATS, {Tag.TEST, Tag.EDGE}, wide="grads momenta", betas=(0.0, 1.0))
    add("size8195_master", (8195,), FLOATS, {Tag.TEST, Tag.EDGE}, wide="grads", master=True)
    add("no_axes", (), FLOATS, {Tag.TEST, Tag.EDGE}, **decayed)
    add("axes3", (5, 33, 70), FLOATS, {Tag.TEST, Tag.EDGE}, wide="momenta", **decayed)
    add("no_elements", (3, 0, 5), FLOATS, {Tag.TEST, Tag.EDGE, Tag.SIM}, **decayed)
    # small enough for a simulator
    add("sim_tail", (37,), FLOATS, {Tag.SIM}, **decayed)
    add("sim_blocks", (600,), FLOATS, {Tag.SIM}, betas=(0.8, 0.95))
    add("sim_master", (9, 7), FLOATS, {Tag.SIM}, wide="momenta", master=True, **decayed)
    add("sim_wide", (5, 13), ("float16", "bfloat16"), {Tag.SIM}, wide="grads momenta", master=True)
    # one of each kernel variant, for the offline compiler
    add("narrow", (1 << 20,), FLOATS, {Tag.COMPILE})
    add("momenta", (1 << 20,), half, {Tag.COMPILE}, wide="momenta")
    add("master", (1 << 20,), ("float16", "bfloat16"), {Tag.COMPILE}, wide="momenta", master=True)
    add("wide", (1 << 20,), half, {Tag.COMPILE}, wide="grads momenta", master=True)
    return tuple(cases)


def generate(spec: Spec, case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Normal values, a twentieth of the elements without gradient and momentum; lr between 1e-5 and 1e-2."""
    shapes = {name: shape for name, shape in case.shapes.items() if name != "lr"}
    arrays = standard_normal(spec, Case(case.name, case.dtype, shapes, dtypes=case.dtypes), rng)
    idle = rng.random(shapes["params"], np.float32) < 0.05
    for name in ("grads", "momenta"):
        arrays[name][idle] = 0
    return arrays | {"lr": np.array(10.0 ** rng.uniform(-5, -2), np.float32)}


def draw(rng: np.random.Generator, max_elements: int) -> Drawn:
    """Draw any shape, with a master in a third of the draws."""
    shape, left = [], max_elements
    for _ in range(int(rng.integers(1, 5))):
        shape.append(random_size(rng, left))
        left = max(left // max(shape[-1], 1), 1)
    shape = [shape[axis] for axis in rng.permutation(len(shape))]
    names = LISTS if rng.random() < 1 / 3 else LISTS[:3]
    params: dict[str, Any] = {}
    if rng.random() < 0.7:
        params["weight_decay"] = float(rng.choice([0.0, 0.01, 0.1, 1.0]))
    if rng.random() < 0.5:
        params["betas"] = tuple(float(beta) for beta in rng.choice([0.0, 0.5, 0.9, 0.95, 0.999, 1.0], 2))
    return {**dict.fromkeys(names, tuple(shape)), "lr": ()}, params


def special(name: str, case: Case, backward: bool) -> tuple[float, bool] | None:
    """Special values: a master is no larger than its params can be; lr is an ordinary number."""
    return None if name == "lr" else (HUGE[case.dtype], True)


SPEC = Spec(
    name="lion",
    formula=(
        "c = beta1 * m + (1 - beta1) * g;  p = p * (1 - lr * weight_decay) - lr * sign(c);  "
        "m = beta2 * m + (1 - beta2) * g"
    ),
    paper="Chen et al. 2023, arXiv:2302.06675, Algorithm 2",
    inputs=(
        Input("params", None),
        Input("grads", None, role=Role.WEIGHT),
        Input("momenta", None, role=Role.STATE),
        Input("lr", (), ("float32", "float64"), role=Role.OTHER, host=True),
        Input("master", None, role=Role.STATISTIC, optional=True),
    ),
    params=(
        Param("betas", (0.9, 0.99), betas, "weights of the momentum in the step, and in the next momentum"),
        Param("weight_decay", 0.0, decay, "times lr, the share of itself that a parameter loses in a step"),
    ),
    outputs=(_result("params"), _result("momenta"), _result("master", when=lambda p: "master" in p.arrays)),
    gradient_inputs=(),
    gradients=(),
    saved=(),
    measure=measure,
    forward_cost=Cost(
        flops=lambda p: 10 * p.N,
        bytes_read=_read,
        bytes_written=lambda p: p.nbytes("new_params", "new_momenta", "new_master"),
    ),
    backward_cost=None,
    rounding="each operation in float32 (float64 for float64); p and m then to their storage dtypes",
    floor=1.0,
    rungs=("naive", "simt", "table"),
    cases=_cases(),
    generate=generate,
    updates={"new_params": "params", "new_momenta": "momenta", "new_master": "master"},
    exact=True,
    draw=draw,
    special=special,
)
