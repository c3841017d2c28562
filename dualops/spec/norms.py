"""Shared by rms_norm and layer_norm: sizes and checks, inputs and results, cost, cases, generator, draws, terms.

Both normalise the rows of x [..., N] along the last axis, M of them. A row without elements (N = 0) has statistics of
0 / 0, NaN; sums over no rows (M = 0) are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from .base import Case, Cost, Input, Output, Param, Problem, Role, Spec, Tag, standard_normal
from .domains import boolean, non_negative
from .draws import Shapes, random_size
from .meta import FLOATS, ArrayMeta, compute_dtype, itemsize, numpy_dtype

Shape = tuple[int, ...]
Arrays = Mapping[str, np.ndarray]

SUMMED = Output(
    "summed",
    lambda p: p.arrays["x"].shape,
    lambda p: p.dtype,
    like="x",
    when=lambda p: "residual" in p.arrays,
    contiguous_last=True,
)
# most row sums that backward keeps for dw, and as many for db: four blocks on each SM of an H200
PARTIAL_ROWS = 528


def measure(op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Add M rows and N elements of a row to the sizes. Raises ValueError if shapes disagree."""
    x = arrays["x"].shape
    if not x:
        raise ValueError(f"{op}: x has no axes, expected at least one")
    N = x[-1]
    for name, meta in arrays.items():
        if name in ("w", "b"):
            if meta.shape[0] != N:
                raise ValueError(f"{op}: {name} has N={meta.shape[0]}, x has N={N}")
        elif name in ("mean", "rstd"):
            if meta.shape != x[:-1]:
                raise ValueError(f"{op}: {name} has shape {meta.shape}, expected {x[:-1]} for x of shape {x}")
        elif meta.shape != x:
            raise ValueError(f"{op}: {name} has shape {meta.shape}, x has shape {x}, expected the same")
    if params.get("offset") and "w" not in arrays:
        raise ValueError(f"{op}: offset is {params['offset']}, expected 0 without w")
    return {"M": prod(x[:-1]), "N": N}


def data(name: str, *, optional: bool = False) -> Input:
    """An input of x's shape and dtype."""
    return Input(name, None, optional=optional, contiguous_last=True)


def vector(name: str) -> Input:
    """An input with one number per column: weights or shifts."""
    return Input(name, ("N",), optional=True, contiguous_last=True, role=Role.WEIGHT)


def statistic(name: str) -> Input:
    """An input with one number per row."""
    return Input(name, None, role=Role.STATISTIC)


def statistic_result(name: str, request: str) -> Output:
    """A result with one number per row, returned if the parameter `request` is set."""
    return Output(
        name,
        lambda p: p.arrays["x"].shape[:-1],
        lambda p: compute_dtype(p.dtype),
        like="x",
        when=lambda p: p.params[request],
        asked_by=request,
    )


def result(name: str) -> Output:
    """A result of x's shape and dtype that every call has."""
    return Output(name, lambda p: p.arrays["x"].shape, lambda p: p.dtype, like="x", contiguous_last=True)


def vector_gradient(name: str) -> Output:
    """The gradient of weights or shifts, in their dtype."""
    return Output(
        f"d{name}",
        lambda p: p.arrays[name].shape,
        lambda p: p.arrays[name].dtype,
        like=name,
        when=lambda p: name in p.arrays and p.params.get(f"{name}_gradient", True),
        contiguous_last=True,
    )


def vector_gradient_param(name: str) -> Param:
    return Param(f"{name}_gradient", True, boolean, f"whether to return d{name}")


def eps_param(default: float) -> Param:
    return Param("eps", default, non_negative, "added to the mean of squares, under the root")


def request_param(name: str, what: str) -> Param:
    return Param(name, False, boolean, f"also return {what}")


