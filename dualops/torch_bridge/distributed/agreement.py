"""Check that the ranks of a group agree on a call, before they exchange anything of it.

Ranks that disagree, on a shape for example, would deadlock or mix up their numbers. So each call begins with an
all-gather of WIDTH integers from every rank: whether it refuses its own arguments, how many tokens it has, and a hash
of each argument that must be the same. An error on any rank is raised on all ranks.

On a CPU every call waits for these integers. A call on a GPU waits only if it is the first of its kind, with new
arguments or documents. A later one compares on the device, at the cost of one small all-gather per call, overlapped
with other work. If the ranks disagree in such a call, each rank with a call of a new kind raises ValueError. On all
others a device-side assertion fails, which ends their processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from .layout import Ends, Layout, layout_of
from .ranks import Ranks

WIDTH = 20
REFUSED, TOKENS, HASHES = 0, 1, 2  # places among the integers; the hashes begin at the last
MOST_KNOWN = 1000  # most calls that are remembered as equal on all ranks
Row = tuple[int, ...]
_KNOWN: dict[tuple[str, Row], Tensor] = {}  # group and this rank's integers -> the integers of all ranks


def agreed_layout(
    op: str, ranks: Ranks, ends: Ends | None, balance: str, tokens: int, same: Mapping[str, Any]
) -> Layout:
    """Return the layout of a call that all ranks make; this rank has `tokens` tokens.

    ends: None for one document with the tokens of all ranks. same: the other arguments that must be equal, by names for
    an error; their reprs must determine them. Raises ValueError on every rank if they differ, if a rank has refused its
    arguments, or if its number of tokens is not its share.
    """
    if ranks.size == 1:
        counts: list[int] | None = [tokens]
    else:
        said = (op, ends, balance, *same.values())
        row = (0, tokens, *(_hashed(repr(value)) for value in said))
        names = ("the function", "cu_seqlens", "balance", *same)
        counts = _agreed(op, ranks, (*row, *[0] * (WIDTH - len(row))), names, ask=ends is None)
    if ends is None:
        assert counts is not None
        ends = (0, sum(counts))
    layout = layout_of(ends, ranks.size, balance)
    for rank, (found, wanted) in enumerate(zip(counts or layout.counts, layout.counts, strict=True)):
        if found != wanted:
            raise ValueError(
                f"{op}: rank {rank} of the group has {found} tokens, expected {wanted}: its share of {layout.total} "
                f"with balance {balance!r}, as shard gives it"
            )
    return layout


def refused(op: str, ranks: Ranks, refusal: Exception | None) -> Exception:
    """Notify the other ranks that this one refuses its arguments. Returns the refusal."""
    assert refusal is not None
    if ranks.size > 1:
        _found(ranks, (1, *[0] * (WIDTH - 1)))
    return refusal


def _agreed(op: str, ranks: Ranks, row: Row, names: tuple[str, ...], *, ask: bool) -> list[int] | None:
    """Return the tokens of each rank; None if the call did not wait. ask: wait in any case."""
    key = (ranks.group.group_name, row)
    if not ask and key in _KNOWN:
        _compare(op, ranks, _KNOWN[key])
        return None
    table, found = _found(ranks, row)
    for rank, other in enumerate(found):
        if other[REFUSED]:
            raise ValueError(f"{op}: rank {rank} of the group refuses its arguments; its own error says why")
    for place, name in enumerate(names, HASHES):
        for rank, other in enumerate(found):
            if other[place] != found[0][place]:
                raise ValueError(f"{op}: ranks 0 and {rank} of the group disagree on {name}, expected the same")
    if ranks.device.type == "cuda":
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = table
    return [other[TOKENS] for other in found]


def _found(ranks: Ranks, row: Row) -> tuple[Tensor, list[list[int]]]:
    """Return the integers of all ranks, as a tensor and as lists. Waits only for the stream that receives them."""
    with ranks.aside():
        table = _exchanged(ranks, torch.tensor(row, dtype=torch.int64).to(ranks.device))
        return table, table.tolist()


def _compare(op: str, ranks: Ranks, known: Tensor) -> None:
    """Compare the integers of all ranks with the earlier ones, without waiting: an assertion on the device."""
    ranks.aside_waits()
    with ranks.aside():
        same = (_exchanged(ranks, known[ranks.rank].clone()) == known).all()
        torch._assert_async(same, f"{op}: the ranks of the group disagree on their arguments")  # type: ignore[attr-defined]


def _exchanged(ranks: Ranks, row: Tensor) -> Tensor:
    table = row.new_empty(ranks.size, WIDTH)
    ranks.all_gather(table.flatten(), row).wait()
    return table


@lru_cache(maxsize=MOST_KNOWN)
def _hashed(text: str) -> int:
    """Hash to 63 bits."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
