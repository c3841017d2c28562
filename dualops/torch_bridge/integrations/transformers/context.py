"""Attention of models whose tokens are split among processes: `patch(model, context_parallel=group)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...compiled import past_compilation
from ...distributed.context_parallel import attend
from ...distributed.layout import BALANCES, Ends, ends_of, layout_of
from ...distributed.ranks import Ranks

GROUP = "_dualops_context_parallel"  # an attribute of an attention module
BY_LENGTH = ("dynamic", "longrope")  # kinds of rotary embeddings whose angles depend on the longest position
HEAD_TAIL = BALANCES[0]
# the trainer sums the gradients of all parameters over the ranks, including sinks
FLAGS = {"return_lse": False, "reduce_sinks": False}
_CHECKED = WeakTensorKeyDictionary()  # position_ids -> their version, and the documents that they were checked for


class Shared:
    """The group of a patched model. A copy of the model shares it; it can't be saved."""

    def __init__(self, group: Any):
        Ranks.of("patch", group)
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a model with patch(..., context_parallel=group) can't be pickled: a group is of this process")


def group_of(module: nn.Module) -> Any:
    """Return the group that `patch` set on a module, or None."""
    shared = getattr(module, GROUP, None)
    return None if shared is None else shared.group


def by_length(model: nn.Module) -> Iterator[str]:
    """Yield modules whose rotary embeddings depend on the longest position, which no rank knows."""
    for place, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in BY_LENGTH:
                yield f"{place} ({type(module).__name__}) has rotary embeddings of kind {kind!r}, which depend on"


@past_compilation
def shared_attention(
    name: str,
    group: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens: tuple[Any, Any],
    **options: Any,
) -> Tensor:
    """Compute attention of this rank's tokens, [1, heads, tokens, D], to [1, tokens, H, Dv].

    cu_seq_lens: those of queries and keys, of all ranks' tokens; the second may be None. An error on one rank is raised
    on all.
    """
    ends, refusal = None, None
    try:
        ends = _checked(name, Ranks.of(name, group), query, key, mask, position_ids, cu_seq_lens)
    except Exception as error:  # any error: the others must not wait for this rank
        refusal = error
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    o = attend(group, q, k, v, ends, HEAD_TAIL, None, {**FLAGS, **options}, refusal)
    return o[None]


def _checked(
    name: str,
    ranks: Ranks,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens: tuple[Any, Any],
) -> Ends:
    """Return where documents begin, and the end."""
    if query.shape[0] != 1:
        raise ValueError(f"{name}: input has a batch of {query.shape[0]}, expected 1 with context_parallel: pack it")
    if key.shape[2] != query.shape[2]:
        raise NotImplementedError(
            f"{name}: there are {key.shape[2]} keys and {query.shape[2]} queries: a cache is not implemented with "
            "context_parallel"
        )
    if mask is not None and (mask.ndim == 4 or (mask.dtype is torch.bool and mask.shape[0])):
        raise NotImplementedError(f"{name}: attention_mask is given, which is not implemented with context_parallel")
    given, of_keys = cu_seq_lens
    if given is None:
        raise ValueError(
            f"{name}: cu_seq_lens_q is None, expected where documents begin among the tokens of all ranks, and the end"
        )
    ends = ends_of(name, given)
    if of_keys is not None and of_keys is not given and ends_of(name, of_keys) != ends:
        raise ValueError(f"{name}: cu_seq_lens_q and cu_seq_lens_k differ, expected the same with context_parallel")
    if position_ids is not None and position_ids.ndim == 2:
        _check_positions(name, ranks, ends, position_ids)
    return ends


def _check_positions(name: str, ranks: Ranks, ends: Ends, position_ids: Tensor) -> None:
    """Check the positions, once for all layers of a forward; this waits for a GPU."""
    version = None if position_ids.is_inference() else position_ids._version
    known = _CHECKED.get(position_ids)
    if known is not None and version is not None and known == (version, ends):
        return
    expected = layout_of(ends, ranks.size, HEAD_TAIL).positions(ranks.rank)
    if position_ids[0].tolist() != expected.tolist():
        raise ValueError(
            f"{name}: position_ids are not those of this rank's tokens, expected "
            "dualops.torch_bridge.distributed.positions(cu_seq_lens_q, group)[None]"
        )
    _CHECKED[position_ids] = version, ends
