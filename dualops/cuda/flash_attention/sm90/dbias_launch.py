"""dbias on Hopper: which problems the kernel takes, its launches and their tensor maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....spec import ArrayMeta, Problem
from ....spec.attention import broadcast_strides
from ....spec.meta import Strided, contiguous_strides, itemsize
from ...launch.arrays import cdiv
from ...launch.device import Device
from ...launch.maps import Mapped
from ...launch.step import Step
from ...launch.views import by_token
from ..arguments import sizes, variant
from ..options import having
from .arguments import boxed_maps, maps_of
from .bias_tile_scheduler import BiasExtent, Broadcast, pieces_of, visits_of_tile
from .config import SLACK, padded
from .dbias import DbiasConfig, build_dbias, dbias_configs
from .dbias_sums import THREADS, build_dbias_sum

PARTS = "dbias_parts"
NEAR = 8  # neighbours of a row that a thread stores
MOST_VISITS = 2**31 - 1  # numbers of 32 bits


def dbias_choice(problem: Problem, results: Mapping[str, ArrayMeta], device: Device) -> tuple[DbiasConfig | None, str]:
    """Return the Config of a problem that dq's kernel takes, and a description; None and the reason if simt computes
    dbias.
    """
    p = problem
    if "dbias" not in results or not results["dbias"].size:
        return None, ""
    D, Dv = padded(int(p.D)), padded(int(p.Dv))  # numbers, as a kernel is built for them
    options = [option.name for option, _ in having(p).variants]
    for config, reason in dbias_configs(D, Dv, device.shared_memory_per_block - SLACK, options):
        if _visits(p, config) > MOST_VISITS:
            break
        return config, f"; dbias: {reason}"
    return None, "; dbias: on simt"


def shape_of(problem: Problem) -> tuple[Any, ...]:
    """Return the bias's sizes along B, H, Sq and Sk."""
    own = problem.arrays["bias"].shape
    return (*(1 for _ in range(4 - len(own))), *own)


def broadcast_of(problem: Problem) -> Broadcast:
    _, _, Sq, Sk = shape_of(problem)
    return Broadcast(Sq == 1, Sk == 1)


def _tiles(problem: Problem, config: DbiasConfig) -> Any:
    """Return how many tiles one batch of the bias has."""
    _, H, Sq, Sk = shape_of(problem)
    return H * cdiv(Sq, config.block_q) * cdiv(Sk, config.block_kv)


def _visits(problem: Problem, config: DbiasConfig) -> Any:
    p = problem
    tiles = cdiv(p.Sq, config.block_q), cdiv(p.Sk, config.block_kv)
    return visits_of_tile(p.B, p.H, *tiles, shape_of(p), broadcast_of(p))


def _pieces(problem: Problem, config: DbiasConfig) -> Any:
    return pieces_of(_tiles(problem, config), _visits(problem, config))


def _in_vectors(to: ArrayMeta, config: DbiasConfig) -> bool:
    """Return whether all neighbours that a thread stores together are aligned to 16 bytes."""
    *outer, step = to.strides
    apart = (to.pointer, *(stride * itemsize(to.dtype) for stride in outer))
    return (
        step == 1 and to.shape[-1] % NEAR == 0 and config.block_kv % (4 * NEAR) == 0 and not any(x % 16 for x in apart)
    )


def dbias_workspace(problem: Problem, config: DbiasConfig) -> dict[str, ArrayMeta]:
    """Return the parts of sums in float32, if there are several: of pieces, and of each warp if the bias has
    one row.
    """
    p, one, pieces = problem, broadcast_of(problem), _pieces(problem, config)
    if not one.row and pieces == 1:
        return {}
    shape = (pieces * (4 * config.consumers if one.row else 1), *shape_of(p))
    return {PARTS: ArrayMeta(shape, "float32", contiguous_strides(shape), p.arrays["q"].device, 0)}


def dbias_maps(problem: Problem, config: DbiasConfig) -> dict[str, Mapped]:
    """Return the tensor maps of the launch, by names of its own."""
    return boxed_maps(problem, problem.arrays, config.box_lines, "dbias_")


def dbias_steps(problem: Problem, results: Mapping[str, ArrayMeta], config: DbiasConfig) -> Sequence[Step]:
    """Return the launches, after delta's: sums, or their parts and the sums of these."""
    p, one, pieces, shape = problem, broadcast_of(problem), _pieces(problem, config), shape_of(problem)
    metas = {**p.arrays, **results}
    delta = p.arrays["lse"]
    dbias, found = Strided("dbias", (0, *broadcast_strides(results["dbias"]))), dbias_workspace(p, config)
    to, dtype = (Strided(PARTS, found[PARTS].strides), "float32") if found else (dbias, p.dtype)
    statistics = by_token(metas, "lse", False), Strided("delta", contiguous_strides(delta.shape))
    H, group, Sq, Sk, aligned, scale, _, options = sizes(p)
    B_bias, H_bias, Sq_bias, Sk_bias = shape
    extent = BiasExtent(B_bias, H_bias, Sq_bias, Sk_bias, pieces, p.B, H, group, Sq, Sk, aligned)
    args = (maps_of("dbias"), to, *statistics, extent, scale, options)
    blocks, shared_bytes = shape[0] * pieces * _tiles(p, config), config.shared_bytes(padded(p.D), padded(p.Dv))
    vectors = not (one.row or one.column) and _in_vectors(found.get(PARTS, results["dbias"]), config)
    build = build_dbias(config, variant(p), one, dtype, vectors)
    steps = [Step(build, (blocks,), args, shared_bytes, resident=True)]
    if found:
        size, lanes = results["dbias"].size, 32 if one.row or one.column else 1
        args = dbias, to, found[PARTS].shape[0], size, *shape[1:]
        steps.append(Step(build_dbias_sum(p.dtype, lanes), (cdiv(size * lanes, THREADS),), args))
    return steps
