"""Memory that torch allocates holds NaN until it is written."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """torch fills what it allocates, as its deterministic algorithms do; other operators only warn of theirs."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # with torch.utils.deterministic's default
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
