"""What a GPU says of itself, beside what it does."""

from __future__ import annotations

import pytest

from dualops.cuda import device as devices
from dualops.cuda.roof import stream_roof


@pytest.mark.alone
def test_memory_is_nearly_as_fast_as_its_clock_and_its_bus_allow():
    size = 1 << 30
    measured = 2 * size / stream_roof(size, size)
    assert 0.6 < measured / devices.current().memory_bandwidth < 1
