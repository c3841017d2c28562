"""The gradient of attention's rung sm90, by a Config of dk's and dv's kernel that a test chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import dualops.cuda
from dualops.cuda.flash_attention.sm90 import backward
from dualops.spec import OPERATORS, Case
from dualops.spec.attention.cases import lists_shape, paired
from tests.checks import check
from tests.cuda.configs import Change, changed

TWO_KERNELS: Change = (backward, {"fused_choices": lambda *_: iter(())})  # one for dq, one for dk and dv


@contextmanager
def served(config: Any = None) -> Iterator[None]:
    """Inside the with statement this Config is the only one, if one is given."""
    changes: list[Change] = [TWO_KERNELS]
    if config is not None:
        changes.append((backward, {"dkv_configs": lambda *_: iter([(config, "alone")])}))
    with changed("flash_attention", *changes), changed("flash_attention_varlen", *changes):
        yield


def checked(
    q: tuple[int, ...],
    k: tuple[int, int],
    Dv: int,
    config: Any = None,
    dtype: str = "bfloat16",
    special: bool = False,
    blocks: tuple[int, int] | None = None,
    **params: Any,
) -> None:
    """The gradient of a call against truth. q: B, H, Sq, D; k: heads and tokens; blocks: batches and heads of a block
    mask, where there is one; params as `paired` takes them, or given.
    """
    mask_mod = params.pop("mask_mod", None)
    shapes, params = paired(params, q, k, Dv)
    if mask_mod is not None:
        params["mask_mod"] = mask_mod
    if blocks is not None:
        shapes["block_mask"] = lists_shape(*blocks, q[2], k[1])
    with served(config):
        run: Any = partial(dualops.cuda.flash_attention_backward, kernel="sm90")
        case = Case("dkv", dtype, shapes, params)
        check(OPERATORS["flash_attention"], case, run, backward=True, ways=("given",), special=special)


def checked_varlen(D: int, Dv: int, config: Any = None, **params: Any) -> None:
    """The same of four sequences."""
    shapes = {"q": (120, 2, D), "k": (150, 1, D), "v": (150, 1, Dv), "cu_seqlens_q": (5,), "cu_seqlens_k": (5,)}
    params = {"max_seqlen_q": 70, "max_seqlen_k": 80, "return_lse": True, **params}
    with served(config):
        run: Any = partial(dualops.cuda.flash_attention_varlen_backward, kernel="sm90")
        case = Case("dkv", "bfloat16", shapes, params)
        check(OPERATORS["flash_attention_varlen"], case, run, backward=True, ways=("given",))
