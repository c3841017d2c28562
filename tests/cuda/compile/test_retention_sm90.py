"""Retention's sm90 rung in each of its variants."""

from __future__ import annotations

import pytest

from dualops.cuda.retention.sm90.chunks import build_chunks
from dualops.cuda.retention.sm90.config import SLACK, Sm90Config, Walk
from tests.cuda.compile.ptx import sound

ARCH = "sm_90a"
MOST_BYTES = 227 * 1024  # of Hopper's shared memory


@pytest.mark.parametrize("Dv", [64, 128])
@pytest.mark.parametrize(
    "walk",
    [
        Walk(),
        Walk(begins=True),
        Walk(begins=True, finishes=True),
        Walk(begins=True, beside=True),
        Walk(back=True, beside=True),
        Walk(begins=True, finishes=True, back=True, beside=True),
    ],
    ids=str,
)
def test_each_variant(Dv, walk):
    """With a final state keys go in three parts."""
    config = Sm90Config(parts=3 if walk.finishes else 1)
    report = sound(build_chunks(config, Dv, walk), ARCH, config.shared_bytes(Dv))
    assert report.static_shared <= SLACK and config.shared_bytes(Dv) + SLACK <= MOST_BYTES
