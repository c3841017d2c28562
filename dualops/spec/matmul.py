"""The spec of matmul(a, b): y = act(op(a) @ op(b) + bias), where op transposes the last two axes on request.

a [..., M, K], or [..., K, M] with transpose_a; b [..., K, N], or [..., N, K] with transpose_b; the axes before the last
two broadcast as in NumPy. K = 0 leaves act(bias).

    z = op(a) @ op(b) + bias         the preactivation, a result on request: backward needs it with an activation
    dz = dy * act'(z) + dpreactivation
    d op(a) = dz @ op(b).T    d op(b) = op(a).T @ dz    dbias = sum of dz over rows and batches

da and db have the layouts of a and b, and are summed over the batch axes that a or b was broadcast along. act is relu,
gelu (Hendrycks & Gimpel 2016, arXiv:1606.08415: z * Phi(z), by the error function) or silu (z * sigmoid(z)).

`precision` changes how float32 is multiplied; 16-bit dtypes do not accept it, and float64 ignores it. "tf32" rounds
both factors to 11 bits of mantissa. "3xtf32" splits each into two such parts and omits the product of the lower ones.
Kernels round the factors; a tensor core would truncate unrounded float32. In units of the last of the 11 bits, rounding
errs by 1/sqrt(12) to both sides, and truncation by as much around a mean of 1/2. So in a sum of any length a product's
error is sqrt(2/12) = 0.4 with rounding, and sqrt(2/12 + 1) = 1.1 with truncation. That is 2.7 times the baseline's, and
the rule of accuracy allows 2.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from .base import Case, Cost, Input, Output, Param, Problem, Role, Spec, Tag, standard_normal
from .domains import boolean, one_of
from .draws import Drawn, random_size
from .meta import FLOATS, ArrayMeta

ACTIVATIONS = ("relu", "gelu", "silu")
PRECISIONS = ("tf32", "3xtf32")
Shape = tuple[int, ...]
LONGEST = 400  # rows, columns and terms of a random problem


def measure(op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """Measure M, N, K; the batch axes of the result, and B, their product."""
    precision, dtype = params["precision"], arrays["a"].dtype
    if precision is not None and dtype not in ("float32", "float64"):
        raise ValueError(f"{op}: precision is {precision!r}, a is {dtype}, expected float32 for it")
    M, K = _matrix(op, "a", arrays["a"].shape, "MK", params["transpose_a"])
    K_of_b, N = _matrix(op, "b", arrays["b"].shape, "KN", params["transpose_b"])
    if K_of_b != K:
        raise ValueError(f"{op}: b has K={K_of_b}, a has K={K}")
    if "bias" in arrays and sizes["N"] != N:
        raise ValueError(f"{op}: bias has N={sizes['N']}, b has N={N}")
    batch = _broadcast(op, arrays["a"].shape[:-2], arrays["b"].shape[:-2])
    for name in ("dy", "preactivation", "dpreactivation"):
        if name in arrays and arrays[name].shape != (*batch, M, N):
            raise ValueError(f"{op}: {name} has shape {arrays[name].shape}, expected {(*batch, M, N)}, as the result")
    if "dy" in arrays and "preactivation" not in arrays and params["activation"] is not None:
        raise TypeError(f"{op}: preactivation is missing, expected it with activation {params['activation']!r}")
    return {"M": M, "N": N, "K": K, "batch": batch, "B": prod(batch)}


def _matrix(op: str, name: str, shape: Shape, axes: str, transposed: bool) -> Shape:
    """Return the last two sizes of an array, in the order of `axes`."""
    if len(shape) < 2:
        rows, columns = reversed(axes) if transposed else axes
        raise ValueError(f"{op}: {name} has {len(shape)} axes {shape}, expected at least 2: [..., {rows}, {columns}]")
    return shape[:-3:-1] if transposed else shape[-2:]


def _broadcast(op: str, a: Shape, b: Shape) -> Shape:
    """Return the common shape of two shapes, aligned at their ends."""
    rank = max(len(a), len(b))
    batch = []
    for mine, theirs in zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True):
        if mine != theirs and mine != 1 and theirs != 1:
            raise ValueError(f"{op}: b has batch axes {b}, a has {a}, expected them to broadcast")
        batch.append(theirs if mine == 1 else mine)
    return tuple(batch)


def has_dz(problem: Problem) -> bool:
    """Whether the gradient of the preactivation differs from dy."""
    return problem.activation is not None or "dpreactivation" in problem.arrays


def _written(problem: Problem, outputs: tuple[Output, ...]) -> int:
    return problem.nbytes(*(output.name for output in outputs))


def _product_flops(problem: Problem) -> int:
    return 2 * problem.B * problem.M * problem.N * problem.K


def _wanted(problem: Problem, name: str) -> bool:
    return problem.params.get(f"{name}_gradient", True)


def _read_backward(problem: Problem) -> int:
    """Count the bytes of dy, of the other terms of dz, and of the factor that each requested gradient needs."""
    factors = [other for name, other in (("a", "b"), ("b", "a")) if _wanted(problem, name)]
    slopes = ["preactivation"] * (problem.activation is not None)
    return problem.nbytes("dy", "dpreactivation", *slopes, *factors)


def _result(p: Problem) -> Shape:
    return (*p.batch, p.M, p.N)


INPUTS = (Input("a", None), Input("b", None), Input("bias", ("N",), optional=True, role=Role.WEIGHT))
OUTPUTS = (
    Output("y", _result, lambda p: p.dtype, like="a", row_major=True),
    Output(
        "preactivation", _result, lambda p: p.dtype, like="a", row_major=True, when=lambda p: p.return_preactivation
    ),
)


def _gradient(name: str) -> Output:
    """The gradient of an input: the same shape, dtype and order of axes, but dense."""
    return Output(
        f"d{name}",
        lambda p: p.arrays[name].shape,
        lambda p: p.arrays[name].dtype,
        like=name,
        when=lambda p: name in p.arrays and _wanted(p, name),
    )


GRADIENTS = tuple(_gradient(entry.name) for entry in INPUTS)


# --- cases ---------------------------------------------------------------------------------------


def shapes_of(
    M: int, N: int, K: int, *, layout: str = "nn", a: Shape = (), b: Shape = (), bias: bool = False
) -> tuple[dict[str, Shape], dict[str, bool]]:
    """Return shapes and transposes of a problem. layout: "n" or "t" for each matrix; a, b: their batch axes."""
    of_a, of_b = ((M, K), (K, M))[layout[0] == "t"], ((K, N), (N, K))[layout[1] == "t"]
    shapes: dict[str, Shape] = {"a": (*a, *of_a), "b": (*b, *of_b)}
    if bias:
        shapes["bias"] = (N,)
    transposes = {"transpose_a": layout[0] == "t", "transpose_b": layout[1] == "t"}
    return shapes, {name: True for name, value in transposes.items() if value}


def _cases() -> tuple[Case, ...]:
    cases = []

    def add(
        name: str,
        sizes: tuple[int, int, int],
        dtypes: tuple[str, ...],
        tags: set[Tag],
        *,
        layout: str = "nn",
        a: Shape = (),
        b: Shape = (),
        bias: bool = False,
        backward: bool = True,
        **params: Any,
    ) -> None:
        shapes, transposes = shapes_of(*sizes, layout=layout, a=a, b=b, bias=bias)
        cases.extend(Case(name, dtype, shapes, transposes | params, frozenset(tags), backward) for dtype in dtypes)

    single, half, both = ("float32",), ("bfloat16",), ("float32", "bfloat16")
    linear: dict[str, Any] = {"layout": "nt", "bias": True, "activation": "gelu", "return_preactivation": True}
    # common problems
    add("square4096", (4096, 4096, 4096), both, {Tag.BENCH})
    add("batch16_1024", (1024, 1024, 1024), single, {Tag.BENCH}, a=(16,), b=(16,))
    add("linear8192x4096x4096", (8192, 4096, 4096), half, {Tag.BENCH}, **linear)
    add("linear2048x2048x1024", (2048, 2048, 1024), both, {Tag.DEMO}, **linear)
    # comparisons with cuBLAS: every layout, small and thin matrices, sizes that are not multiples of a tile
    forward: dict[str, Any] = {"dtypes": half, "tags": {Tag.COMPARE}, "backward": False}
    for layout in ("nt", "tn", "tt"):
        add(f"square4096_{layout}", (4096, 4096, 4096), **forward, layout=layout)
    for layout in ("nn", "nt", "tn", "tt"):
        add(f"square8192_{layout}", (8192, 8192, 8192), **forward, layout=layout)
    for size in (512, 1024, 2048, 4097):
        add(f"square{size}", (size, size, size), **forward)
    add("m8192n512k8192", (8192, 512, 8192), **forward)
    add("m64n4096k4096", (64, 4096, 4096), **forward)
    add("batch16_1024", (1024, 1024, 1024), **forward, a=(16,), b=(16,))
    add("linear8192x4096x4096_plain", (8192, 4096, 4096), half, {Tag.COMPARE}, layout="nt", bias=True)
    forward["dtypes"] = single
    for layout in ("nn", "nt", "tn", "tt"):
        add(f"tf32_square4096_{layout}", (4096, 4096, 4096), **forward, layout=layout, precision="tf32")
    for layout in ("nn", "nt"):
        add(f"3xtf32_square4096_{layout}", (4096, 4096, 4096), **forward, layout=layout, precision="3xtf32")
    # every layout, whole tiles and ragged ones, and the other inputs, in pairs
    exact, ragged = {Tag.TEST}, {Tag.TEST, Tag.EDGE}
    add("m256n384k320", (256, 384, 320), FLOATS, exact)
    add("m256n128k160_nt", (256, 128, 160), FLOATS, exact, layout="nt", bias=True, activation="silu")
    add("m128n256k200_tn", (128, 256, 200), FLOATS, exact, layout="tn", a=(3,), b=(3,))
    add("m136n120k104_tt", (136, 120, 104), FLOATS, exact, layout="tt", b=(2,), activation="relu")
    add("m257n130k71", (257, 130, 71), FLOATS, ragged, a=(2,), bias=True)
    add("m65n129k513_nt", (65, 129, 513), FLOATS, ragged, layout="nt", a=(2, 1), b=(3,), activation="gelu")
    add("m33n47k19_tn", (33, 47, 19), FLOATS, ragged, layout="tn", b=(2, 2), bias=True, return_preactivation=True)
    add("m70n5k300_tt", (70, 5, 300), FLOATS, ragged, layout="tt", a=(2,), b=(2,), bias=True, activation="relu")
    add("m1n1000k1", (1, 1000, 1), FLOATS, ragged, activation="silu", return_preactivation=True)
    add("m7n3k20000", (7, 3, 20000), both, ragged, layout="nt", activation="gelu", bias=True)
    add("batch70000", (2, 3, 4), both, exact, a=(70000,), b=(70000,))  # more than a grid's second axis can have
    # enough tiles for an H200 to have wide ones: of 64, 128, 192 and 256 columns; and a long sum of few
    wide: dict[str, Any] = {"tags": exact, "bias": True, "backward": False}
    add("m700n1544k72_nt", (700, 1544, 72), half, **wide, layout="nt", activation="gelu", return_preactivation=True)
    add("m1032n520k40", (1032, 520, 40), half, **wide)
    add("m1032n2056k40", (1032, 2056, 40), half, **wide)
    add("m64n136k2000", (64, 136, 2000), half, **wide)
    add("m513n517k521", (513, 517, 521), half, **wide)
    add("m2040n2040k40_tn", (2040, 2040, 40), half, **wide, layout="tn", activation="silu")
    # float32 on tensor cores: factors that are loaded directly, and factors that are copied first; long sums
    for precision in PRECISIONS:
        shape: dict[str, Any] = {"dtypes": single, "precision": precision}
        add(f"{precision}_m700n1544k72_nt", (700, 1544, 72), **wide, layout="nt", activation="relu", **shape)
        add(f"{precision}_m256n128k160_nt", (256, 128, 160), tags=exact, layout="nt", **shape)
        add(f"{precision}_m128n260k200_tn", (128, 260, 200), tags=exact, layout="tn", a=(3,), b=(3,), **shape)
        add(f"{precision}_m257n130k71", (257, 130, 71), tags=ragged, a=(2,), bias=True, activation="gelu", **shape)
        add(f"{precision}_m70n5k300_tt", (70, 5, 300), tags=ragged, layout="tt", a=(2,), b=(2,), bias=True, **shape)
        add(f"{precision}_m7n3k20000", (7, 3, 20000), tags=exact, layout="nt", **shape)
    # empty results, and empty sums
    nothing = {Tag.TEST, Tag.EDGE, Tag.SIM}
    add("no_rows", (0, 5, 7), both, nothing, bias=True)
    add("no_columns", (5, 0, 7), both, nothing, layout="tn", bias=True)
    add("no_batches", (5, 4, 3), both, nothing, a=(2, 0), b=(1, 1), bias=True)
    add("no_terms", (5, 9, 0), both, nothing, layout="nt", a=(2,), bias=True, activation="relu")
    # small enough for a simulator
    simulated = {Tag.SIM}
    add("sim_nn", (20, 17, 20), ("float64", "bfloat16"), simulated, bias=True, activation="gelu")
    add("sim_nt", (8, 40, 24), both, simulated, layout="nt", a=(2,), bias=True, activation="relu")
    add("sim_tn", (10, 12, 8), ("float16", "float32"), simulated, layout="tn", a=(1, 2), b=(2, 1), activation="silu")
    add("sim_tt", (17, 9, 18), ("float64", "float16"), simulated, layout="tt", b=(2,), return_preactivation=True)
    add("sim_long", (3, 2, 300), single, simulated, backward=False)
    floats: dict[str, Any] = {"dtypes": single, "tags": simulated}
    add("sim_tf32", (12, 20, 20), **floats, layout="nt", b=(2,), activation="relu", backward=False, precision="tf32")
    add("sim_3xtf32", (12, 9, 20), **floats, layout="tn", bias=True, precision="3xtf32")
    # one of each kernel variant, for the offline compiler
    compiled = {Tag.COMPILE}
    add("square2048", (2048, 2048, 2048), ("float64", "float32"), compiled)
    add("linear", (2048, 2048, 1024), half, compiled, **linear)
    for dtypes, backward in ((half, True), (single, False)):
        sizes = (2049, 2051, 1023)
        add("ragged", sizes, dtypes, compiled, layout="tt", bias=True, activation="gelu", backward=backward)
    add("small_tn", (64, 64, 2048), ("float16",), compiled, layout="tn", a=(3,), activation="silu")
    few: dict[str, Any] = {"dtypes": single, "tags": compiled, "backward": False}
    add("tf32_tn", (4096, 4096, 1024), **few, layout="tn", precision="tf32")
    add("3xtf32_linear", (4096, 4096, 1024), **few, **linear, precision="3xtf32")
    return tuple(cases)


# --- draws ---------------------------------------------------------------------------------------


def draw(rng: np.random.Generator, max_elements: int) -> Drawn:
    """Draw any layouts, batch axes that broadcast in every way, any options together."""
    K = random_size(rng, min(max_elements, LONGEST))
    M, N = (random_size(rng, min(max_elements // max(K, 1), LONGEST)) for _ in range(2))
    if max_elements < M * N:
        M = max_elements // N
    largest = max(M * K, K * N, M * N, 1)
    a, b = _drawn_batches(rng, max_elements // largest)
    layout = "".join(rng.choice(["n", "t"], 2))
    shapes, transposes = shapes_of(M, N, K, layout=layout, a=a, b=b, bias=bool(rng.integers(2)))
    params: dict[str, Any] = {**transposes, "return_preactivation": bool(rng.integers(2))}
    if rng.random() < 0.5:
        params["activation"] = str(rng.choice(ACTIVATIONS))
    if rng.random() < 0.25:
        params["precision"] = str(rng.choice(PRECISIONS))  # only for float32
    return shapes, params


def _drawn_batches(rng: np.random.Generator, most: int) -> tuple[Shape, Shape]:
    """Draw batch axes of a and b, none in half of the draws, whose common shape has at most this many places."""
    if rng.random() < 0.5:
        return (), ()
    full: list[int] = []
    for _ in range(int(rng.integers(1, 4))):
        full.append(random_size(rng, min(max(most // max(prod(full), 1), 1), 5)))
    shapes = []
    for _ in range(2):
        shape = tuple(1 if rng.random() < 0.3 else size for size in full)
        leading = next((axis for axis, size in enumerate(shape) if size != 1), len(shape))
        shapes.append(shape[int(rng.integers(leading + 1)) :])  # leading axes may be left out
    return shapes[0], shapes[1]


def special(name: str, case: Case, backward: bool) -> tuple[float, bool] | None:
    """Special values: no sum overflows in half precision, and no infinity in a gradient. A slope, or a rounded dz, may
    be tiny in float64 and 0 in float32: times infinity that gives inf in one and NaN in the other.
    """
    return 16.0, not backward


SPEC = Spec(
    name="matmul",
    formula="y = act(op(a) @ op(b) + bias);  dz = dy * act'(z);  da = dz @ op(b).T;  db = op(a).T @ dz",
    paper="Goto & van de Geijn 2008, doi:10.1145/1356052.1356053; Volkov & Demmel 2008, doi:10.1109/SC.2008.5214359",
    inputs=INPUTS,
    params=(
        Param("transpose_a", False, boolean, "a is [..., K, M]"),
        Param("transpose_b", False, boolean, "b is [..., N, K]"),
        Param("activation", None, one_of(None, *ACTIVATIONS), "applied to the sum"),
        Param("precision", None, one_of(None, *PRECISIONS), "how float32 is multiplied; None is as float32"),
        Param("return_preactivation", False, boolean, "also return op(a) @ op(b) + bias"),
    ),
    outputs=OUTPUTS,
    gradient_inputs=(
        *(Input(name, None) for name in ("a", "b", "dy")),
        INPUTS[2],
        *(Input(name, None, optional=True) for name in ("preactivation", "dpreactivation")),
    ),
    gradients=GRADIENTS,
    gradient_params=tuple(
        Param(f"{entry.name}_gradient", True, boolean, f"whether to return d{entry.name}") for entry in INPUTS
    ),
    saved=("a", "b", "bias", "preactivation"),
    saved_when={"preactivation": lambda p: p.activation is not None and p.return_preactivation},
    measure=measure,
    forward_cost=Cost(
        flops=_product_flops,
        bytes_read=lambda p: p.nbytes("a", "b", "bias"),
        bytes_written=lambda p: _written(p, OUTPUTS),
    ),
    backward_cost=Cost(
        flops=lambda p: _product_flops(p) * (_wanted(p, "a") + _wanted(p, "b")),
        bytes_read=_read_backward,
        bytes_written=lambda p: _written(p, GRADIENTS),
        extra_memory=lambda p: p.B * p.M * p.N * p.itemsize if has_dz(p) else 0,  # dz
    ),
    rounding="results once, to the storage dtype, and dz before it is multiplied with a matrix; all else in float32",
    floor=8.0,
    rungs=("naive", "simt", "sm80", "sm90"),
    cases=_cases(),
    generate=standard_normal,
    draw=draw,
    special=special,
)
