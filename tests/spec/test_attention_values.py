"""Wrong and right values of attention's functions, seeds and lengths, and how right options change a problem."""

import re
from typing import Any

import numpy as np
import pytest

from dualops import reference
from dualops.spec.lengths import longest_of
from dualops.spec.meta import FLOATS, compute_dtype, number_meta
from tests.spec.calls import attention, attention_backward, meta, varlen


def right(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + 1


def short(score: Any, b: Any) -> Any:
    return score


def failing(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    raise KeyError("lost")


def words(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return "high"


def numbers(b: Any, h: Any, i: Any, j: Any) -> Any:
    return 1


def failing_mask(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i, j).index(7) == 0


HERE = rf"\({re.escape(__file__)}, line \d+\)"
SCORE = r"\(score, b, h, i, j\)"
FUNCTION_ERRORS = [
    ({"score_mod": short}, TypeError, rf"a function of 2 arguments, expected one of {SCORE}"),
    ({"score_mod": numbers}, TypeError, rf"a function of 4 arguments, expected one of {SCORE}"),
    ({"score_mod": failing}, ValueError, rf"for score=0.5, b=0, h=0, i=0, j=0 it raises KeyError: 'lost' {HERE}"),
    ({"score_mod": words}, ValueError, r"for score=0.5, b=0, h=0, i=0, j=0 it gives 'high', expected a number"),
    ({"score_mod": 3}, TypeError, rf"of type int, expected a Python function of {SCORE}, made by def or lambda"),
    ({"score_mod": np.tanh}, TypeError, rf"of type ufunc, expected a Python function of {SCORE}, made by .*"),
    ({"score_mod": (right,)}, TypeError, r"a tuple of 1, expected a function or a pair \(function, derivative\)"),
    (
        {"score_mod": (right, short)}, TypeError,
        rf"its derivative: a function of 2 arguments, expected one of {SCORE}",
    ),
    ({"mask_mod": right}, TypeError, r"a function of 5 arguments, expected one of \(b, h, i, j\)"),
    ({"mask_mod": numbers}, ValueError, r"for b=0, h=0, i=0, j=0 it gives 1, expected True or False"),
    (
        {"mask_mod": failing_mask}, ValueError,
        rf"for b=0, h=0, i=0, j=0 it raises ValueError: .* {HERE}",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "message"), FUNCTION_ERRORS)
@pytest.mark.parametrize(
    ("bind", "op"),
    [
        (attention, "flash_attention"),
        (attention_backward, "flash_attention_backward"),
        (varlen, "flash_attention_varlen"),
    ],
)
def test_errors_of_functions(bind, op, given, kind, message):
    ((name, value),) = given.items()
    with pytest.raises(kind, match=rf"^{op}: {name} is {re.escape(repr(value))}, {message}$"):
        bind(**given)


SEEDS = [
    (1.5, TypeError, "is a float, expected an integer, or an array without axes"),
    ("7", TypeError, "is a str, expected an integer, or an array without axes"),
    (True, TypeError, "is a bool, expected an integer, or an array without axes"),
    (np.float32(3), TypeError, "is a float32, expected an integer, or an array without axes"),
    (2**63, ValueError, f"is {2**63}, expected an integer of 64 bits"),
    (-(2**63) - 1, ValueError, f"is {-(2**63) - 1}, expected an integer of 64 bits"),
]


@pytest.mark.parametrize(("seed", "kind", "message"), SEEDS)
def test_errors_of_a_seed_on_the_host(seed, kind, message):
    q, k = np.zeros((1, 2, 3, 4)), np.zeros((1, 1, 5, 4))
    for call, op in (
        (lambda: number_meta(seed, "flash_attention", "seed"), "flash_attention"),
        (lambda: reference.flash_attention(q, k, k, dropout_p=0.1, seed=seed), "flash_attention"),
        (
            lambda: reference.flash_attention_backward(q, k, k, q, q[..., 0], q, dropout_p=0.1, seed=seed),
            "flash_attention_backward",
        ),
    ):
        with pytest.raises(kind, match=f"^{re.escape(f'{op}: seed {message}')}$"):
            call()


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), np.int8(-3), np.uint64(5)])
def test_seeds_that_are_right(seed):
    made = number_meta(seed, "flash_attention", "seed")
    assert (made.dtype, made.shape, made.device, made.pointer) == ("int64", (), "host", int(seed))
    assert attention(seed=made, dropout_p=0.5).dropout_p == 0.5


