"""What wrong arguments of the bridge's functions raise, with torch's own values among the wrong ones."""

from typing import Any

import numpy as np
import pytest
import torch

from dualops import torch_bridge
from dualops.spec.domains import shown
from tests.wrong_arguments import CALLS, Call, complaint, other_words, wrong

TENSORS: tuple[Any, ...] = (
    *(torch.zeros(3), torch.zeros(3, requires_grad=True), torch.zeros(2, 2, dtype=torch.complex64)),
    *(torch.zeros(1, device="meta"), torch.tensor(1.5), torch.tensor(3), torch.zeros(2).to_sparse(), torch.float32),
)
FORWARD = [call for call in CALLS if not call.backward]


@pytest.mark.parametrize("grads", [False, True], ids=["plain", "grads"])
@pytest.mark.parametrize("call", FORWARD, ids=str)
def test_every_argument(call: Call, grads: bool):
    function = getattr(torch_bridge, str(call))
    if grads and not call.spec.gradients:
        return  # nothing to ask for
    arrays = {name: torch.from_numpy(np.asarray(array)) for name, array in call.arrays.items()}

    def given(**changed: Any) -> dict[str, Any]:
        fresh = {name: x.clone().requires_grad_(grads and x.is_floating_point()) for name, x in arrays.items()}
        return {**fresh, **call.case.params, **changed}

    values = [*wrong(call.arrays, call.params), *((name, x) for name in (*arrays, *call.params) for x in TENSORS)]
    found = {}
    for name, value in values:
        message = complaint(str(call), function, given(**{name: value}))
        if message and "got an unexpected keyword argument" not in message:
            found[name, shown(value)] = message
    assert not found


@pytest.mark.parametrize("call", FORWARD, ids=str)
def test_wrong_calls_get_the_references_words(call: Call):
    found = other_words(call, getattr(torch_bridge, str(call)), lambda x: torch.from_numpy(np.asarray(x).copy()))
    own = ("got an unexpected keyword argument", "seed is None")  # backward alone asks for row sums; torch draws seeds
    assert not {key: message for key, message in found.items() if not any(words in message for words in own)}