def costs(forward_flops: int, backward_flops: int) -> tuple[Cost, Cost]:
    """Return the cost of both directions. The numbers are flops per element without weights and residual."""

    def elements(problem: Problem) -> int:
        return problem.M * problem.N

    def nbytes(problem: Problem, *left_out: str) -> int:
        return sum(x.size * itemsize(x.dtype) for name, x in problem.arrays.items() if name not in left_out)

    def written(problem: Problem, outputs: tuple[Output, ...]) -> int:
        return sum(x.size * itemsize(x.dtype) for x in problem.outputs(outputs).values())

    def wanted(problem: Problem) -> int:
        """Count the sums over rows."""
        return len(problem.outputs(problem.spec.gradients)) - 1

    def partial_bytes(problem: Problem) -> int:
        row = problem.N * itemsize(compute_dtype(problem.dtype))
        return wanted(problem) * min(problem.M, PARTIAL_ROWS) * row

    forward = Cost(
        flops=lambda p: elements(p) * (forward_flops + len(p.arrays) - 1),
        bytes_read=nbytes,
        bytes_written=lambda p: written(p, p.spec.outputs),
    )
    backward = Cost(
        flops=lambda p: elements(p) * (backward_flops + ("w" in p.arrays) + ("dsummed" in p.arrays) + 2 * wanted(p)),
        bytes_read=lambda p: nbytes(p, "b"),  # only the dtype of b is used
        bytes_written=lambda p: written(p, p.spec.gradients),
        extra_memory=partial_bytes,
    )
    return forward, backward


# --- cases ---------------------------------------------------------------------------------------


def case_maker(vectors: tuple[str, ...], request: str) -> Callable[..., list[Case]]:
    """Return a function (name, shape, dtypes, tags, ...) -> cases. vectors: the default ones; request: asks for
    statistics.
    """

    def make(
        name: str,
        shape: Shape,
        dtypes: tuple[str, ...],
        tags: set[Tag],
        *,
        has: tuple[str, ...] = vectors,
        residual: bool = False,
        narrow: bool = False,
        asked: bool = False,
        **params: Any,
    ) -> list[Case]:
        """narrow: weights have x's dtype. asked: return statistics."""
        shapes = {"x": shape, **dict.fromkeys(has, shape[-1:]), **({"residual": shape} if residual else {})}
        params |= {request: True} if asked else {}
        return [
            Case(name, dtype, shapes, params, frozenset(tags), dtypes=dict.fromkeys(has, dtype) if narrow else {})
            for dtype in dtypes
        ]

    return make


