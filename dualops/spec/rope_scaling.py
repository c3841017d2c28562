"""Scalings of rope's frequencies, for sequences longer than in training: their names, entries and numbers.

Pair i of R/2 turns by f_i = base ** (-2i / R) per position. A scaling divides some frequencies by a factor,

    f_i' = kept_i * f_i + (1 - kept_i) * f_i / factor

and differs in what it keeps:

    linear     nothing. Chen et al. 2023, arXiv:2306.15595
    llama3     what turns more than `high_freq_factor` times in `original_max_position_embeddings` positions, and a
               share of what turns more than `low_freq_factor` times. Grattafiori et al. 2024, arXiv:2407.21783
    yarn       the first pairs, up to the one that turns `beta_fast` times in `original_max_position_embeddings`
               positions, and a falling share up to the one that turns `beta_slow` times; cos and sin are multiplied by
               `attention_factor`. Peng et al. 2023, arXiv:2309.00071
    dynamic    all, with a base that grows with `seq_len` beyond `max_position_embeddings`

Names and entries are Hugging Face's: its dict `config.rope_parameters` is accepted unchanged. dynamic's
`max_position_embeddings` and `seq_len`, which Hugging Face keeps elsewhere, are entries here.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, log, pi
from typing import Any

from .domains import boolean, finite

# the entries of each after its name, in the order of a tuple
SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "dynamic": ("factor", "max_position_embeddings", "seq_len"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
NOT_IMPLEMENTED = ("longrope", "proportional", "axial")
DEFAULTS: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
ANY = ("rope_theta", "partial_rotary_factor")  # entries that every scaling may have
MAGNITUDES = ("mscale", "mscale_all_dim")  # yarn's attention_factor follows from these, if it is not given

Normal = tuple[tuple[str, Any], ...]


def positive(value: Any) -> float:
    if (number := finite(value)) <= 0:
        raise ValueError("expected a number above 0")
    return number


def scaling(value: Any) -> Normal | None:
    """Domain of scalings: None, a dict, or a tuple of a name and its entries. The normal form is the dict's items."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        given = dict(value)
    elif isinstance(value, (tuple, list)) and value:
        given = _items(value)
    else:
        raise TypeError("expected None, a tuple or a dict")
    given = {key: entry for key, entry in given.items() if entry is not None}
    alias = given.pop("type", None)  # the former name of rope_type
    name = given.pop("rope_type", alias)
    _check_name(name, given)
    known = {key: given.pop(key) for key in (*SCALINGS[name], *ANY) if key in given}
    magnitudes = {key: given.pop(key) for key in MAGNITUDES if key in given} if name == "yarn" else {}
    if given:
        raise ValueError(f"expected no {', '.join(map(str, given))}")
    if name == "yarn" and "factor" in known:
        known.setdefault("attention_factor", _attention_factor(positive(known["factor"]), **magnitudes))
    known = {key: DEFAULTS[key] for key in SCALINGS[name] if key in DEFAULTS} | known
    if missing := [key for key in SCALINGS[name] if key not in known]:
        raise ValueError(f"expected {name!r} with {', '.join(SCALINGS[name])}; {', '.join(missing)} missing")
    numbers = {key: (boolean if key == "truncate" else positive)(entry) for key, entry in known.items()}
    if name == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise ValueError("expected low_freq_factor to be less than high_freq_factor")
    if name == "yarn" and numbers["beta_slow"] >= numbers["beta_fast"]:
        raise ValueError("expected beta_slow to be less than beta_fast")
    return (("rope_type", str(name)), *((key, numbers[key]) for key in (*SCALINGS[name], *ANY) if key in numbers))


def _items(value: tuple[Any, ...] | list[Any]) -> dict[str, Any]:
    """Return the entries of a normal form, or of a name and numbers in order; trailing ones may be left out."""
    if isinstance(value[0], (tuple, list)):
        return dict(value)
    name, *numbers = value
    keys = SCALINGS.get(name, ()) if isinstance(name, str) else ()
    if len(numbers) > len(keys) and name in SCALINGS:
        raise ValueError(f"expected {name!r} with {', '.join(keys) or 'nothing'}")
    return {"rope_type": name, **dict(zip(keys, numbers))}


def _check_name(name: Any, given: Mapping[str, Any]) -> None:
    if name in NOT_IMPLEMENTED or "mrope_section" in given:
        called = "mrope_section" if "mrope_section" in given else name
        raise NotImplementedError(f"rope_tables: scaling has {called!r}, which is not implemented")
    if isinstance(name, str) and name in SCALINGS:
        return
    if name is None and given and all(isinstance(entry, Mapping) for entry in given.values()):
        raise ValueError(f"expected the dict of one kind of layers: {', '.join(map(repr, given))}")
    raise ValueError(f"expected a rope_type among {', '.join(map(repr, SCALINGS))}")


def _attention_factor(factor: float, mscale: Any = None, mscale_all_dim: Any = None) -> float:
    """Return yarn's factor of cos and sin, from the entries or by default."""

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * log(factor) + 1.0

    if mscale and mscale_all_dim:
        return magnitude(finite(mscale)) / magnitude(finite(mscale_all_dim))
    return magnitude(1.0)


def base_and_width(op: str, dim: int, base: float | None, scaling: Normal | None) -> tuple[float, int]:
    """Return the base of the frequencies, for a dynamic scaling that of the sequence's length, and the rotary
    dimensions R.
    """
    entries: dict[str, Any] = dict(scaling or ())
    theta, name = entries.get("rope_theta"), entries.get("rope_type")
    if base is not None and theta is not None and base != theta:
        raise ValueError(f"{op}: base is {base}, scaling has rope_theta {theta}, expected one of them, or the same")
    number: float = next(given for given in (base, theta, 10000.0) if given is not None)
    R = int(dim * entries.get("partial_rotary_factor", 1.0))
    if R % 2 or not 2 <= R <= dim:
        factor = entries["partial_rotary_factor"]
        raise ValueError(
            f"{op}: scaling has partial_rotary_factor {factor}, of dim={dim} that is R={R}, "
            f"expected an even number from 2 to {dim}"
        )
    if name == "yarn" and number <= 1:
        raise ValueError(f"{op}: base is {number}, expected more than 1 for yarn")
    if name == "dynamic":
        if R == 2:
            raise ValueError(f"{op}: R is 2, expected 4 or more for dynamic")
        longer = max(entries["seq_len"] / entries["max_position_embeddings"], 1.0)
        number *= (entries["factor"] * longer - (entries["factor"] - 1)) ** (R / (R - 2))
    return number, R


def yarn_range(R: int, base: float, entries: Mapping[str, Any]) -> tuple[float, float]:
    """Return the pairs between which yarn's share falls from 1 to 0: those that turn beta_fast and beta_slow times."""

    def pair(turns: float) -> float:
        return R * log(entries["original_max_position_embeddings"] / (turns * 2 * pi)) / (2 * log(base))

    first, last = pair(entries["beta_fast"]), pair(entries["beta_slow"])
    if entries["truncate"]:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, R - 1)
    # as other implementations do, against a division by 0
    return float(first), last + (0.001 if first == last else 0.0)
