"""Where sequences that lie one after another end: cumulative lengths, checked and drawn."""

from __future__ import annotations

from typing import Any

import numpy as np

LONGEST = "of the longest sequence, or more; as many as there are tokens if None"  # what a parameter says


def longest_in(params: dict[str, Any], name: str, total: Any) -> Any:
    """The most tokens that one of the sequences can have, by the parameter of that name; None there becomes `total`."""
    if params[name] is None:
        params[name] = total
    return longest_of(params[name], total)


def longest_of(said: Any, total: Any) -> Any:
    """The most tokens that one of the sequences can have: what the caller said, but never more than there are in all.

    torch's symbolic sizes have a minimum of their own, for a comparison would tie a compiled function to its outcome.
    """
    for one, other in ((said, total), (total, said)):
        if hasattr(one, "__sym_min__"):
            return one.__sym_min__(other)
    return min(said, total)


def check_ends(op: str, name: str, values: np.ndarray, tokens: tuple[str, str, int], longest: tuple[str, int]) -> None:
    """Raise ValueError unless the ends begin at 0, never fall, stay within the tokens and lie near enough.

    tokens: the array that holds the tokens, its axis of them and its size there. longest: the parameter that says how
    long a sequence may be, and its value.
    """
    ends = values.astype(np.int64)
    lengths = np.diff(ends)
    array, axis, total = tokens
    if ends[0] != 0:
        raise ValueError(f"{op}: {name} starts at {ends[0]}, expected 0")
    if (lengths < 0).any():
        place = int(np.argmax(lengths < 0))
        raise ValueError(
            f"{op}: {name} falls from {ends[place]} to {ends[place + 1]} at {place + 1}, expected it not to fall"
        )
    if ends[-1] > total:
        raise ValueError(f"{op}: {name} ends at {ends[-1]}, {array} has {axis}={total}, expected no more")
    if lengths.size and lengths.max() > longest[1]:
        raise ValueError(f"{op}: {longest[0]} is {longest[1]}, expected {lengths.max()} or more, as {name} has it")


def random_ends(total: int, B: int, longest: int, rng: np.random.Generator) -> np.ndarray:
    """Where B sequences of at most `longest` tokens, `total` in all, end; the first one begins at 0.

    Where they cannot have so many, they have half of what they can, or more; the other tokens belong to none.
    """
    if B * longest < total:
        total = int(rng.integers(B * longest // 2, B * longest + 1))
    lengths = np.zeros(B, np.int64)
    for others, place in zip(reversed(range(B)), rng.permutation(B)):  # others: still without a length
        rest = total - int(lengths.sum())
        least = max(0, rest - others * longest)
        lengths[place] = rest if others == 0 else rng.integers(least, min(longest, rest) + 1)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