def common_cases(make: Callable[..., list[Case]]) -> list[Case]:
    """Return the cases of both operators to test, time, simulate and compile."""
    cases: list[Case] = []

    def add(*args: Any, **options: Any) -> None:
        cases.extend(make(*args, **options))

    bf16, single, both = ("bfloat16",), ("float32",), ("float32", "bfloat16")
    # common problems
    for columns, rows in ((1024, 32768), (4096, 32768), (16384, 32768), (65536, 8192)):
        add(f"rows{rows}x{columns}", (rows, columns), bf16, {Tag.BENCH}, narrow=True)
    for columns, rows in ((262144, 2048), (1048576, 512)):
        add(f"rows{rows}x{columns}", (rows, columns), bf16, {Tag.COMPARE}, narrow=True)
    add("rows32768x4096", (32768, 4096), single, {Tag.BENCH})
    add("residual32768x4096", (32768, 4096), bf16, {Tag.BENCH}, narrow=True, residual=True)
    add("rows8192x4096", (8192, 4096), single, {Tag.DEMO}, has=())
    add("residual8192x4096", (8192, 4096), bf16, {Tag.DEMO}, narrow=True, residual=True)
    # every range of row lengths, with each of the options
    edge = {Tag.TEST, Tag.EDGE}
    add("rows70x1", (70, 1), FLOATS, edge, asked=True)
    add("rows5x31", (5, 31), FLOATS, edge, residual=True)
    add("rows33x128", (33, 128), FLOATS, edge, narrow=True, residual=True, asked=True)
    add("rows7x1000", (7, 1000), FLOATS, edge, has=())
    add("rows6x4097", (6, 4097), FLOATS, edge, narrow=True)
    add("rows4x16384", (4, 16384), FLOATS, edge, residual=True, asked=True)
    add("rows3x50257", (3, 50257), FLOATS, edge)
    add("rows3x65536", (3, 65536), FLOATS, {Tag.TEST}, narrow=True, residual=True)
    add("rows2x150001", (2, 150001), both, {Tag.TEST}, asked=True)
    add("rows3x262144", (3, 262144), bf16, {Tag.TEST}, narrow=True)
    add("rows3x300000", (3, 300000), both, {Tag.TEST}, narrow=True)
    add("rows3x1000000", (3, 1000000), bf16, {Tag.TEST}, narrow=True)
    add("rows5000x40", (5000, 40), FLOATS, {Tag.TEST}, asked=True)
    # the gradient has a Config for each of these lengths; blocks take more rows than a ring has stages
    for columns, rows in ((256, 9000), (512, 5000), (768, 5000), (2048, 2500), (3072, 1800), (5120, 1000)):
        add(f"rows{rows}x{columns}", (rows, columns), bf16, {Tag.TEST}, narrow=True)
    add("residual4000x1024", (4000, 1024), bf16, {Tag.TEST}, narrow=True, residual=True)
    long = ((4096, 1800), (6144, 1000), (8192, 800), (10240, 500), (12288, 500), (14336, 500), (16384, 400))
    for columns, rows in (*long, (20480, 300), (24576, 250), (32768, 200), (65536, 120)):
        tags = edge if columns in (4096, 16384) else {Tag.TEST}
        add(f"rows{rows}x{columns}", (rows, columns), bf16, tags, narrow=True)
        add(f"residual{rows}x{columns}", (rows, columns), bf16, tags, narrow=True, residual=True)
    add("row", (257,), FLOATS, edge, asked=True, residual=True)
    add("batch3x5x130", (3, 5, 130), FLOATS, edge, narrow=True, residual=True, asked=True)
    add("eps", (9, 200), FLOATS, {Tag.TEST}, eps=0.5, residual=True, asked=True)
    add("no_eps", (4, 100), FLOATS, {Tag.TEST}, eps=0.0, asked=True)
    nothing = {Tag.TEST, Tag.EDGE, Tag.SIM}
    add("no_rows", (0, 64), FLOATS, nothing, residual=True, asked=True)
    add("no_columns", (6, 0), both, nothing, residual=True, asked=True)
    # small enough for a simulator
    sim = {Tag.SIM}
    add("sim_rows", (5, 67), FLOATS, sim, residual=True, asked=True)
    add("sim_aligned", (3, 512), FLOATS, sim, narrow=True, asked=True)
    add("sim_plain", (4, 40), both, sim, has=())
    add("sim_long", (2, 700), both, sim)
    add("sim_ring", (3, 1024), both, sim, residual=True)
    add("sim_batch", (2, 3, 33), bf16, sim, residual=True, asked=True)
    # one of each kernel variant, for the offline compiler
    build = {Tag.COMPILE}
    add("columns128", (1024, 128), bf16, build, narrow=True)
    add("columns1024", (1024, 1024), bf16, build, narrow=True, residual=True, asked=True)
    add("columns4096", (1024, 4096), single, build, residual=True, asked=True)
    add("columns20480", (1024, 20480), bf16, build, narrow=True)
    add("columns16384", (1024, 16384), bf16, build, narrow=True, residual=True)
    add("columns16384", (1024, 16384), ("float64",), build, has=(), asked=True)
    add("columns65536", (1024, 65536), bf16, build)
    add("columns65536narrow", (1024, 65536), bf16, build, narrow=True)
    add("columns65536residual", (1024, 65536), bf16, build, narrow=True, residual=True, asked=True)
    add("columns4097", (1024, 4097), ("float16",), build, residual=True)
    add("columns262144", (16, 262144), bf16, build, narrow=True, residual=True)
    add("columns524288", (1, 524288), bf16, build, narrow=True, asked=True)
    add("columns1048576", (1, 1048576), bf16, build)
    return cases


