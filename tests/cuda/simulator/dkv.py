"""The gradient of attention's rung sm90, by a Config of dk's and dv's kernel that a test chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dualops.cuda.flash_attention.sm90 import backward, dkv_launch
from tests.cuda.configs import Change, changed

TWO_KERNELS: Change = (backward, {"fused_choices": lambda *_: iter(())})  # one for dq, one for dk and dv


@contextmanager
def served(config: Any = None) -> Iterator[None]:
    """Inside the with statement this Config is the only one, if one is given."""
    changes: list[Change] = [TWO_KERNELS]
    if config is not None:
        changes.append((dkv_launch, {"dkv_configs": lambda *_: iter([(config, "alone")])}))
    with changed("flash_attention", *changes), changed("flash_attention_varlen", *changes):
        yield