def ranges(starts: tuple = (0, 5), lengths: tuple = (5, 5), **more: Any) -> dict[str, Any]:
    """Of two sequences."""
    given = {"cu_seqlens_q": (0, 12, 20), "cu_seqlens_k": None, "k_starts": starts, "k_lengths": lengths}
    return {**given, "max_seqlen_q": None, "max_seqlen_k": 10, "total_k_lengths": 20, **more}


def packed(name: str, **given: Any) -> Any:
    """The reference's call on 20 queries and 30 keys, by default of one sequence."""
    q, k = np.zeros((20, 2, 4)), np.zeros((30, 1, 4))
    given = {"cu_seqlens_q": (0, 20), "cu_seqlens_k": (0, 30), "max_seqlen_q": 99, "max_seqlen_k": 99, **given}
    given = {key: np.array(x, np.int32) if isinstance(x, tuple) else x for key, x in given.items()}
    more = (q, np.zeros((2, 20)), q) if name.endswith("_backward") else ()
    return getattr(reference, name)(q, k, k, *more, **given)


LENGTHS: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens_q": (1, 20)}, "cu_seqlens_q starts at 1, expected 0"),
    ({"cu_seqlens_k": (-1, 30)}, "cu_seqlens_k starts at -1, expected 0"),
    ({"cu_seqlens_q": (0, 10, 5, 20), "cu_seqlens_k": (0, 9, 9, 30)},
     "cu_seqlens_q falls from 10 to 5 at 2, expected it not to fall"),
    ({"cu_seqlens_k": (0, 31)}, "cu_seqlens_k ends at 31, k has total_k=30, expected no more"),
    ({"cu_seqlens_q": (0, 21)}, "cu_seqlens_q ends at 21, q has total_q=20, expected no more"),
    ({"max_seqlen_q": 19}, "max_seqlen_q is 19, expected 20 or more, the longest of cu_seqlens_q"),
    ({"cu_seqlens_q": (0, 5, 20), "cu_seqlens_k": (0, 12, 30), "max_seqlen_k": 17},
     "max_seqlen_k is 17, expected 18 or more, the longest of cu_seqlens_k"),
    (ranges(starts=(0, -1)), "k_starts is -1 at 1, expected 0 or more"),
    (ranges(lengths=(-2, 5)), "k_lengths is -2 at 0, expected 0 or more"),
    (ranges((0, 25), (5, 6)), "k_starts + k_lengths is 25 + 6 at 1, k has total_k=30, expected no more"),
    (ranges((2**31 - 1, 0), (2**31 - 1, 1)),
     "k_starts + k_lengths is 2147483647 + 2147483647 at 0, k has total_k=30, expected no more"),
    (ranges(lengths=(5, 8), max_seqlen_k=7), "max_seqlen_k is 7, expected 8 or more, the longest of k_lengths"),
    (ranges(lengths=(5, 8), max_seqlen_k=8, total_k_lengths=12),
     "total_k_lengths is 12, expected 13 or more, the sum of k_lengths"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["flash_attention_varlen", "flash_attention_varlen_backward"])
@pytest.mark.parametrize(("given", "message"), LENGTHS, ids=lambda message: str(message))
def test_errors_of_lengths(name, given, message):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: {message}')}$"):
        packed(name, **given)


