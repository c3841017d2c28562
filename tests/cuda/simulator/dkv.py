"""The gradient of attention's rung sm90, by a Config of dk's and dv's kernel that a test chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dualops.cuda.flash_attention.sm90 import dkv_launch
from tests.cuda.configs import Change, changed


@contextmanager
def served(config: Any = None) -> Iterator[None]:
    """Inside the with statement this Config is the only one, if one is given."""
    change: Change = (dkv_launch, {"dkv_configs": lambda *_: iter([(config, "alone")])})
    changes = () if config is None else (change,)
    with changed("flash_attention", *changes), changed("flash_attention_varlen", *changes):
        yield
