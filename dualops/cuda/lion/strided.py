"""Lion on arrays of any layout, one thread per element: fused, or in two launches, one per formula (the rung naive).

Element number i of the tensor is at i3 * s3 + i2 * s2 + i1 * s1 + i0 * s0 in each array, with that array's strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..compiler.backend import Kernel, builds, cuda, i64, kernel, types, verb
from ..tile.storage import storage
from .formula import ROLES, Arrays, Dtypes, arrays_type, by_role, rate_types, steps

MOST_AXES = 4  # most strides of an array, after neighbouring axes are merged


@dataclass(frozen=True)
class StridedConfig:
    """The work of a launch, in blocks of `threads` threads."""

    threads: int = 256
    params: bool = True  # whether it writes params and master
    momenta: bool = True  # whether it writes momenta


@verb
def place(i, sizes, strides):
    """Return the index of element number i."""
    inner, rest = i % sizes[3], i // sizes[3]
    at = inner * strides[3] + rest % sizes[2] * strides[2]
    rest = rest // sizes[2]
    return at + rest % sizes[1] * strides[1] + rest // sizes[1] * strides[0]


@builds
def build(config: StridedConfig, dtypes: Dtypes) -> Kernel:
    """Build lion_strided(tensor, lr, rates, N, sizes, strides). tensor: Arrays; strides: Arrays of their strides."""
    mem, lion = by_role(storage, dtypes), steps(dtypes.number)
    four: Any = types.UniTuple(i64, MOST_AXES)
    strides_type = types.NamedUniTuple(four, len(ROLES), Arrays)

    @kernel(arrays_type(dtypes), *rate_types(dtypes), i64, four, strides_type, threads=config.threads)
    def lion_strided(tensor, lr, rates, N, sizes, strides):
        i = i64(cuda.blockIdx.x) * config.threads + cuda.threadIdx.x
        if i < N:
            p = mem.source.load(tensor.source, place(i, sizes, strides.source))
            g = mem.grads.load(tensor.grads, place(i, sizes, strides.grads))
            m = mem.momenta.load(tensor.momenta, place(i, sizes, strides.momenta))
            p_new, m_new = lion.step(p, g, m, lion.rate(lr), rates)
            if config.params:
                mem.params.store(tensor.new_params, place(i, sizes, strides.new_params), p_new)
                if dtypes.master:
                    mem.master.store(tensor.new_master, place(i, sizes, strides.new_master), p_new)
            if config.momenta:
                mem.momenta.store(tensor.new_momenta, place(i, sizes, strides.new_momenta), m_new)

    return lion_strided
