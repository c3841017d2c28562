"""DTensors: tensors that several processes share, `torch.distributed.tensor`. Rules for sharding.

An operator has rules (`RULES`): which axes of its arrays may be sharded, each together with the same axis of all other
arrays. An array without that axis is whole in each process. A result without it is a sum over processes, `Partial`:

    norms           every axis except the normalised one; w and b are whole, dw and db Partial
    softmax         every axis except that of the softmax
    matmul          rows and batches of a, columns of b and bias. The axis that is summed over makes y Partial, if no
                    bias and no activation follows the sum; da, db and dbias are Partial if they lack the axis
    rope            batch, heads of q, heads of k; tokens, if the tables have a row for each of them
    rope_tables     every axis of the positions
    attention       batch; heads of q, k and v, and with them alibi_slopes and sinks: each process gets whole groups of
                    q's heads with the shared head of k and v. A single head of k and v stays whole, and dk and dv are
                    Partial. Varlen: only heads
    retention       batch; heads, if gamma, log_decay or mask is given. Varlen: only heads

A head or a batch whose number a user's function or dropout uses is not sharded: each process would count from 0.
DTensor redistributes other shardings (attention's sequence, for example) before the call, if necessary to whole arrays.
Ulysses is a redistribution by the caller: of q, k and v from tokens to heads, and of o back.

A Partial gradient is rounded to its dtype in each process, and then summed. All else has the bits of one process.

`lion` is different: it steps the shards of this process in place (`local_shards`).

A DTensor exists only after torch.distributed.tensor was imported. Nothing here imports it before: the bridge works with
a torch that was built without it, and plain tensors cost nothing. The first call that reaches torch's dispatcher after
the import registers the rules (`offer`).
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..spec.attention import UserFunction
from .compiled import constant

if TYPE_CHECKING:
    from .interop import Direction

Shape = tuple[int, ...]
Label = int | str | None  # of an axis; None: never sharded
TENSOR = "torch.distributed.tensor"


class Split(NamedTuple):
    """Axes that are sharded together, by their labels, and results without them that are the same in each process."""

    labels: tuple[Label, ...]
    whole: tuple[str, ...] = ()


class Call(NamedTuple):
    """Shapes of the given tensors, the parameters, and the spec's axes."""

    shapes: dict[str, Shape]
    params: dict[str, Any]
    axes: dict[str, tuple[Label, ...]]  # axes that depend on the call: the rule fills them in


Rule = Callable[[Call], Iterator[Split]]


# --- one rule per operator ------------------------------------------------------------------------------


def _norm(call: Call) -> Iterator[Split]:
    rows: tuple[Label, ...] = tuple(range(len(call.shapes["x"]) - 1))
    call.axes.update(dict.fromkeys(("x", "residual", "summed", "dy"), (*rows, "N")))
    call.axes.update(dict.fromkeys(("mean", "rstd"), rows))
    yield from (Split((row,)) for row in rows)


def _softmax(call: Call) -> Iterator[Split]:
    rank = len(next(iter(call.shapes.values())))
    call.axes.update(dict.fromkeys(("x", "y"), tuple(range(rank))))
    yield from (Split((axis,)) for axis in range(rank) if axis != call.params["axis"] % rank)


def _matmul(call: Call) -> Iterator[Split]:
    a, b, params = call.shapes["a"], call.shapes["b"], call.params
    rank = max(len(a), len(b)) - 2
    batch = tuple(max(_aligned(shape[:-2], rank)[axis] for shape in (a, b)) for axis in range(rank))

    def axes(shape: Shape, *last: Label) -> tuple[Label, ...]:
        return (*_broadcast(shape[:-2], tuple(range(rank))), *last)

    call.axes["a"] = axes(a, *(("K", "M") if params["transpose_a"] else ("M", "K")))
    call.axes["b"] = axes(b, *(("N", "K") if params["transpose_b"] else ("K", "N")))
    call.axes.update(dict.fromkeys(("y", "preactivation"), axes((*batch, 0, 0), "M", "N")))
    yield from (Split((label,)) for label in (*range(rank), "M", "N"))
    if "dy" in call.shapes:
        yield Split(("K",), whole=("dbias",))
    elif "bias" not in call.shapes and params["activation"] is None:
        yield Split(("K",))


def _rope(call: Call) -> Iterator[Split]:
    B, _, S, _ = next(iter(call.shapes.values()))
    cos, positions = call.shapes["cos"], call.shapes.get("positions")
    by_token = positions is not None or len(cos) == 3 or cos[0] == S
    in_order = "S" if positions is None else None
    table = ("B" if cos[0] == B else None, "S", None) if len(cos) == 3 else (in_order, None)
    call.axes.update({"cos": table, "sin": table})
    if positions is not None:
        call.axes["positions"] = ("B", "S")[-len(positions) :]
    yield from (
        Split(("B",)),
        Split(("H", "Hkv")),
        Split(("H",), ("k_rotated", "dk")),
        Split(("Hkv",), ("q_rotated", "dq")),
    )
    if by_token:
        yield Split(("S",))