def generate(spec: Spec, case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Normal values; x around 1, so that a row's mean is not small compared with its deviation; weights around 1."""
    arrays = standard_normal(spec, case, rng)
    dtypes = {wanted.name: numpy_dtype(case.dtype_of(wanted)) for wanted in spec.inputs}
    for name in arrays.keys() & {"x", "w"}:
        arrays[name] = (arrays[name].astype(np.float64) + 1).astype(dtypes[name])
    return arrays


# --- draws ---------------------------------------------------------------------------------------


def drawn_rows(rng: np.random.Generator, max_elements: int, vectors: tuple[str, ...]) -> Shapes:
    """Draw shapes of up to four axes, with each of the vectors in most draws and a residual in some."""
    N = random_size(rng, max_elements)
    left, outer = max_elements // max(N, 1), []
    for _ in range(int(rng.integers(0, 4))):
        outer.append(random_size(rng, max(left, 1)))
        left //= max(outer[-1], 1)
    shape = (*(outer[place] for place in rng.permutation(len(outer))), N)
    shapes: Shapes = {"x": shape} | {name: (N,) for name in vectors if rng.random() < 0.7}
    return shapes | ({"residual": shape} if rng.random() < 0.4 else {})


def drawn_eps(rng: np.random.Generator) -> float:
    """Draw eps, but not 0: with it, a variance of 0 in one order of addition and nearly 0 in another give very
    different results.
    """
    return float(rng.choice([1e-6, 1e-5, 1e-3, 1.0]))


def special(name: str, case: Case, backward: bool) -> tuple[float, bool] | None:
    """Special values: the squares of a row have a finite sum, and what is finite in the truth is finite in half
    precision.
    """
    if name in ("x", "residual"):
        return {"float16": 16376.0, "float64": 2.0**500}.get(case.dtype, 2.0**55), True
    # y is at most sqrt(N) * w; a row of tiny numbers has rstd = 1000, which scales dx; an infinity times a number that
    # is 0 only in float32 is NaN
    half = 8.0 if backward else 256.0
    return {"float16": half, "float64": 2.0**400}.get(case.dtype, 2.0**50), False


# --- terms ---------------------------------------------------------------------------------------


def result_terms(arrays: Arrays, problem: Problem) -> dict[str, float]:
    """Sum the magnitudes in y = (h - mean) * rstd * (w + offset) + b, and in mean and rstd."""
    wide = _wide(arrays)
    with np.errstate(all="ignore"):
        h = wide["x"] + wide.get("residual", 0.0)
        centred = problem.spec.name == "layer_norm"
        mean = h.sum(axis=-1) / problem.N if centred else np.zeros(h.shape[:-1])
        rstd = 1 / np.sqrt(((h - mean[..., None]) ** 2).sum(axis=-1) / problem.N + problem.eps)
        size = (np.abs(h) + np.abs(mean)[..., None]) * rstd[..., None]  # of xhat
        y = size * _weight(wide, problem) + np.abs(wide.get("b", 0.0))
        terms = {"y": y, "mean": np.abs(h).sum(axis=-1) / problem.N, "rstd": rstd}
        if centred:
            terms["rstd"] = rstd * (1 + size.max(axis=-1, initial=0))
    return {name: _largest(values, problem) for name, values in terms.items()}


def gradient_terms(arrays: Arrays, problem: Problem) -> dict[str, float]:
    """Sum the magnitudes in dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsummed, dw and db."""
    wide = _wide(arrays)
    with np.errstate(all="ignore"):
        rstd, dy = wide["rstd"][..., None], np.abs(wide["dy"])
        size = (np.abs(wide["x"]) + np.abs(wide["mean"][..., None] if "mean" in wide else 0)) * rstd  # of xhat
        g = dy * _weight(wide, problem)
        means = [x.sum(axis=-1, keepdims=True) / problem.N for x in (g, g * size)]
        dx = rstd * (g + means[0] + size * means[1]) + np.abs(wide.get("dsummed", 0.0))
        rows = tuple(range(dy.ndim - 1))
        terms = {"dx": dx, "dw": (dy * size).sum(axis=rows), "db": dy.sum(axis=rows)}
    return {name: _largest(values, problem) for name, values in terms.items()}


def _wide(arrays: Arrays) -> dict[str, np.ndarray]:
    return {name: array.astype(np.float64) for name, array in arrays.items()}


def _weight(wide: Arrays, problem: Problem) -> Any:
    return np.abs(wide["w"]) + abs(problem.params.get("offset", 0.0)) if "w" in wide else 1.0


def _largest(values: np.ndarray, problem: Problem) -> float:
    """Return the largest magnitude, at least the smallest normal number: below it eps is not relative."""
    return float(values[np.isfinite(values)].max(initial=np.finfo(compute_dtype(problem.dtype)).tiny))