RIGHT_LENGTHS = [
    {"cu_seqlens_q": (0, 0, 20, 20), "cu_seqlens_k": (0, 7, 30, 30), "max_seqlen_q": 20, "max_seqlen_k": 23},
    {"max_seqlen_q": 500, "max_seqlen_k": 500},
    ranges((0, 0), (30, 30), max_seqlen_k=30, total_k_lengths=None),
    ranges((20, 3), (10, 0), max_seqlen_k=30, total_k_lengths=None),
    ranges((30, 4), (0, 5), max_seqlen_k=30, total_k_lengths=None),
    ranges((9, 1), (3, 4), max_seqlen_k=5, total_k_lengths=7),
]


@pytest.mark.parametrize("given", RIGHT_LENGTHS, ids=str)
def test_lengths_that_are_right(given):
    assert packed("flash_attention_varlen", **given).shape == (20, 2, 4)


def test_right_options():
    problem = attention(
        window=[np.int64(3), None],
        softcap=2,
        bias=meta(7),
        sinks=meta(6),
        key_padding_mask=meta(2, 7, dtype="bool"),
        score_mod=right,
        seed=meta(dtype="int64"),
        dropout_p=0,
    )
    assert (problem.window, problem.softcap, problem.dropout_p, problem.causal) == ((3, None), 2.0, 0.0, False)
    assert problem.score_mod.function.__code__ is right.__code__
    assert problem.dtype_of("sinks") == "float32"
    assert problem.dtype_of("alibi_slopes") is None
    problem = varlen(causal=True)
    found = [getattr(problem, name) for name in ("B", "Sq", "Sk", "total_q", "total_k", "group")]
    assert found == [3, 9, 12, 20, 30, 2]


def test_no_sequence_is_taken_for_longer_than_all_of_them():
    """Whatever was said: launches, workspaces and costs follow from Sq and Sk."""
    given = {"q": meta(9, 2, 8), "k": meta(11, 2, 8), "v": meta(11, 2, 8)}
    least, most = (varlen(**given, max_seqlen_q=q, max_seqlen_k=k, causal=True) for q, k in ((9, 11), (100_000,) * 2))
    assert (most.Sq, most.Sk, most.max_seqlen_q) == (9, 11, 100_000)
    unsaid = varlen(**given, max_seqlen_q=None, max_seqlen_k=None)
    assert (unsaid.Sq, unsaid.Sk, unsaid.max_seqlen_q, unsaid.max_seqlen_k) == (9, 11, 9, 11)
    cost = most.spec.forward_cost
    assert cost.flops(most) == cost.flops(least) > 0


class Symbol(int):
    """As torch's symbolic sizes are: comparing two of them is not free."""

    def __sym_min__(self, other):
        return ("minimum", int(self), int(other))

    def __lt__(self, other):
        raise AssertionError("compared")

    __gt__ = __le__ = __ge__ = __lt__


def test_symbolic_sizes_are_not_compared():
    assert longest_of(Symbol(3), 4) == longest_of(Symbol(3), Symbol(4)) == ("minimum", 3, 4)
    assert longest_of(3, Symbol(4)) == ("minimum", 4, 3)


@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_may_be_of_the_dtype_of_q_or_of_arithmetic(dtype):
    arrays = {name: meta(*shape, dtype=dtype) for name, shape in {"q": (2, 6, 5, 16), "k": (2, 3, 7, 16)}.items()}
    arrays["v"] = arrays["k"]
    for weight in (dtype, compute_dtype(dtype)):
        problem = attention(**arrays, sinks=meta(6, dtype=weight), alibi_slopes=meta(6, dtype=weight))
        assert problem.dtype_of("sinks") == problem.dtype_of("alibi_slopes") == weight


@pytest.mark.parametrize("shape", [(), (7,), (1,), (5, 7), (5, 1), (6, 1, 1), (1, 6, 5, 7), (2, 1, 5, 1), (2, 6, 5, 7)])
def test_bias_shapes_that_are_right(shape):
    problem = attention_backward(bias=meta(*shape))
    assert problem.outputs(problem.spec.gradients)["dbias"].shape == shape
    assert "dbias" not in attention_backward(bias=meta(*shape), bias_gradient=False).outputs(problem.spec.gradients)
