"""Block masks in NumPy, tile by tile. The format: `dualops/spec/attention/blocks.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..spec import ArrayMeta
from ..spec.attention import SPEC_BLOCKS as SPEC, BlockMask, as_they_are
from ..spec.attention.blocks import kept, made_of, sizes_of
from ._functions import elementwise


def block_mask(
    mask_mod: Callable[..., Any], B: int | None, H: int | None, Sq: int, Sk: int, *, like: np.ndarray | None = None
) -> BlockMask:
    """Build the block mask of a mask_mod: which tiles of 128 x 128 (query, key) it hides, cuts and shows.

    mask_mod: (b, h, i, j) -> whether query i sees key j. B, H: batches and heads that it distinguishes; None or 1 if
    they are all alike, and it is then called with number 0. Sq, Sk: queries and keys. like: an array of the library
    that the mask is for; here only NumPy.
    Returns a BlockMask, to be passed to `flash_attention` together with the function. Its `lists` [B, H, tiles of
    queries, 1 + tiles of keys] of int32 say how many tiles of keys to visit, and which. Raises TypeError and ValueError
    for a wrong call.
    """
    _, mask_mod = as_they_are(None, mask_mod)
    sizes = sizes_of(B, H, Sq, Sk)
    return kept(mask_mod, sizes, "numpy", lambda: _lists(mask_mod, sizes, like))


def _lists(mask_mod: Any, sizes: tuple[int, ...], like: Any) -> np.ndarray:
    any_array = np.empty(0) if like is None else like
    if not isinstance(any_array, np.ndarray):
        raise TypeError(f"{SPEC.name}: like is a {type(like).__name__}, expected a numpy.ndarray")
    names = ("mask_mod", "B", "H", "Sq", "Sk")
    p = SPEC.bind({"like": ArrayMeta.of_numpy(any_array)}, dict(zip(names, (mask_mod, *sizes))))
    lists = made_of(elementwise(p.mask_mod, np.asarray), p.B, p.H, p.Sq, p.Sk)
    lists.flags.writeable = False
    return lists
