"""What architectures can do."""

import pytest

from dualops.cuda.launch import device as devices

BULK_COPIES, WGMMA, MORE_REGISTERS = {"sm_90a", "sm_100a", "sm_120"}, {"sm_90a"}, {"sm_120"}
FAST_MEMORY = {"sm_90a", "sm_100a"}  # H200 and B200


@pytest.mark.parametrize("arch", devices.ARCHITECTURES)
def test_capabilities(arch):
    device = devices.known(arch)
    found = device.has_bulk_copies, device.has_wgmma, device.takes_more_registers, device.has_fast_memory
    assert found == tuple(arch in having for having in (BULK_COPIES, WGMMA, MORE_REGISTERS, FAST_MEMORY))
    assert (device.max_cluster > 1) == device.has_bulk_copies
