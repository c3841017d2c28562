"""The least cost of retention: products by form, and each array once."""

from __future__ import annotations

from .base import Cost, Problem

CHUNK = 64  # tokens of a chunk, in the reference and for counting flops; a kernel has its own


def _pairs(length: int) -> int:
    """Count pairs (query, key) of this many tokens; a query sees the keys before it and its own."""
    return length * (length + 1) // 2


def _counts(problem: Problem) -> tuple[int, int]:
    """Count multiplied pairs (query, key), and tokens that go through a state, in one head of one batch."""
    p = problem
    if "cu_seqlens" in p.arrays or p.form == "chunk":  # varlen counts as one sequence
        S = p.arrays["q"].shape[0] if "cu_seqlens" in p.arrays else p.Sk
        whole, rest = divmod(S, CHUNK)
        return whole * _pairs(CHUNK) + _pairs(rest), S
    if p.form == "recurrent":
        return 0, p.Sk
    if "mask" in p.arrays:
        return p.Sq * p.Sk, 0
    return _pairs(p.Sk) - _pairs(max(p.Sk - p.Sq, 0)), p.Sk if p.return_state or "initial_state" in p.arrays else 0


def _flops(problem: Problem, keys: int, values: int, states: int) -> int:
    """Return the flops of products: the number for pairs over D and over Dv, and for tokens with a state [D, Dv]."""
    p = problem
    pairs, tokens = _counts(p)
    heads = p.H if "cu_seqlens" in p.arrays else p.B * p.H
    return 2 * heads * (pairs * (keys * p.D + values * p.Dv) + tokens * states * p.D * p.Dv)


def _of_norm(problem: Problem) -> tuple[str, ...]:
    """Return the names of forward's results that backward reads."""
    return {None: (), "abs": ("row_sum",), "signed": ("o", "row_sum")}[problem.normalize]


INPUT_NAMES = ("q", "k", "v", "cu_seqlens", "gamma", "log_decay", "mask", "initial_state", "initial_norm")
# a state gets k^T v and gives q @ state; backward recomputes it, and its gradient state has three readers
FORWARD_COST = Cost(
    flops=lambda p: _flops(p, 1, 1, 2),
    bytes_read=lambda p: p.nbytes(*INPUT_NAMES),
    bytes_written=lambda p: p.nbytes("o", "state", "state_norm", "row_sum"),
)
BACKWARD_COST = Cost(
    flops=lambda p: _flops(p, 3, 2, 5),
    bytes_read=lambda p: p.nbytes(*INPUT_NAMES, "do", "dstate", "dstate_norm", *_of_norm(p)),
    bytes_written=lambda p: p.nbytes("dq", "dk", "dv", "dinitial_state", "dinitial_norm", "dlog_decay"),
)
