"""Measuring on a GPU: which Config is fastest, what was measured before, and how fast memory is."""
