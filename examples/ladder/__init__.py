"""Ladders: an operator in steps, each a kernel with one idea more than the previous one."""
