"""The options of attention: one record per option, each in its own file. `option.py` defines such a record, `chain.py`
composes several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypedDict, TypeVar

from .alibi import ALIBI
from .band import BAND, band
from .bias import BIAS, broadcast_strides
from .blocks import BLOCKS, SPEC_BLOCKS, BlockMask, lists_of
from .chain import Chain, compose
from .dropout import DROPOUT
from .function import UserFunction
from .mods import MASK_MOD, SCORE_MOD, as_they_are
from .option import (
    LEFT as LEFT,
    RIGHT as RIGHT,
    UNBOUNDED as UNBOUNDED,
    At as At,
    Option,
    OptionVariant,
    Verbs as Verbs,
    variants as variants,
)
from .padding import PADDING
from .sinks import SINKS
from .softcap import SOFTCAP

Array = TypeVar("Array")

# in the order in which options are applied to a score
OPTIONS = (SOFTCAP, SCORE_MOD, BIAS, ALIBI, BAND, PADDING, MASK_MOD, BLOCKS, SINKS, DROPOUT)
OPTIONS_VARLEN = (SOFTCAP, SCORE_MOD, ALIBI, BAND, MASK_MOD, SINKS, DROPOUT)


class _OptionKeywords(TypedDict, Generic[Array], total=False):
    """Keyword arguments of both forms, for functions that take `**options`, with arrays of a library."""

    causal: bool | str
    scale: float | None
    window: tuple[int | None, int | None] | None
    softcap: float | None
    alibi_slopes: Array | None
    sinks: Array | None
    score_mod: Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]] | None
    mask_mod: Callable[..., Any] | None
    dropout_p: float
    seed: int | Array | None


class OptionKeywordsVarlen(_OptionKeywords[Array], Generic[Array], total=False):
    """Keyword arguments of packed sequences of different lengths, with the ranges of their keys."""

    k_starts: Array | None
    k_lengths: Array | None
    total_k_lengths: int | None


class OptionKeywords(_OptionKeywords[Array], Generic[Array], total=False):
    """Keyword arguments of whole batches."""

    bias: Array | None
    key_padding_mask: Array | None
    block_mask: BlockMask | Array | None


class KeywordsVarlen(OptionKeywordsVarlen[Array], Generic[Array], total=False):
    """Keyword arguments of packed sequences with return_lse, which decides what a call returns."""

    return_lse: bool


class Keywords(OptionKeywords[Array], Generic[Array], total=False):
    """Keyword arguments of whole batches with return_lse."""

    return_lse: bool


__all__ = [
    "OPTIONS",
    "OPTIONS_VARLEN",
    "SPEC_BLOCKS",
    "UNBOUNDED",
    "At",
    "BlockMask",
    "Chain",
    "Keywords",
    "KeywordsVarlen",
    "Option",
    "OptionKeywords",
    "OptionKeywordsVarlen",
    "OptionVariant",
    "UserFunction",
    "Verbs",
    "as_they_are",
    "band",
    "broadcast_strides",
    "compose",
    "lists_of",
    "variants",
]
