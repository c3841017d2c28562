"""The options of attention, each a record in a file of its own; `option.py` says what such a record is."""

from .alibi import ALIBI
from .band import BAND, band
from .bias import BIAS, broadcast_strides
from .dropout import DROPOUT
from .function import UserFunction
from .mods import MASK_MOD, SCORE_MOD, as_they_are
from .option import UNBOUNDED, At, Chain, Option, OptionVariant, Verbs, compose, variants
from .padding import PADDING
from .sinks import SINKS
from .softcap import SOFTCAP

# in the order in which they come upon a score
OPTIONS = (SOFTCAP, SCORE_MOD, BIAS, ALIBI, BAND, PADDING, MASK_MOD, SINKS, DROPOUT)
OPTIONS_VARLEN = (SOFTCAP, SCORE_MOD, ALIBI, BAND, MASK_MOD, SINKS, DROPOUT)

__all__ = [
    "OPTIONS",
    "OPTIONS_VARLEN",
    "UNBOUNDED",
    "At",
    "Chain",
    "Option",
    "OptionVariant",
    "UserFunction",
    "Verbs",
    "as_they_are",
    "band",
    "broadcast_strides",
    "compose",
    "variants",
]
