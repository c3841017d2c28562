"""matmul on the GPU: which kernel serves which problem, and the public functions. A ladder, one idea a rung:

naive.py   a thread an element of the result; every operand comes from memory, and is loaded for one multiplication
simt.py    tiles in shared memory and in registers: limited by what CUDA cores multiply

What the rungs share: `product` has a matrix product by its axes and strides, as which forward and both gradients are
launched; `loading` brings a factor of any layout into shared memory; `gradient` has dz and dbias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from ...spec import ArrayMeta, Problem, matmul as SPEC
from ...spec.matmul import has_dz
from ..device import Device
from ..launch import Choice, Operation
from ..step import Step
from . import gradient, naive, simt
from .product import Product, a_gradient_product, b_gradient_product, forward_product, variant
from .simt import SimtConfig

RUNGS = SPEC.rungs


def matmul(
    a: Any,
    b: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Any = None,
    activation: str | None = None,
    precision: str | None = None,
    return_preactivation: bool = False,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """act(op(a) @ op(b) + bias), where op transposes the last two axes if it is told to.

    a [..., M, K] ([..., K, M] with transpose_a), b [..., K, N] ([..., N, K] with transpose_b): device arrays of one
    library and dtype (float64, float32, float16, bfloat16), of any non-negative strides, the axes before the last two
    broadcasting; a transposed view is as good as the transposed array. bias [N] of that dtype or float32 (float64 for
    float64). activation: None, "relu", "gelu" (by the error function) or "silu". precision: None; "tf32" and "3xtf32",
    which float32 may ask for, need tensor cores, and no rung has them yet.

    Returns y [..., M, N], row-major, of a's dtype; with return_preactivation also what the activation came upon, which
    backward takes. Sums are float32 (float64 for float64), results are rounded once; float32 is never multiplied as
    tf32 unasked. K = 0 leaves act(bias). Bit-equal from run to run. No memory beside the results.
    out: an array for y, or (y, preactivation), of any strides, sharing no memory with the inputs. kernel: a rung
    instead of the best. stream: a stream object or handle instead of the library's current one.
    Raises TypeError and ValueError for a wrong call, NotImplementedError where this device or rung can't do it. No
    gradient is recorded: see dualops.torch_bridge.
    """
    params = (transpose_a, transpose_b, activation, precision, return_preactivation)
    return forward((a, b, bias), params, out, kernel, stream)


def matmul_backward(
    a: Any,
    b: Any,
    dy: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Any = None,
    preactivation: Any = None,
    dpreactivation: Any = None,
    activation: str | None = None,
    precision: str | None = None,
    return_preactivation: bool = False,
    a_gradient: bool = True,
    b_gradient: bool = True,
    bias_gradient: bool = True,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """The gradient of `matmul`, from what it took, dy [..., M, N] and, beside an activation, the preactivation.

    dpreactivation [..., M, N]: the gradient of the preactivation as a result, where it was used. a_gradient,
    b_gradient, bias_gradient: whether da, db, dbias are wanted. The other arguments are those of `matmul`, and must be
    what they were.
    Returns those of da, db and dbias that are wanted (dbias where there is a bias), each of the shape, dtype and order
    of axes of its input, summed over what that was broadcast along. Bit-equal from run to run: no atomics. Beside the
    results there is dz, as large as dy, where there is an activation or dpreactivation, and a row of sums for every 512
    rows of dy where there is a bias.
    """
    arrays = (a, b, dy, bias, preactivation, dpreactivation)
    params = (transpose_a, transpose_b, activation, precision, return_preactivation)
    return backward(arrays, (*params, a_gradient, b_gradient, bias_gradient), out, kernel, stream)


def forward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Ways to do a product, best first."""
    if not results["y"].size:
        yield from _nothing()
        return
    if _needs_tensor_cores(problem):
        return
    metas = {**problem.arrays, **results}
    product = forward_product(problem, metas)
    for config, reason in simt.configs(product, problem.dtype, device):
        yield Choice("simt", config, reason, partial(simt.product_steps, product, problem, metas, config))
    yield Choice("naive", None, NAIVE_REASON, partial(naive.product_steps, product, variant(product, problem)))


NAIVE_REASON = "a thread an element: every operand is loaded for one multiplication"


class GradientConfigs(NamedTuple):
    """A Config for each of the products; None for one that is not wanted."""

    a: SimtConfig | None
    b: SimtConfig | None


def backward_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Ways to do its gradient, best first."""
    if not any(meta.size for meta in results.values()):
        yield from _nothing()
        return
    if _needs_tensor_cores(problem):
        return
    products = _gradient_products(problem, results)
    workspace = {"dz": gradient.dz_meta(problem)} if has_dz(problem) else {}
    best = {name: list(simt.configs(each, problem.dtype, device))[:1] for name, each in products.items()}
    if all(best.values()):
        chosen = {name: config for name, [(config, _)] in best.items()}
        reason = "; ".join(f"{name}: {reason}" for name, [(_, reason)] in best.items()) or "sums of columns"
        sums = gradient.partial_sums(problem) if "dbias" in results else {}
        steps = partial(_simt_steps, problem, results, products, chosen)
        configs = GradientConfigs(chosen.get("da"), chosen.get("db"))
        yield Choice("simt", configs, reason, steps, workspace | sums)
    yield Choice("naive", None, NAIVE_REASON, partial(_naive_steps, problem, results, products), workspace)


def _nothing() -> Iterator[Choice]:
    yield from (Choice(rung, None, "nothing to do", tuple) for rung in reversed(RUNGS))


def _needs_tensor_cores(problem: Problem) -> bool:
    return problem.dtype == "float32" and problem.precision is not None


def _gradient_products(problem: Problem, results: Mapping[str, ArrayMeta]) -> dict[str, Product]:
    """The products that make da and db, of those that are wanted and not empty."""
    metas, dz = _gradient_metas(problem, results), gradient.dz_name(problem)
    made = {"da": a_gradient_product, "db": b_gradient_product}
    return {name: make(problem, metas, dz) for name, make in made.items() if name in results and results[name].size}


def _gradient_metas(problem: Problem, results: Mapping[str, ArrayMeta]) -> dict[str, ArrayMeta]:
    return {**problem.arrays, **results, "dz": gradient.dz_meta(problem)}


def _simt_steps(
    problem: Problem,
    results: Mapping[str, ArrayMeta],
    products: Mapping[str, Product],
    configs: Mapping[str, SimtConfig],
) -> list[Step]:
    steps = gradient.dz_steps(problem)
    metas = _gradient_metas(problem, results)
    for name, product in products.items():
        steps += simt.product_steps(product, problem, metas, configs[name])
    if "dbias" in results and problem.N:
        steps += gradient.column_sums_steps(problem, results["dbias"])
    return steps


def _naive_steps(problem: Problem, results: Mapping[str, ArrayMeta], products: Mapping[str, Product]) -> list[Step]:
    steps = gradient.dz_steps(problem)
    for product in products.values():
        steps += naive.product_steps(product, variant(product, problem))
    if "dbias" in results and problem.N:
        steps += naive.column_sums_steps(problem, results["dbias"])
    return steps


forward = Operation(SPEC, forward_choices)
backward = Operation(SPEC, backward_choices, backward=True)
