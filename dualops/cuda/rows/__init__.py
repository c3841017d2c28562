"""Operators on rows: each way of keeping a row is one kernel text, for every operator.

operator.py   the verbs of an operator, the arrays of a launch, where rows begin
exchange.py   how the warps that share a row exchange two numbers each
registers.py  rows kept in registers: a few lanes, some warps or a block a row
chunks.py     the longest rows, of which chunks wait in shared memory, on sm_90
reread.py     rows too long to be kept, read twice by a block
cluster.py    rows kept in the registers of a cluster of blocks, on sm_90

An operator is a factory of a noun, see `RowOperator`. It needs no kernel of its own.
"""
