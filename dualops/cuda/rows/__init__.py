"""Operators on rows: one kernel for each way of keeping a row, shared by all operators.

operator.py   the verbs of an operator, the arguments of a launch, addresses of rows
exchange.py   exchanges two numbers per warp among the warps that share a row
registers.py  rows kept in registers: a few lanes, several warps or a block per row
cluster.py    rows kept in the registers of a cluster of blocks, on sm_90
chunks.py     the longest rows, kept in the shared memory of a cluster, on sm_90
reread.py     rows that are too long to be kept, read twice by a block

An operator is a factory of a noun, see `RowOperator`. It needs no kernel of its own.
"""
