"""matmul: its asv class and its peers: cuBLAS through torch, with float32 products in float32, and QuACK.

With an activation, all peers get its expression; torch.compile fuses it with the other operations outside of cuBLAS. If
dualops uses tf32, cuBLAS does, too. If dualops uses 3xtf32, which cuBLAS lacks, cuBLAS multiplies in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import Any

from .cases import suite
from .contestant import Contestant, with_autograd
from .samples import matrices
from .tree import spec


def eager(problem: spec.Problem) -> Contestant:
    """Return torch.matmul, which is cuBLAS, with torch's own kernels for bias and activation."""
    return _in_its_precision(problem, with_autograd("torch eager", problem, _forward(problem)))


def compiled(problem: spec.Problem) -> Contestant:
    """Return the same through torch.compile, which leaves the product to cuBLAS and fuses the rest."""
    torch = import_module("torch")
    torch.compiler.reset()
    made = with_autograd("torch.compile", problem, torch.compile(_forward(problem), dynamic=False))
    return _in_its_precision(problem, made)


def _in_its_precision(problem: spec.Problem, made: Contestant) -> Contestant:
    """Return the same, with tf32 allowed during its calls if the problem's precision is tf32."""
    if problem.dtype != "float32" or problem.precision != "tf32":
        return made
    settings = import_module("torch").backends.cuda.matmul

    def allowed(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(**arrays: Any) -> Any:
            before, settings.allow_tf32 = settings.allow_tf32, True
            try:
                return function(**arrays)
            finally:
                settings.allow_tf32 = before

        return call

    return made._replace(forward=allowed(made.forward), backward=made.backward and allowed(made.backward))


def _forward(problem: spec.Problem) -> Any:
    torch = import_module("torch")
    if torch.backends.cuda.matmul.allow_tf32:
        raise NotImplementedError("cuBLAS is compared in float32 arithmetic: torch.backends.cuda.matmul.allow_tf32")
    functional = torch.nn.functional
    activations = {None: lambda z: z, "relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}
    act = activations[problem.activation]

    def forward(a: Any, b: Any, bias: Any = None) -> Any:
        left, right = a.mT if problem.transpose_a else a, b.mT if problem.transpose_b else b
        if bias is not None and right.dim() == 2:
            return act(functional.linear(left, right.mT, bias.to(a.dtype)))  # cuBLAS adds the bias
        return act(left @ right if bias is None else left @ right + bias.to(a.dtype))

    return forward


def quack(problem: spec.Problem, *, tuned: bool = False) -> Contestant:
    """Return QuACK's gemm and gemm_act, on its default kernel or, tuned, on the best of some forty, found in a minute
    per shape.

    Its gelu is the tanh approximation, as the name in the table says. Backward: two calls of gemm; act' and the bias's
    gradient run on torch's kernels, since QuACK fuses act' only into the product before it. Raises NotImplementedError
    for problems that its interface does not support.
    """
    of_quack(problem)
    torch, functions = import_module("torch"), import_module("quack.gemm_interface")
    aten = torch.ops.aten
    gemm = partial(functions.gemm, tuned=tuned)
    act = {"gelu": "gelu_tanh_approx"}.get(problem.activation, problem.activation)
    slopes = {
        None: lambda dy, z: dy,
        "relu": lambda dy, z: aten.threshold_backward(dy, z, 0),
        "gelu": lambda dy, z: aten.gelu_backward(dy, z, approximate="tanh"),
        "silu": aten.silu_backward,
    }
    slope = slopes[problem.activation]
    batch = (problem.B,) if len(problem.arrays["b"].shape) > 2 else ()

    def folded(x: Any) -> Any:
        """Return x with at most one batch axis; none if b has none, since all rows then use the same matrix."""
        return x.reshape(*batch, -1, x.shape[-1])

    def operands(a: Any, b: Any) -> tuple[Any, Any]:
        left, right = folded(a), folded(b)
        return left.mT if problem.transpose_a else left, right.mT if problem.transpose_b else right

    def forward(a: Any, b: Any, bias: Any = None) -> Any:
        left, right = operands(a, b)
        shape = (*problem.batch, problem.M, problem.N)
        if act is None:
            return gemm(left, right, bias=bias).reshape(shape)
        z, y = functions.gemm_act(
            left, right, bias=bias, activation=act, store_preact=problem.return_preactivation, tuned=tuned
        )
        return (y.reshape(shape), z.reshape(shape)) if problem.return_preactivation else y.reshape(shape)

    def backward(a: Any, b: Any, dy: Any, bias: Any = None, preactivation: Any = None) -> Any:
        left, right = operands(a, b)
        dz = folded(slope(dy, preactivation))
        da = gemm(right, dz.mT) if problem.transpose_a else gemm(dz, right.mT)
        db = gemm(dz.mT, left) if problem.transpose_b else gemm(left.mT, dz)
        gradients = da.reshape(a.shape), db.reshape(b.shape)
        if bias is None:
            return gradients
        return *gradients, dz.sum(tuple(range(dz.dim() - 1)), dtype=bias.dtype)

    name = "QuACK" + " tanh" * (problem.activation == "gelu") + " tuned" * tuned
    return Contestant(name, forward, backward)


def of_quack(problem: spec.Problem) -> None:
    """Raise NotImplementedError for problems that QuACK's gemm does not support."""
    if problem.dtype not in ("float16", "bfloat16"):
        raise NotImplementedError(f"QuACK multiplies float16 and bfloat16, not {problem.dtype}")
    a, b = problem.arrays["a"].shape, problem.arrays["b"].shape
    if a[:-2] != b[:-2] and (len(b) > 2 or problem.transpose_a):
        raise NotImplementedError(f"QuACK has no products of broadcast batches, of a {a} and b {b}")
    rows = {"a": problem.M if problem.transpose_a else problem.K, "b": problem.K if problem.transpose_b else problem.N}
    rows["the result"] = problem.N
    ragged = [f"{name} has {size}" for name, size in rows.items() if size * problem.itemsize % 16]
    if ragged:
        raise NotImplementedError(f"QuACK needs rows of whole 16 bytes: {', '.join(ragged)} elements")


Matmul = suite(
    "matmul",
    sample=matrices,
    peers={"torch eager": eager, "torch.compile": compiled, "QuACK": quack},
    slow_peers={"QuACK tuned": partial(quack, tuned=True)},
    rungs=("naive",),
)
