"""What retention in NumPy refuses, and how it says so."""

from __future__ import annotations

from re import escape
from typing import Any

import numpy as np
import pytest

from dualops.reference import retention, retention_varlen
from dualops.spec import OPERATORS
from tests.checks import call
from tests.retention import normal, qkv

SPEC = OPERATORS["retention"]
ARRAYS = {entry.name for entry in SPEC.inputs}

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": normal(2, 3, 69, 5)}, ValueError, "q has Sq=69, k has Sk=70, expected the same in form 'chunk'"),
    (
        {"q": normal(2, 3, 69, 5), "form": "parallel", "return_state": True},
        ValueError,
        "q has Sq=69, k has Sk=70, expected the same with return_state",
    ),
    ({"gamma": np.array([0.5, 1.0, 1.5])}, ValueError, "gamma is 1.5 for head 2, expected above 0 and at most 1"),
    ({"gamma": np.array([0.5, 0.0, 1.0])}, ValueError, "gamma is 0.0 for head 1, expected above 0 and at most 1"),
    ({"gamma": np.array([np.nan, 0.5, 1.0])}, ValueError, "gamma is nan for head 0, expected above 0 and at most 1"),
    ({"log_decay": 0.1 - np.ones((2, 3, 69))}, ValueError, "log_decay has Sk=69, k has Sk=70"),
    ({"log_decay": -np.ones((3, 70))}, ValueError, "log_decay has 2 axes (3, 70), expected 3: [B, H, Sk]"),
    ({"log_decay": np.zeros((2, 3, 70), np.float32)}, TypeError, "log_decay has dtype float32, q has dtype float64"),
    *(
        (
            {"log_decay": np.full((2, 3, 70), x)},
            ValueError,
            f"log_decay is {x} at (0, 0, 0), expected a finite number of",
        )
        for x in (0.25, np.nan, -np.inf)
    ),
    (
        {"log_decay": np.zeros((2, 3, 70)), "gamma": np.ones(3)},
        ValueError,
        "there is gamma and log_decay, expected one of them: each is the whole decay",
    ),
    (
        {"log_decay": np.zeros((2, 3, 70)), "q": normal(2, 3, 69, 5), "form": "parallel"},
        ValueError,
        "q has Sq=69, k has Sk=70, expected the same with log_decay",
    ),
    (
        {"log_decay": np.zeros((2, 3, 70)), "mask": np.ones((3, 70, 70)), "form": "parallel"},
        ValueError,
        "there is log_decay and a mask, expected one of them: a mask is in place of the decay",
    ),
    ({"gamma": np.ones(2)}, ValueError, "gamma has H=2, q has H=3"),
    ({"gamma": np.ones(3, np.float32)}, TypeError, "gamma has dtype float32, q has dtype float64, expected float64"),
    ({"normalize": "abs"}, ValueError, "normalize is 'abs' in form 'chunk', expected form 'parallel': the sum of"),
    ({"normalize": "abs", "form": "recurrent"}, ValueError, "normalize is 'abs' in form 'recurrent', expected form"),
    ({"normalize": "square"}, ValueError, "normalize is 'square', expected one of None, 'signed', 'abs'"),
    ({"form": "blocked"}, ValueError, "form is 'blocked', expected one of 'parallel', 'chunk', 'recurrent'"),
    ({"mask": np.ones((3, 70, 70))}, ValueError, "there is a mask in form 'chunk', expected form 'parallel'"),
    (
        {"mask": np.ones((3, 70, 70)), "gamma": np.ones(3), "form": "parallel"},
        ValueError,
        "there is gamma and a mask, expected one of them",
    ),
    (
        {"mask": np.ones((3, 70, 70)), "form": "parallel", "initial_state": np.ones((2, 3, 5, 4))},
        ValueError,
        "there is a mask, expected none with initial_state",
    ),
    ({"mask": np.ones((3, 70, 69)), "form": "parallel"}, ValueError, "mask has Sk=69, k has Sk=70"),
    (
        {"initial_state": np.ones((2, 3, 5, 4)), "normalize": "signed"},
        ValueError,
        "there is initial_state and no initial_norm, expected both with normalize='signed'",
    ),
    (
        {"initial_norm": np.ones((2, 3, 5))},
        ValueError,
        "there is initial_norm with normalize=None, expected normalize='signed'",
    ),
    (
        {"initial_state": np.ones((2, 3, 5, 4)), "normalize": "abs", "form": "parallel"},
        ValueError,
        "normalize is 'abs', expected None or 'signed' with initial_state",
    ),
    ({"initial_state": np.ones((2, 3, 4, 4))}, ValueError, "initial_state has D=4, q has D=5"),
    ({"q": normal(2, 3, 70, 257), "k": normal(2, 3, 70, 257)}, ValueError, "q has D=257, expected 1 to 256"),
    ({"v": normal(2, 3, 70, 513)}, ValueError, "v has Dv=513, expected 1 to 512"),
    ({"v": normal(2, 3, 70, 0)}, ValueError, "v has Dv=0, expected 1 to 512"),
    ({"return_state": 1}, TypeError, "return_state is 1, expected True or False"),
]


@pytest.mark.parametrize(("change", "kind", "message"), WRONG, ids=range(len(WRONG)))
def test_errors_are_the_specs(change, kind, message):
    params = {name: x for name, x in change.items() if name not in ARRAYS}
    with pytest.raises(kind, match=f"^retention: {escape(message)}"):
        call(retention, SPEC.inputs, qkv() | change, **params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": np.array([1, 9], np.int32)}, "cu_seqlens starts at 1, expected 0"),
        (
            {"cu_seqlens": np.array([0, 5, 3, 9], np.int32)},
            "cu_seqlens falls from 5 to 3 at 2, expected it not to fall",
        ),
        ({"cu_seqlens": np.array([0, 10], np.int32)}, "cu_seqlens ends at 10, q has total=9, expected no more"),
        ({"max_seqlen": 4}, "max_seqlen is 4, expected 5 or more, the longest of cu_seqlens"),
        ({"max_seqlen": -1}, "max_seqlen is -1, expected 0 or more"),
        ({"cu_seqlens": np.zeros(0, np.int32)}, "cu_seqlens has no elements, expected B+1 of them"),
        ({"initial_state": np.ones((3, 2, 4, 4))}, "initial_state has B=3, expected 2: cu_seqlens has 3 elements"),
        ({"gamma": np.array([0.5, 2.0])}, "gamma is 2.0 for head 1, expected above 0 and at most 1"),
        ({"normalize": "abs"}, "normalize is 'abs', expected one of None, 'signed'"),
        ({"log_decay": -np.ones((8, 2))}, "log_decay has total=8, q has total=9"),
        ({"log_decay": np.full((9, 2), 1.0)}, "log_decay is 1.0 at (0, 0), expected a finite number of at most 0"),
    ],
)
def test_errors_of_sequences_are_the_specs(change, message):
    x = normal(9, 2, 4)
    given = {"q": x, "k": x, "v": x, "cu_seqlens": np.array([0, 5, 9], np.int32), "max_seqlen": 5} | change
    with pytest.raises(ValueError, match=f"^retention_varlen: {escape(message)}$"):
        retention_varlen(**given)
