"""Block masks: which tiles of keys a tile of queries needs. Dong et al. 2024, arXiv:2412.05496.

A mask_mod decides about one pair. A block mask is computed from it once and describes tiles of TILE queries and TILE
keys: keys without a visible pair need not be loaded, and the function is not called where all pairs are visible. It is
an array of int32,

    lists [B or 1, H or 1, tiles of queries, 1 + tiles of keys]

Each row belongs to a tile of queries. It begins with the number of tiles of keys that some of these queries see,
followed by these tiles in order: twice the tile's number, plus 1 if all of its pairs are visible. The rest of the row
is 0. Pairs beyond the last query or key do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from ..base import Cost, Input, Output, Param, Problem, Role, Spec, standard_normal
from ..domains import length
from ..meta import FLOATS, ArrayMeta, Strided
from .function import UserFunction, function_of
from .option import Option, Parts, Verbs

TILE = 128  # queries, and keys
EMPTY, MIXED, FULL = 0, 1, 2  # none, some or all pairs of a tile are visible


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class BlockMask:
    """The result of `block_mask`: pass it to `flash_attention` together with its mask_mod.

    mask_mod: the function, with the values that it read when the mask was made. B, H: 1 if all batches or heads share
    the mask. lists: the array of int32, of the library and on the device of `like`. Do not write to it.
    """

    mask_mod: UserFunction
    B: int
    H: int
    Sq: int
    Sk: int
    lists: Any

    def __repr__(self) -> str:
        return f"BlockMask({self.mask_mod!r}, B={self.B}, H={self.H}, Sq={self.Sq}, Sk={self.Sk})"


_kept: WeakValueDictionary[Hashable, BlockMask] = WeakValueDictionary()


def kept(mask_mod: Any, sizes: tuple[int, ...], place: Hashable, lists: Callable[[], Any]) -> BlockMask:
    """Return the block mask of a function, sizes (B, H, Sq, Sk) and a place: an existing one that is still in use, or a
    new one.

    lists: a function that makes its array, or raises the spec's error.
    """
    key = (mask_mod, *sizes, place)
    try:
        found = _kept.get(key)
    except TypeError:  # not a function, and not hashable
        found = None
    if found is None:
        made, (B, H, Sq, Sk) = lists(), sizes
        found = _kept[key] = BlockMask(mask_mod, B, H, Sq, Sk, made)
    return found


def sizes_of(B: int | None, H: int | None, Sq: int, Sk: int) -> tuple[int, int, int, int]:
    """Return the sizes of a block mask; 1 for batches or heads that share the mask."""
    return 1 if B is None else B, 1 if H is None else H, Sq, Sk


def lists_of(op: str, block_mask: Any, mask_mod: Any, q: Any = None, k: Any = None) -> Any:
    """Return the array of a BlockMask. Raises ValueError if it was made for another function, or other sizes.

    Anything else is returned unchanged: `Spec.bind` accepts the bare array and None, or refuses it.
    """
    if not isinstance(block_mask, BlockMask):
        return block_mask
    own = block_mask.mask_mod
    if isinstance(mask_mod, UserFunction) and mask_mod != own:
        raise ValueError(f"{op}: block_mask was made of {own!r}, mask_mod is {mask_mod!r}, expected the same function")
    for name, array, axis, size in (("q", q, "Sq", block_mask.Sq), ("k", k, "Sk", block_mask.Sk)):
        shape = getattr(array, "shape", ())
        if len(shape) == 4 and shape[2] != size:
            raise ValueError(f"{op}: block_mask was made for {axis}={size}, {name} has {axis}={shape[2]}")
    return block_mask.lists


# --- the option ---------------------------------------------------------------------------------------


class Args(NamedTuple):
    lists: Any  # by batch, head and tile of queries


def make(v: Verbs, facts: Any) -> Parts:
    return Parts()  # scores are unchanged; a kernel that uses the lists finds them by the option's name


def args(problem: Problem) -> Args:
    lists = problem.arrays["block_mask"]
    return Args(Strided("block_mask", tuple(0 if n == 1 else step for n, step in zip(lists.shape[:3], lists.strides))))


def tiles_of(count: Any) -> Any:
    """Return the number of tiles of this many queries or keys."""
    return (count + (TILE - 1)) // TILE


def check(op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]) -> None:
    if (lists := arrays.get("block_mask")) is None:
        return
    if params["mask_mod"] is None:
        raise ValueError(f"{op}: block_mask is given without mask_mod, expected the function that it was made of")
    tiles = (tiles_of(sizes["Sq"]), 1 + tiles_of(sizes["Sk"]))
    fits = len(lists.shape) == 4 and lists.shape[2:] == tiles
    if not fits or any(own not in (1, sizes[axis]) for own, axis in zip(lists.shape, ("B", "H"))):
        raise ValueError(
            f"{op}: block_mask has shape {lists.shape}, expected [{sizes['B']} or 1, {sizes['H']} or 1, "
            f"{tiles[0]}, {tiles[1]}], for tiles of {TILE} queries and keys"
        )


BLOCKS = Option(
    "block_mask",
    inputs=(
        Input(
            "block_mask",
            None,
            ("int32",),
            optional=True,
            contiguous_last=True,
            role=Role.OTHER,
            doc="the result of `block_mask` for mask_mod: hidden tiles are not loaded",
        ),
    ),
    params=(),
    variant=lambda problem: problem.dtype_of("block_mask"),
    args=args,
    make=make,
    check=check,
)


# --- the lists ----------------------------------------------------------------------------------------


def made_of(sees: Callable[..., Any], B: int, H: int, Sq: int, Sk: int) -> np.ndarray:
    """Build the lists from a function of arrays (b, h, i, j), which broadcast together, to truth values."""
    b, h = np.arange(B)[:, None, None, None], np.arange(H)[:, None, None]
    states = np.zeros((B, H, tiles_of(Sq), tiles_of(Sk)), np.int32)
    for m, n in np.ndindex(states.shape[2:]):
        i, j = (np.arange(TILE * at, min(TILE * at + TILE, end)) for at, end in ((m, Sq), (n, Sk)))
        seen = np.broadcast_to(sees(b, h, i[:, None], j), (B, H, len(i), len(j)))
        states[:, :, m, n] = seen.any(axis=(2, 3)) + np.int32(seen.all(axis=(2, 3)))
    return listed(states)


def listed(states: np.ndarray) -> np.ndarray:
    """Build the lists from EMPTY, MIXED or FULL of each tile [B, H, tiles of queries, tiles of keys]."""
    count = (states != EMPTY).sum(axis=-1, keepdims=True, dtype=np.int32)
    numbers = np.argsort(states == EMPTY, axis=-1, kind="stable").astype(np.int32)  # tiles in the list come first
    entries = 2 * numbers + (np.take_along_axis(states, numbers, axis=-1) == FULL)
    entries[np.arange(states.shape[-1]) >= count] = 0
    return np.concatenate([count, entries], axis=-1).astype(np.int32)


def _measure(op: str, arrays: dict[str, ArrayMeta], params: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    return {"q_tiles": tiles_of(params["Sq"]), "kv_tiles": tiles_of(params["Sk"])}


# binds a call that makes lists; not an operator by itself
SPEC_BLOCKS = Spec(
    name="block_mask",
    formula="lists of the tiles of keys with a visible pair",
    paper="Dong et al. 2024, arXiv:2412.05496",
    inputs=(Input("like", None, FLOATS, doc="an array of the library and on the device of the lists"),),
    params=(
        Param("mask_mod", None, function_of("b", "h", "i", "j"), "(b, h, i, j) -> whether i sees j"),
        Param("B", 1, length, "batches, 1 if all have the same mask"),
        Param("H", 1, length, "heads, 1 if all have the same mask"),
        Param("Sq", 0, length, "queries"),
        Param("Sk", 0, length, "keys"),
    ),
    outputs=(
        Output(
            "lists", lambda p: (p.B, p.H, p.q_tiles, 1 + p.kv_tiles), lambda p: "int32", like="like", row_major=True
        ),
    ),
    gradient_inputs=(),
    gradients=(),
    saved=(),
    measure=_measure,
    forward_cost=Cost(lambda p: 0, lambda p: 0, lambda p: p.nbytes("lists")),
    backward_cost=None,
    rounding="nowhere",
    floor=0.0,
    rungs=("simt",),
    cases=(),
    generate=standard_normal,
    parent="flash_attention",
    exact=True,
)
