"""What retention in NumPy refuses, and how it says so."""

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

WRONG: dict[type[Exception], list[tuple[dict[str, Any], str]]] = {
    ValueError: [
        ({"q": normal(2, 3, 69, 5)}, "q has Sq=69, k has Sk=70, expected the same in form 'chunk'"),
        ({"q": normal(2, 3, 69, 5), "form": "parallel", "return_state": True},
         "q has Sq=69, k has Sk=70, expected the same with return_state"),
        ({"gamma": np.array([0.5, 1.0, 1.5])}, "gamma is 1.5 for head 2, expected above 0 and at most 1"),
        ({"gamma": np.array([0.5, 0.0, 1.0])}, "gamma is 0.0 for head 1, expected above 0 and at most 1"),
        ({"gamma": np.array([np.nan, 0.5, 1.0])}, "gamma is nan for head 0, expected above 0 and at most 1"),
        ({"log_decay": 0.1 - np.ones((2, 3, 69))}, "log_decay has Sk=69, k has Sk=70"),
        ({"log_decay": -np.ones((3, 70))}, "log_decay has 2 axes (3, 70), expected 3: [B, H, Sk]"),
        ({"log_decay": np.full((2, 3, 70), 0.25)}, "log_decay is 0.25 at (0, 0, 0), expected a finite number of"),
        ({"log_decay": np.full((2, 3, 70), np.nan)}, "log_decay is nan at (0, 0, 0), expected a finite number of"),
        ({"log_decay": np.full((2, 3, 70), -np.inf)}, "log_decay is -inf at (0, 0, 0), expected a finite number of"),
        ({"log_decay": np.zeros((2, 3, 70)), "gamma": np.ones(3)},
         "there is gamma and log_decay, expected one of them: each is the whole decay"),
        ({"log_decay": np.zeros((2, 3, 70)), "q": normal(2, 3, 69, 5), "form": "parallel"},
         "q has Sq=69, k has Sk=70, expected the same with log_decay"),
        ({"log_decay": np.zeros((2, 3, 70)), "mask": np.ones((3, 70, 70)), "form": "parallel"},
         "there is log_decay and a mask, expected one of them: a mask is in place of the decay"),
        ({"gamma": np.ones(2)}, "gamma has H=2, q has H=3"),
        ({"normalize": "abs"}, "normalize is 'abs' in form 'chunk', expected form 'parallel': the sum of"),
        ({"normalize": "abs", "form": "recurrent"}, "normalize is 'abs' in form 'recurrent', expected form"),
        ({"normalize": "square"}, "normalize is 'square', expected one of None, 'signed', 'abs'"),
        ({"form": "blocked"}, "form is 'blocked', expected one of 'parallel', 'chunk', 'recurrent'"),
        ({"mask": np.ones((3, 70, 70))}, "there is a mask in form 'chunk', expected form 'parallel'"),
        ({"mask": np.ones((3, 70, 70)), "gamma": np.ones(3), "form": "parallel"},
         "there is gamma and a mask, expected one of them"),
        ({"mask": np.ones((3, 70, 70)), "form": "parallel", "initial_state": np.ones((2, 3, 5, 4))},
         "there is a mask, expected none with initial_state"),
        ({"mask": np.ones((3, 70, 69)), "form": "parallel"}, "mask has Sk=69, k has Sk=70"),
        ({"initial_state": np.ones((2, 3, 5, 4)), "normalize": "signed"},
         "there is initial_state and no initial_norm, expected both with normalize='signed'"),
        ({"initial_norm": np.ones((2, 3, 5))},
         "there is initial_norm with normalize=None, expected normalize='signed'"),
        ({"initial_state": np.ones((2, 3, 5, 4)), "normalize": "abs", "form": "parallel"},
         "normalize is 'abs', expected None or 'signed' with initial_state"),
        ({"initial_state": np.ones((2, 3, 4, 4))}, "initial_state has D=4, q has D=5"),
        ({"q": normal(2, 3, 70, 257), "k": normal(2, 3, 70, 257)}, "q has D=257, expected 1 to 256"),
        ({"v": normal(2, 3, 70, 513)}, "v has Dv=513, expected 1 to 512"),
        ({"v": normal(2, 3, 70, 0)}, "v has Dv=0, expected 1 to 512"),
    ],
    TypeError: [
        ({"log_decay": np.zeros((2, 3, 70), np.float32)}, "log_decay has dtype float32, q has dtype float64"),
        ({"gamma": np.ones(3, np.float32)}, "gamma has dtype float32, q has dtype float64, expected float64"),
        ({"return_state": 1}, "return_state is 1, expected True or False"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "message"), [(kind, *row) for kind in WRONG for row in WRONG[kind]])
def test_errors_are_the_specs(kind, change, message):
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