def _rope_tables(call: Call) -> Iterator[Split]:
    tokens = tuple(range(len(call.shapes["positions"])))
    call.axes.update({"positions": tokens, "cos": (*tokens, None), "sin": (*tokens, None)})
    yield from (Split((axis,)) for axis in tokens)


def _attention(call: Call) -> Iterator[Split]:
    full, shapes = ("B", "H", "Sq", "Sk"), call.shapes
    if "bias" in shapes:
        call.axes["bias"] = _broadcast(shapes["bias"], full)
    if "block_mask" in shapes:
        call.axes["block_mask"] = (
            *_broadcast(shapes["block_mask"][:2], full[:2]),
            *(None,) * (len(shapes["block_mask"]) - 2),
        )
    counted = _counted(call.params)
    if "cu_seqlens_q" not in shapes and "b" not in counted:
        yield Split(("B",))
    if "h" not in counted:
        yield Split(("H",) if _heads(call) == 1 else ("H", "Hkv"))


def _retention(call: Call) -> Iterator[Split]:
    if "cu_seqlens" not in call.shapes:
        yield Split(("B",))
    if call.shapes.keys() & {"gamma", "log_decay", "mask"}:  # without them a head's number determines its decay
        yield Split(("H",))


RULES: dict[str, Rule] = {
    "rms_norm": _norm,
    "layer_norm": _norm,
    "softmax": _softmax,
    "matmul": _matmul,
    "rope": _rope,
    "rope_tables": _rope_tables,
    "flash_attention": _attention,
    "flash_attention_varlen": _attention,
    "retention": _retention,
    "retention_varlen": _retention,
}


def _aligned(shape: Shape, rank: int) -> Shape:
    return (1,) * (rank - len(shape)) + shape


