"""What wrong arguments of the kernels' functions raise, `out=`, `kernel=` and `stream=` among their arguments.

Values that the reference takes are left out: a call with them would run a kernel.
"""

import pytest

from dualops import cuda, reference
from dualops.spec.domains import shown
from tests.wrong_arguments import CALLS, PARAMS, Call, complaint, other_words, refusal, wrong


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_argument(call: Call):
    function, plain = getattr(cuda, str(call)), getattr(reference, str(call))
    found = {
        (name, shown(value)): message
        for name, value in wrong(call.arrays, call.params)
        if refusal(plain, call.given(**{name: value}))
        and (message := complaint(str(call), function, call.given(**{name: value})))
    }
    assert not found
    words = other_words(call, function)
    assert not {key: text for key, text in words.items() if key[1] not in ("[]", "[1]")}  # lion makes tuples of lists


@pytest.mark.parametrize("name", ["out", "kernel"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_argument_of_a_launch(call: Call, name: str):
    function = getattr(cuda, str(call))
    for value in PARAMS:
        if value is not None:
            message = complaint(str(call), function, call.given(**{name: value}), must_refuse=True)
            assert not message, (shown(value), message)
