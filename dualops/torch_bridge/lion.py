"""One step of Lion on torch tensors, in place. Semantics: `dualops.spec.lion`; the optimizer: `optim.Lion`.

The torch operator is `dualops::lion_`, which writes to its lists. A call without modes or subclasses goes straight to
the implementation: for a thousand tensors that saves the dispatcher's conversion of lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..spec import ArrayMeta, lion as SPEC
from ..spec.lion import LISTS, bind_list, check_apart, check_lengths
from ..spec.meta import number_meta
from .arguments import DTYPE_NAMES, as_numpy
from .sharding import local_shards
from .ways import transformed, watched

_LIBRARY = torch.library.Library("dualops", "FRAGMENT")
_LIBRARY.define(
    "lion_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momenta, Tensor(c!)[] master, Tensor? lr_array, float lr, "
    "float beta1, float beta2, float weight_decay) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
_PLAIN = {Tensor, torch.nn.Parameter}

Tensors = Tensor | Sequence[Tensor]


@torch.no_grad()
def lion(
    params: Tensors,
    grads: Tensors,
    momenta: Tensors,
    lr: float | Tensor,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    master: Tensors | None = None,
) -> None:
    """One step of Lion: overwrites params, momenta and, if given, master.

        c = beta1 * m + (1 - beta1) * g
        p = p * (1 - lr * weight_decay) - lr * sign(c)
        m = beta2 * m + (1 - beta2) * g

    params: a tensor, or a list of tensors on one device: float64, float32, float16 or bfloat16, of any shape and
    strides. grads, momenta and master: the same number of them. grads: in the params' dtype or in float32; momenta: in
    float32, float16 or bfloat16; master: the params in float32; p is read from it, and params get it rounded.
    With float64 params all are float64. lr: a number or a tensor without axes; a tensor on a CUDA device is read when
    the kernel runs, so a captured CUDA graph can be replayed with another value.

    All dense tensors of one combination of dtypes are one launch. Each operation is rounded by itself, in float32
    (float64 for float64 params): CPU tensors use the NumPy reference, with the same bits. No gradient is recorded, and
    tensors count as modified for autograd. Works under torch.compile and in CUDA graphs.

    Each process steps its own shards of DTensors in place. The DTensors of one parameter must be sharded alike. A
    gradient with other placements, or a Partial sum, is redistributed to the parameter's first.

    Raises ValueError for incompatible lists, shapes, devices or placements and for values out of range, TypeError for
    anything but tensors of these dtypes.

    >>> import torch
    >>> p, m = torch.ones(3), torch.zeros(3)
    >>> lion(p, torch.tensor([5.0, -1.0, 0.0]), m, lr=0.5)
    >>> p
    tensor([0.5000, 1.5000, 1.0000])
    """
    given = zip(LISTS, (params, grads, momenta, () if master is None else master))
    lists = {name: [each] if isinstance(each, Tensor) else each for name, each in given}
    lr_array, number = (lr, 0.0) if isinstance(lr, Tensor) else (None, lr)
    if not torch.compiler.is_dynamo_compiling():
        betas = _checked(lists, number, betas)
        plain = _plain(lists)
        if not plain:
            check_lengths(SPEC.name, {name: each for name, each in lists.items() if name != "master" or each})
            lists = local_shards(SPEC.name, lists)
            plain = _plain(lists)
        if plain and not (watched() or transformed()):
            _run(**lists, lr_array=lr_array, lr=number, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay)
            return
    elif not _plain(lists):
        lists = local_shards(SPEC.name, lists)
    beta1, beta2 = betas
    torch.ops.dualops.lion_(*lists.values(), lr_array, number, beta1, beta2, weight_decay)


def _plain(lists: dict[str, Any]) -> bool:
    """Whether all tensors are torch's own."""
    return {*map(type, chain(*lists.values()))} <= _PLAIN