def _broadcast(shape: Shape, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    """Return labels of a shape that broadcasts to axes with these labels: axes of size 1 are not sharded."""
    return tuple(None if size == 1 else label for size, label in zip(reversed(shape), reversed(labels)))[::-1]


def _heads(call: Call) -> int:
    """Count the heads of k and v."""
    return call.shapes["k"][call.axes["k"].index("Hkv")]


def _counted(params: Mapping[str, Any]) -> set[str]:
    """Return which of b and h, the numbers of batch and head, change the result."""
    score, mask = params["score_mod"], params["mask_mod"]
    if params["dropout_p"] or not all(isinstance(each, UserFunction | None) for each in (score, mask)):
        return {"b", "h"}
    functions = [mask] if score is None else [mask, score, score.derivative]
    return set().union(*(_read(function) for function in functions if function is not None))


def _read(user: UserFunction) -> set[str]:
    """Return which of b and h a user's function reads."""
    code = user.function.__code__
    names = dict(zip(code.co_varnames[: code.co_argcount], user.parameters))
    if len(names) < len(user.parameters):  # the remaining ones are a tuple
        return {"b", "h"}
    loaded = set(code.co_cellvars)
    for step in dis.get_instructions(code):
        if "LOAD" in step.opname:
            loaded |= set(step.argval) if isinstance(step.argval, tuple) else {step.argval}
    return {names[name] for name in names if name in loaded} & {"b", "h"}


# --- calls by DTensor -----------------------------------------------------------------------------------

_waiting: list[Direction] = []  # directions of operators without rules in DTensor


def add(direction: Direction) -> None:
    """Add forward and backward of an operator, when its schema is defined."""
    if direction.spec.name in RULES:
        _waiting.append(direction)


@constant
def offer() -> None:
    """Register the rules with DTensor, if possible.

    A torch whose DTensor has other internal names gets no rules: its DTensors report an operator without a rule, and
    calls with plain tensors go on.
    """
    if _waiting and TENSOR in sys.modules:
        waiting, _waiting[:] = list(_waiting), []
        with suppress(AttributeError, ImportError, TypeError):
            for direction in waiting:
                _register(direction)


def _register(direction: Direction) -> None:
    experimental, schema = import_module(f"{TENSOR}.experimental"), import_module(f"{TENSOR}._op_schema")
    propagator = sys.modules[TENSOR].DTensor._op_dispatcher.sharding_propagator
    overload: Any = direction.overload
    experimental.register_sharding(overload)(lambda *args: _placements(direction, direction.decode(args)))
    strategies = propagator.op_strategy_funcs[overload]
    if direction.spec.name.startswith("flash_attention"):
        strategies = _in_whole_groups(direction, strategies)
    # register_sharding assumes that rules depend on no parameters except integers, and not on missing tensors: DTensor
    # would reuse the result of one call for another with the same tensors
    propagator.register_op_strategy(overload, strategies, schema.RuntimeSchemaInfo(0, None, needs_pytree=True))


def _placements(direction: Direction, args: tuple[Any, ...]) -> list[tuple[list[Any], list[Any]]]:
    """Return the placements of results and arguments along one axis of a mesh that an operator can work with."""
    module = sys.modules[TENSOR]
    tensors, params = direction.split(args)
    having = direction.having(args)
    spec = direction.spec
    axes: dict[str, Any] = {wanted.name: wanted.axes or () for wanted in (*spec.inputs, *spec.gradient_inputs)}
    call = Call({name: tuple(x.shape) for name, x in tensors.items()}, params, axes)
    splits = [Split(()), *RULES[spec.name](call)]

    def labels(name: str) -> tuple[Label, ...]:
        """Return the labels of an array's axes: a gradient has those of its array, a result those of its gradient."""
        return axes.get(name) or axes.get(name.removeprefix("d")) or axes.get(f"d{name}") or ()

    def shard(name: str, split: Split, otherwise: Any) -> Any:
        places = [place for place, label in enumerate(labels(name)) if label is not None and label in split.labels]
        return module.Shard(places[0]) if places else otherwise

    def result(name: str, has: bool, split: Split) -> Any:
        if not has or not split.labels or name in split.whole:
            return shard(name, split, module.Replicate()) if has else module.Replicate()
        return shard(name, split, module.Partial("sum"))

    return [
        (
            [result(output.name, has, split) for output, has in zip(direction.outputs, having, strict=True)],
            [
                None if value is None else shard(wanted.name, split, module.Replicate())
                for wanted, value in zip(direction.inputs, args)
            ]
            + [None] * len(direction.params),
        )
        for split in splits
    ]


def _in_whole_groups(direction: Direction, strategies: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the strategies that give each process whole groups of q's heads, with their head of k and v."""
    (axis,) = {wanted.axes.index("H") for wanted in direction.inputs if wanted.name == "q" and wanted.axes}

    def whole(heads: int, k: Any) -> bool:
        parts = prod(k.mesh.size(dim) for dim, placement in enumerate(k.placements) if placement.is_shard(axis))
        return heads % parts == 0

    def found(op_schema: Any) -> Any:
        every = strategies(op_schema)
        H, Hkv = (strategy.shape[axis] for strategy in op_schema.args_schema[:2])
        if Hkv != H:
            every.strategies = [each for each in every.strategies if whole(Hkv, each.input_specs[1])]
        return every

    return found


def local_shards(op: str, lists: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    """Return the lists of parameters and related tensors, with this process's shard in place of each DTensor.

    Shards are the DTensors' own memory, and all except gradients count as modified for autograd. A gradient with other
    placements than its parameter is redistributed, by communication. Raises TypeError if some of a parameter's tensors
    are DTensors and others are not; ValueError if momentum or master have other placements, and for a Partial
    parameter, whose values are a sum that no process has.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return {name: list(each) for name, each in lists.items()}
    DTensor = module.DTensor
    params: Sequence[Any] = lists["params"]
    for i, first in enumerate(params):
        if isinstance(first, DTensor) and any(placement.is_partial() for placement in first.placements):
            raise ValueError(f"{op}: params[{i}] has placements {_text(first)}, expected Shard or Replicate")

    def local(name: str, i: int, tensor: Any) -> Tensor:
        first = params[i]
        if isinstance(tensor, DTensor) != isinstance(first, DTensor):
            kinds = [type(each).__name__ for each in (tensor, first)]
            raise TypeError(f"{op}: {name}[{i}] is a {kinds[0]}, params[{i}] is a {kinds[1]}, expected the same")
        if not isinstance(tensor, DTensor):
            return tensor
        if tensor.device_mesh != first.device_mesh:
            raise ValueError(
                f"{op}: {name}[{i}] is on {tensor.device_mesh}, params[{i}] is on {first.device_mesh}, "
                "expected the same"
            )
        if tensor.shape != first.shape:
            raise ValueError(
                f"{op}: {name}[{i}] has shape {tuple(tensor.shape)}, params[{i}] has shape {tuple(first.shape)}, "
                "expected the same"
            )
        if tensor.placements != first.placements:
            if name != "grads":
                raise ValueError(
                    f"{op}: {name}[{i}] has placements {_text(tensor)}, params[{i}] has {_text(first)}, "
                    "expected the same"
                )
            tensor = tensor.redistribute(placements=first.placements)
        if name != "grads" and not torch.compiler.is_dynamo_compiling() and not tensor.is_inference():
            increment_version(tensor)
        shard = tensor.to_local()
        wait = getattr(shard, "wait", None)  # a gradient may still be in transit
        return shard if wait is None else wait()

    return {name: [local(name, i, tensor) for i, tensor in enumerate(each)] for name, each in lists.items()}


def _text(tensor: Any) -> str:
    return ", ".join(map(str, tensor.placements))
