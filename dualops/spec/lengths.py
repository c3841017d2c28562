"""The places of sequences among the tokens: cumulative lengths, or ranges that may overlap; checks and random draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

LONGEST = "of the longest sequence, or more; as many as there are tokens if None"  # docstring of a parameter


def longest_in(params: dict[str, Any], name: str, total: Any) -> Any:
    """Return the most tokens of one sequence, from the parameter of that name; None there becomes `total`."""
    if params[name] is None:
        params[name] = total
    return longest_of(params[name], total)


def longest_of(said: Any, total: Any) -> Any:
    """Return the most tokens of one sequence: the caller's number, but never more than all tokens.

    torch's symbolic sizes have their own minimum, since a comparison would specialise a compiled function on its
    outcome.
    """
    for one, other in ((said, total), (total, said)):
        if hasattr(one, "__sym_min__"):
            return one.__sym_min__(other)
    return min(said, total)


def check_ends(op: str, name: str, values: np.ndarray, tokens: tuple[str, str, int], longest: tuple[str, int]) -> None:
    """Raise ValueError unless the ends begin at 0, are nondecreasing, stay within the tokens, and no sequence is too
    long.

    tokens: the array of tokens, its token axis and the size of that axis. longest: the parameter that limits the length
    of a sequence, and its value.
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
        raise ValueError(f"{op}: {longest[0]} is {longest[1]}, expected {lengths.max()} or more, the longest of {name}")


def check_ranges(
    op: str, starts: np.ndarray, lengths: np.ndarray, total: int, longest: tuple[str, int], sum_of: tuple[str, int]
) -> None:
    """Raise ValueError unless each range of keys lies within the tokens of k and within the parameter's length.

    longest, sum_of: the parameters that bound one length and the sum of all, and their values.
    """
    starts, lengths = starts.astype(np.int64), lengths.astype(np.int64)
    for name, values in (("k_starts", starts), ("k_lengths", lengths)):
        if (values < 0).any():
            b = int(np.argmax(values < 0))
            raise ValueError(f"{op}: {name} is {values[b]} at {b}, expected 0 or more")
    if (beyond := starts + lengths > total).any():
        b = int(np.argmax(beyond))
        raise ValueError(
            f"{op}: k_starts + k_lengths is {starts[b]} + {lengths[b]} at {b}, k has total_k={total}, expected no more"
        )
    for (name, bound), found, which in ((longest, lengths.max(initial=0), "longest"), (sum_of, lengths.sum(), "sum")):
        if found > bound:
            raise ValueError(f"{op}: {name} is {bound}, expected {found} or more, the {which} of k_lengths")


def spans_of(arrays: Mapping[str, Any]) -> list[tuple[slice, slice]]:
    """Return the query and key slices of each attention sequence, from arrays by name."""
    ends_q, ends_k = arrays["cu_seqlens_q"], arrays.get("cu_seqlens_k")
    keys = (arrays["k_starts"], arrays["k_lengths"]) if ends_k is None else (ends_k[:-1], np.diff(ends_k))
    both = (zip(starts.tolist(), lengths.tolist()) for starts, lengths in ((ends_q[:-1], np.diff(ends_q)), keys))
    return list(zip(*([slice(start, start + length) for start, length in each] for each in both)))


def random_ranges(total: int, B: int, longest: int, most: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw ranges of B sequences, of at most `longest` of `total` tokens each, and of at most `most` together.

    Some are empty, some begin where another does; they overlap, leave gaps and come in any order.
    """
    starts, lengths = np.zeros(B, np.int32), np.zeros(B, np.int32)
    for b in rng.permutation(B):
        limit = min(longest, total, most - int(lengths.sum()))
        lengths[b] = 0 if rng.random() < 0.1 else rng.integers(limit // 2, limit + 1)
        starts[b] = rng.integers(total - lengths[b] + 1)
        other = starts[rng.integers(B)]
        if rng.random() < 0.3 and other + lengths[b] <= total:
            starts[b] = other
    return {"k_starts": starts, "k_lengths": lengths}


def random_ends(total: int, B: int, longest: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the ends of B sequences of at most `longest` tokens, `total` in all; the first begins at 0.

    If the sequences can't hold all tokens, they have at least half of what they can; the other tokens belong to none.
    """
    if B * longest < total:
        total = int(rng.integers(B * longest // 2, B * longest + 1))
    lengths = np.zeros(B, np.int64)
    for others, place in zip(reversed(range(B)), rng.permutation(B)):  # others: sequences still without a length
        rest = total - int(lengths.sum())
        least = max(0, rest - others * longest)
        lengths[place] = rest if others == 0 else rng.integers(least, min(longest, rest) + 1)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