def _checked(lists: dict[str, Any], lr: Any, betas: Any) -> tuple[float, float]:
    """Return the betas. Raises TypeError for anything but tensors and numbers, before torch raises its own error."""
    for name, each in lists.items():
        if not isinstance(each, (list, tuple)):
            raise TypeError(f"lion: {name} is a {type(each).__name__}, expected a tensor or a list of tensors")
    for name, each in () if _plain(lists) else lists.items():
        for i, tensor in enumerate(each):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"lion: {name}[{i}] is a {type(tensor).__name__}, expected a torch.Tensor")
    number_meta(lr, SPEC.name, "lr", ("float64",))
    return SPEC.normal_params(SPEC.params[:1], {"betas": betas}, SPEC.name)["betas"]


def _run(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    master: Sequence[Tensor],
    lr_array: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """Run the kernels of `dualops.cuda` for CUDA tensors, the reference for CPU tensors."""
    lists = {"params": params, "grads": grads, "momenta": momenta} | ({"master": master} if master else {})
    options = {"betas": (beta1, beta2), "weight_decay": weight_decay}
    rate = lr if lr_array is None else lr_array
    if any(tensor.is_cuda for tensor in params[:1]):
        import_module("dualops.cuda").lion(**lists, lr=rate, **options)
    else:
        _check(params, grads, momenta, master, lr_array, lr, beta1, beta2, weight_decay)
        arrays = {name: [as_numpy(tensor) for tensor in each] for name, each in lists.items()}
        results = reference.lion(**arrays, lr=float(rate), **options)
        for name, values in zip(SPEC.updates.values(), results):
            for array, value in zip(arrays[name], values):
                array[...] = value
    changed = [*params, *momenta, *master]
    try:
        torch.autograd.graph.increment_version(changed)
    except RuntimeError:  # tensors made under inference_mode have no version
        torch.autograd.graph.increment_version([x for x in changed if not x.is_inference()])


def _check(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    master: Sequence[Tensor],
    lr_array: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """Raise the spec's error for a wrong call; for tensors with addresses, also if they share memory."""
    lists = {"params": params, "grads": grads, "momenta": momenta} | ({"master": master} if master else {})
    check_lengths(SPEC.name, lists)
    metas = {name: [_meta(tensor, f"{name}[{i}]") for i, tensor in enumerate(each)] for name, each in lists.items()}
    rate = number_meta(lr, SPEC.name, "lr", ("float64",)) if lr_array is None else _meta(lr_array, "lr")
    if lr_array is not None and lr_array.device.type == "cpu" and lr_array.ndim == 0:
        rate = rate._replace(device="host")
    problems = bind_list(SPEC.name, metas, rate, {"betas": (beta1, beta2), "weight_decay": weight_decay})
    for i, problem in enumerate(problems):
        updates = {result: metas[name][i] for result, name in SPEC.updates.items() if name in metas}
        called = {result: f"{name}[{i}]" for result, name in SPEC.updates.items()}
        SPEC.bind_out(SPEC.name, problem.outputs(), updates, called)
    everything = [meta for each in metas.values() for meta in each]
    if everything and all(meta.pointer for meta in everything if meta.size):
        check_apart(
            SPEC.name,
            [f"{name}[{i}]" for name in metas for i in range(len(params))],
            [int(meta.pointer) for meta in everything],
            [meta.nbytes for meta in everything],
            [name in SPEC.updates.values() for name in metas for _ in params],
        )


def _meta(tensor: Tensor, name: str) -> ArrayMeta:
    if tensor.layout is not torch.strided:
        raise TypeError(f"{SPEC.name}: {name} has layout {tensor.layout}, expected {torch.strided}")
    has_memory = type(tensor) in _PLAIN and tensor.device.type != "meta"
    pointer = tensor.data_ptr() if has_memory else 0
    return ArrayMeta(tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], tensor.stride(), str(tensor.device), pointer)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("lion_", _run, _key)
torch.library.register_fake("dualops::lion_", _check, lib=_LIBRARY)
