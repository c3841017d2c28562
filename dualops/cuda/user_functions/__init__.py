"""Compile users' functions, such as attention's `score_mod`, into kernels: `typed` turns a function into a verb."""

from .typed import typed

__all__ = ["typed"]
