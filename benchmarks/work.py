"""What a case asks of a device: operations and bytes, and the rate that a time of it comes to."""

from __future__ import annotations

from typing import NamedTuple

from .tree import spec

DIRECTIONS = ("forward", "backward")
# Flops a byte from which a case is quoted in TFLOP/s. Row operators have a handful and attention over more than a few
# keys has hundreds; an H200 balances at 12 in float32 and near 200 in bfloat16.
INTENSE = 32


def bind(operator: spec.Spec, case: spec.Case, device: str = "cuda:0") -> spec.Problem:
    """The problem of a case with contiguous inputs of the case's dtype, as yet without memory."""
    strides = spec.base.contiguous_strides
    metas = {name: spec.ArrayMeta(shape, case.dtype, strides(shape), device, 0) for name, shape in case.shapes.items()}
    return operator.bind(metas, case.params)


def directions(operator: spec.Spec) -> tuple[str, ...]:
    """("forward", "backward"), or ("forward",) of an operator without a gradient."""
    return DIRECTIONS if operator.backward_cost is not None else DIRECTIONS[:1]


class Work(NamedTuple):
    """The least that a direction of a case must do."""

    flops: int
    bytes_read: int
    bytes_written: int

    @classmethod
    def of(cls, operator: spec.Spec, case: spec.Case, direction: str) -> Work:
        """Raises NotImplementedError for the backward direction of an operator without one."""
        cost = operator.forward_cost if direction == "forward" else operator.backward_cost
        if cost is None:
            raise NotImplementedError(f"{operator.name} has no {direction}")
        problem = bind(operator, case)
        return cls(cost.flops(problem), cost.bytes_read(problem), cost.bytes_written(problem))

    @property
    def nbytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def unit(self) -> str:
        return "TFLOP/s" if self.flops > INTENSE * self.nbytes else "TB/s"

    def rate(self, seconds: float) -> float:
        """In `unit`."""
        return (self.flops if self.unit == "TFLOP/s" else self.nbytes) / seconds / 1e12
