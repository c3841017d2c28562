"""What a user wrote, such as attention's `score_mod`, compiled into kernels: `typed` makes a verb of it."""

from .typed import typed

__all__ = ["typed"]
