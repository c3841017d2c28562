"""The argument records of attention's sm90 kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ....spec import ArrayMeta, Problem
from ...compiler.backend import f32, i32, i64, pointer, tensor_map, types
from ...launch.device import Device
from ...launch.tensor_map import Mapped
from ...launch.views import boxed, by_token, how_stored
from ...tile.warpgroup import INSTRUCTION_TYPES, ROWS
from ..arguments import Variant, array_type, has_usual_scale, is_varlen
from .bias import bias_map
from .config import BOX


class Maps(NamedTuple):
    """Tensor maps of the arrays that a gradient loads."""

    q: Any
    do: Any
    k: Any
    v: Any


class KeysTo(NamedTuple):
    """Where dk and dv go: tensor maps, 0 if threads store the rows (`output`), and arrays (`by_token`)."""

    dk_map: Any
    dv_map: Any
    dk: Any
    dv: Any


class ForwardMaps(NamedTuple):
    """Tensor maps of the arrays that forward loads."""

    q: Any
    k: Any
    v: Any


class OutputTo(NamedTuple):
    """Where o and lse go."""

    o_map: Any  # 0 if threads store the rows (`output`)
    o: Any  # along batch, head and token (`by_token`); results of splits along split, too
    lse: Any
    kept: Any  # a pointer if the Config is serial (`split_kv`), otherwise ()


class QueriesTo(NamedTuple):
    """Where dq goes: its tensor map, 0 if threads store the rows (`output`), and the array (`by_token`)."""

    dq_map: Any
    dq: Any


class Sums(NamedTuple):
    """dq in float32, as the fused kernel adds it."""

    data: Any  # fragment after fragment of a tile, tile after tile of a head
    flags: Any  # zeros at first: a counter, then a flag for each tile
    tiles: Any  # of queries of a head, in a batch or, for varlen, in all sequences


FORWARD_MAPS_TYPE = types.NamedUniTuple(tensor_map, len(ForwardMaps._fields), ForwardMaps)
MAPS_TYPE = types.NamedUniTuple(tensor_map, len(Maps._fields), Maps)
SUMS_TYPE = types.NamedTuple((pointer(f32), pointer(i64), i32), Sums)


def serves(problem: Problem, device: Device, metas: Mapping[str, ArrayMeta], names: Sequence[str]) -> bool:
    """Return whether the rung's kernels for 16 bits can compute a problem. names: of arrays that they copy as boxes."""
    p = problem
    if p.dtype not in INSTRUCTION_TYPES or not device.has_wgmma or not has_usual_scale(p):
        return False
    return all(boxed(metas, name, is_varlen(p)) is not None for name in names)


def maps_of(kernel: str) -> Maps:
    """Return the names of the maps of this kernel's launch."""
    return Maps(*(f"{kernel}_{name}_map" for name in Maps._fields))


def boxed_maps(
    problem: Problem, metas: Mapping[str, ArrayMeta], lines: Mapping[str, int], prefix: str = ""
) -> dict[str, Mapped]:
    """Return the tensor maps of arrays that are copied as boxes. lines: of a box of each array."""
    found = [each for name in lines if (each := boxed(metas, name, is_varlen(problem)))]
    return {
        f"{prefix}{each.name}_map": Mapped(
            each.name, problem.dtype, each.shape, each.strides, (1, 1, lines[each.name], BOX)
        )
        for each in found
    }


def lines_of(config: Any) -> dict[str, int]:
    """Return the lines of a box of each array that a gradient's kernel loads."""
    return {"q": config.block_q, "do": config.block_q, "k": config.block_kv, "v": config.block_kv}


def gradient_maps(
    problem: Problem, metas: Mapping[str, ArrayMeta], config: Any, kernel: str, results: Sequence[str]
) -> dict[str, Mapped]:
    """Return the tensor maps of a gradient's launch, by names of its own. metas: of the problem's arrays and
    results.
    """
    stored = {name: ROWS for name in results if how_stored(metas, name, is_varlen(problem)) == "boxes"}
    maps = boxed_maps(problem, metas, lines_of(config) | stored, f"{kernel}_")
    return maps | {f"{kernel}_bias_map": bias_map(problem, config.bias)} if config.bias else maps


def map_type(stored: str) -> Any:
    """Return the type of a result's map. stored: how the result gets to memory (`output`)."""
    return tensor_map if stored == "boxes" else i64


def keys_to(problem: Problem, metas: Mapping[str, ArrayMeta], stored: Mapping[str, str], kernel: str) -> KeysTo:
    """Return where a kernel's launch stores dk and dv. stored: how each gets to memory (`output`)."""
    maps = (f"{kernel}_{name}_map" if stored[name] == "boxes" else 0 for name in ("dk", "dv"))
    return KeysTo(*maps, *(by_token(metas, name, is_varlen(problem)) for name in ("dk", "dv")))


def keys_to_type(found: Variant, dk_stored: str, dv_stored: str) -> Any:
    """Return the type of `KeysTo`."""
    return types.NamedTuple((map_type(dk_stored), map_type(dv_stored), *[array_type(found)] * 2), KeysTo)


def queries_to(problem: Problem, metas: Mapping[str, ArrayMeta], stored: str, kernel: str) -> QueriesTo:
    """Return where a kernel's launch stores dq. stored: how it gets to memory (`output`)."""
    return QueriesTo(f"{kernel}_dq_map" if stored == "boxes" else 0, by_token(metas, "dq", is_varlen(problem)))


def queries_to_type(found: Variant, stored: str) -> Any:
    """Return the type of `QueriesTo`."""
    return types.NamedTuple((map_type(stored), array_type(found)), QueriesTo)
