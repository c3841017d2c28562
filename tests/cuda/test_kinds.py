"""Batches of random problems for the GPU: many for few kernels, always the same ones."""

import pytest

from dualops.cuda.launch import device as devices
from tests.cuda.calls import call_of, calls_of_case, kernels_of, steps_of
from tests.cuda.kinds import BATCH, RESIZED, batch
from tests.cuda.operators import DIRECTIONS, every_direction

DEVICE = devices.known("sm_90a")


@every_direction
def test_a_batch(direction):
    problems = list(batch(direction, 2, DEVICE))
    served = [trial for trial, is_served in problems if is_served]
    assert len(problems) >= BATCH and 2 * len(served) > len(problems)
    assert len({(str(trial.case), str(trial.layouts)) for trial in served}) > BATCH // 2
    again = [call_of(trial) for trial, _ in batch(direction, 2, DEVICE)]
    assert again == [call_of(trial) for trial, _ in problems]
    assert all((steps_of(call, DEVICE) is not None) == is_served for call, (_, is_served) in zip(again, problems))


@pytest.mark.parametrize("direction", [d for d in DIRECTIONS if d.spec.name in RESIZED], ids=lambda d: d.name)
def test_what_is_compiled_is_what_a_batch_needs(direction):
    for number in range(3):
        calls, few = (
            [call_of(trial) for trial, served in batch(direction, number, DEVICE, same=same) if served]
            for same in (True, False)
        )
        assert len(few) < len(calls)
        assert kernels_of(few, DEVICE) == kernels_of(calls, DEVICE)


def test_odd_addresses_need_other_kernels():
    """Where a kernel would read 16 bytes at a time; and a call says nothing of where else its arrays lie."""
    direction = next(direction for direction in DIRECTIONS if direction.name == "rms_norm")
    case = next(case for case in direction.spec.cases if case.id == "rows33x128-float32")
    even, odd = (kernels_of(calls_of_case(direction, "simt", case, odd), DEVICE) for odd in (False, True))
    assert even and odd and even.isdisjoint(odd)
