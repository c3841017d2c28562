"""A dense bias, added to the scores. Its gradient is the scores', summed over the axes that it is broadcast on."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..base import Input, Problem
from ..meta import ArrayMeta, Strided, itemsize
from .option import Option, Parts, Verbs

AXES = ("B", "H", "Sq", "Sk")


class Args(NamedTuple):
    bias: Any


def make(v: Verbs, facts: tuple[str, str]) -> Parts:
    read = v.reader_at(*facts)

    @v.verb
    def score(score, args, at):
        return score + read(args.bias, at)

    if v.fetcher is None or facts[1] != "pairs":
        return Parts(score=score, reads=True)
    fetch_pair, one_of_pair = v.fetcher(facts[0])

    @v.verb
    def fetch(args, at):
        return fetch_pair(args.bias, at)

    @v.verb
    def fetched(score, args, pair, odd):
        return score + one_of_pair(pair, odd)

    return Parts(score=score, reads=True, fetch=fetch, fetched=fetched)


def order(bias: ArrayMeta) -> str:
    """Classify the layout of a bias's rows: "pairs" of two neighbours at multiples of 4 bytes, "near" one another, or
    any.
    """
    *outer, step = broadcast_strides(bias)
    if step != 1:
        return ""
    paired = itemsize(bias.dtype) == 2 and bias.pointer % 4 == 0 and bias.shape[-1] % 2 == 0
    return "pairs" if paired and all(stride % 2 == 0 for stride in outer) else "near"


def variant(problem: Problem) -> tuple[str, str] | None:
    bias = problem.arrays.get("bias")
    return None if bias is None else (bias.dtype, order(bias))


def broadcast_strides(bias: ArrayMeta) -> tuple[int, ...]:
    """Return strides along B, H, Sq and Sk: 0 along an axis that is missing or of size 1."""
    own = [0 if size == 1 else stride for size, stride in zip(bias.shape, bias.strides, strict=True)]
    return (*(0 for _ in range(4 - len(own))), *own)


def check(op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]) -> None:
    if (bias := arrays.get("bias")) is None:
        return
    full = tuple(sizes[axis] for axis in AXES)
    own = (*(1 for _ in range(4 - len(bias.shape))), *bias.shape)
    if len(own) != 4 or any(mine not in (1, size) for mine, size in zip(own, full)):
        raise ValueError(
            f"{op}: bias has shape {bias.shape}, expected one that broadcasts to [{', '.join(AXES)}] = {full}"
        )


BIAS = Option(
    "bias",
    inputs=(Input("bias", None, optional=True, doc="added, of any shape that broadcasts to [B, H, Sq, Sk]"),),
    params=(),
    variant=variant,
    args=lambda problem: Args(Strided("bias", broadcast_strides(problem.arrays["bias"]))),
    make=make,
    check=check,
)
