"""Arguments of a wrong kind or range: whatever they are, the reference's error names the operator."""

import pytest

from dualops import reference
from dualops.spec.domains import LONGEST_SHOWN, shown
from tests.wrong_arguments import CALLS, Call, NoWords, complaint, wrong


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_argument(call: Call):
    function = getattr(reference, str(call))
    found = {
        (name, shown(value)): message
        for name, value in wrong(call.arrays, call.params)
        if (message := complaint(str(call), function, call.given(**{name: value})))
    }
    assert not found


def test_the_sweep_finds_an_error_without_a_name():
    (call,) = (call for call in CALLS if str(call) == "softmax")

    def unhelpful(x: object, axis: object = -1) -> None:
        raise TypeError("bad operand type")

    def broken(x: object, axis: object = -1) -> None:
        raise RuntimeError("softmax: broken")

    assert complaint("softmax", unhelpful, call.given()) == "TypeError: bad operand type"
    assert complaint("softmax", broken, call.given()) == "RuntimeError: softmax: broken"
    assert complaint("softmax", reference.softmax, call.given()) is None
    assert complaint("softmax", reference.softmax, call.given(axis="x")) is None


def test_values_are_shown_in_one_line():
    assert shown("it's") == '"it\'s"'
    assert shown("x" * 1000) == repr("x" * 1000)[:LONGEST_SHOWN] + "..."
    assert shown([[1], "\n"]) == "[[1], '\\n']"
    assert shown(10**5000) == "a builtins.int"
    assert shown(NoWords()) == "a tests.wrong_arguments.NoWords"


@pytest.mark.parametrize("dim", [2**63, 2**31, 2**24 + 2, 10**400, -2, 7])
def test_a_table_of_no_head(dim: int):
    with pytest.raises(ValueError, match=r"^rope_tables: dim is .*, expected an even number, 2 to 16777216$"):
        reference.rope_tables(CALLS_POSITIONS, dim)


CALLS_POSITIONS = next(call for call in CALLS if str(call) == "rope_tables").arrays["positions"]
