"""Retention's sm90 rung in each of its variants."""

from __future__ import annotations

import pytest

from dualops.cuda.retention.sm90.config import SLACK, Sm90Config
from dualops.cuda.retention.sm90.forward import build_forward
from tests.cuda.compile.ptx import sound

ARCH = "sm_90a"
MOST_BYTES = 227 * 1024  # of Hopper's shared memory


@pytest.mark.parametrize("Dv", [64, 128])
@pytest.mark.parametrize(("begins", "finishes"), [(False, False), (True, False), (True, True)])
def test_each_variant(Dv, begins, finishes):
    """With a final state keys go in three parts."""
    config = Sm90Config(parts=3 if finishes else 1)
    report = sound(build_forward(config, Dv, begins, finishes), ARCH, config.shared_bytes(Dv))
    assert report.static_shared <= SLACK and config.shared_bytes(Dv) + SLACK <= MOST_BYTES
