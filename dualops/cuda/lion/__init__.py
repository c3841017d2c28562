"""Lion on the GPU: which kernel serves which problem, and the public function.

formula.py  the arithmetic of an element
dense.py    dense tensors: one, or a table of them, 16 bytes at a time
strided.py  arrays of any layout; the rung naive
lists.py    lists of tensors
tables.py   their tables on the device, which are kept from call to call
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ...spec import ArrayMeta, Problem, lion as SPEC
from ..launch.arrays import collapse
from ..launch.device import Device
from ..launch.device_words import build_writer
from ..launch.operation import Choice, Operation
from ..launch.step import Step
from . import dense, strided
from .dense import DenseConfig
from .formula import Arrays, array_names, dtypes_of, lr_argument, rates_of
from .lists import ListOperation
from .strided import StridedConfig


def lion(
    params: Any,
    grads: Any,
    momenta: Any,
    lr: Any,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    master: Any = None,
    out: Any = None,
    kernel: str | None = None,
    stream: Any = None,
) -> Any:
    """Do one step of Lion in place: overwrite params, momenta and master. Chen et al. 2023, arXiv:2302.06675.

        c = beta1 * m + (1 - beta1) * g
        p = p * (1 - lr * weight_decay) - lr * sign(c)
        m = beta2 * m + (1 - beta2) * g

    params: a device array of float64, float32, float16 or bfloat16, of any shape and non-negative strides, or a list of
    them. With a list, grads, momenta and master are lists of the same length, and each combination of dtypes is one
    launch. grads: in the params' dtype or in float32. momenta: in float32, float16 or bfloat16. master: the params in
    float32. The step updates master, and rounds it to params. With float64 params all are float64.
    lr: a number, or a float array without axes on the device, which a captured CUDA graph reads again at each replay.

    Returns the written arrays: (params, momenta) or (params, momenta, master). Bit-equal to the reference: each
    operation is rounded separately, in float32 (float64 for float64 params).
    out: arrays (or lists of them) for the same two or three results, written instead of the inputs. kernel: "naive",
    "simt" or "table" (the kernel of lists) instead of the best. stream: a stream object or handle instead of the
    library's current one.

    The kernel of lists finds tensors by a table of addresses on the device. The first call with these addresses makes
    the table. The table is kept, also for captured graphs that may read it. A tensor that is not dense, or whose arrays
    differ in their order of axes, needs a separate launch. Raises TypeError and ValueError for a wrong call,
    NotImplementedError for arrays that need more than four strides.
    """
    both: Any = tuple(betas) if isinstance(betas, list) else betas  # hashable, as part of a key
    if isinstance(params, (list, tuple)):
        given = {"params": params, "grads": grads, "momenta": momenta, "master": master}
        return of_lists(given, lr, both, weight_decay, out, kernel, stream)
    return forward((params, grads, momenta, lr, master), (both, weight_decay), out, kernel, stream)


def dense_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the kernel of one dense tensor."""
    metas = {**problem.arrays, **results}
    if dense.is_dense(_there(problem, metas)):
        config = dense.config_of(dtypes_of(problem), device, table=False)
        yield Choice("simt", config, "dense: groups of 16 bytes", partial(_dense_steps, problem, metas, config))


def table_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the kernel of lists for one dense tensor."""
    metas = {**problem.arrays, **results}
    there = _there(problem, metas)
    if dense.is_dense(there):
        config = dense.config_of(dtypes_of(problem), device, table=True)
        table = ArrayMeta((dense.COLUMNS,), "int64", (1,), there[0].device, 0)
        make = partial(_table_steps, problem, metas, config)
        yield Choice("table", config, "the kernel of lists, on one tensor", make, {"table": table})


def strided_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield the kernel of arrays of any layout."""
    configs, reason = [StridedConfig()], "an array has gaps, or another order of axes"
    if _has_few_axes(problem, results):
        make = partial(_strided_steps, problem, {**problem.arrays, **results}, configs)
        yield Choice("simt", configs[0], reason, make)


def naive_choices(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> Iterator[Choice]:
    """Yield two kernels, one for each formula."""
    configs = [StridedConfig(momenta=False), StridedConfig(params=False)]
    if _has_few_axes(problem, results):
        make = partial(_strided_steps, problem, {**problem.arrays, **results}, configs)
        yield Choice("naive", configs, "formula by formula", make)


def _there(problem: Problem, metas: Mapping[str, ArrayMeta]) -> list[ArrayMeta]:
    return [metas[name] for name in array_names(problem) if name in metas]


def _has_few_axes(problem: Problem, results: Mapping[str, ArrayMeta]) -> bool:
    """Whether the arrays need at most as many strides as a kernel accepts, after neighbouring axes are merged."""
    there = _there(problem, {**problem.arrays, **results})
    sizes, _ = collapse(there[0].shape, *(meta.strides for meta in there))
    return len(sizes) <= strided.MOST_AXES


def _numbers(problem: Problem) -> tuple[Any, Any]:
    return lr_argument(problem.arrays["lr"].device != "host"), rates_of(problem.betas, problem.weight_decay)


def _head(problem: Problem, metas: Mapping[str, ArrayMeta]) -> int:
    pointers = [int(metas[name].pointer) for name in array_names(problem) if name in metas]
    return int(dense.heads(dtypes_of(problem), [pointers])[0])


def _dense_steps(problem: Problem, metas: Mapping[str, ArrayMeta], config: DenseConfig) -> Sequence[Step]:
    dtypes, head = dtypes_of(problem), _head(problem, metas)
    blocks = int(dense.chunks(config, dtypes, problem.N, head))
    args = (array_names(problem), *_numbers(problem), problem.N, head)
    return [Step(dense.build_one(config, dtypes), (blocks,), args)]


def _table_steps(problem: Problem, metas: Mapping[str, ArrayMeta], config: DenseConfig) -> Sequence[Step]:
    dtypes, head = dtypes_of(problem), _head(problem, metas)
    blocks = int(dense.chunks(config, dtypes, problem.N, head))
    words = (0, *array_names(problem), problem.N, head)
    return [
        Step(build_writer(dense.COLUMNS), (1,), ("table", 0, words)),
        Step(dense.build_table(config, dtypes), (blocks,), ("table", 1, *_numbers(problem))),
    ]


def _strided_steps(
    problem: Problem, metas: Mapping[str, ArrayMeta], configs: Sequence[StridedConfig]
) -> Sequence[Step]:
    names, dtypes = array_names(problem), dtypes_of(problem)
    there = [name for name in names if name in metas]
    sizes, collapsed = collapse(problem.arrays["params"].shape, *(metas[name].strides for name in there))
    missing = strided.MOST_AXES - len(sizes)
    strides = {name: (0,) * missing + own for name, own in zip(there, collapsed, strict=True)}
    every = Arrays(*(strides.get(name, (0,) * strided.MOST_AXES) for name in names))
    args = (names, *_numbers(problem), problem.N, (1,) * missing + sizes, every)
    blocks = -(-problem.N // configs[0].threads)
    return [Step(strided.build(config, dtypes), (blocks,), args) for config in configs]


forward = Operation(SPEC, rungs=(dense_choices, table_choices, strided_choices, naive_choices))
of_lists = ListOperation(forward)
