"""Retention's sm90 rung in each of its variants."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualops.cuda.retention.sm90.chunks import build_chunks
from dualops.cuda.retention.sm90.config import SLACK, GradConfig, Sm90Config, Walk, WideConfig
from dualops.cuda.retention.sm90.decay_grad_chunks import build_decay_grad_chunks
from dualops.cuda.retention.sm90.decay_grad_sums import build_decay_grad_sums
from dualops.cuda.retention.sm90.wide import build_wide
from tests.cuda.compile.ptx import sound

ARCH = "sm_90a"
MOST_BYTES = 227 * 1024  # of Hopper's shared memory


FORTH, BACK = Walk(), Walk(back=True, overlaps=True)


@pytest.mark.parametrize(
    ("Dv", "walk"),
    [
        (64, FORTH),
        (64, BACK),
        (128, FORTH),
        (128, replace(FORTH, begins=True)),
        (128, replace(FORTH, begins=True, finishes=True)),
        (128, replace(FORTH, begins=True, overlaps=True)),
        (128, BACK),
        (128, replace(BACK, begins=True, finishes=True)),
        (128, replace(FORTH, finishes=True, looks=False)),
        (128, replace(BACK, finishes=True, looks=False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("stepwise", [False, True])
def test_each_variant(Dv, walk, stepwise):
    """With a final state keys go in three parts."""
    config = Sm90Config(parts=3 if walk.finishes else 1, stepwise=stepwise)
    report = sound(build_chunks(config, Dv, walk), ARCH, config.shared_bytes(128, Dv))
    assert report.static_shared <= SLACK and config.shared_bytes(128, Dv) + SLACK <= MOST_BYTES


@pytest.mark.parametrize(
    ("D", "walk"),
    [
        (64, FORTH),
        (256, FORTH),
        (256, replace(FORTH, begins=True)),
        (256, replace(FORTH, begins=True, finishes=True)),
        (256, replace(BACK, begins=True)),
        (256, replace(BACK, begins=True, finishes=True)),
        (256, replace(FORTH, finishes=True, looks=False)),
        (320, BACK),
        (512, replace(FORTH, overlaps=True)),
        (512, replace(BACK, begins=True)),
        (512, replace(FORTH, finishes=True, looks=False)),
    ],
    ids=str,
)
def test_each_wide_variant(D, walk):
    """Of more than 256 keys in halves, which no result that is a state is made of."""
    config = WideConfig(parts=3 if walk.finishes and walk.looks else 1)
    report = sound(build_wide(config, D, walk), ARCH, config.shared_bytes(D, 512))
    assert report.static_shared <= SLACK and config.shared_bytes(D, 512) + SLACK <= MOST_BYTES


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("walk", [FORTH, replace(FORTH, overlaps=True), BACK], ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_each_pass_with_the_gradient_of_log_decay(width, walk, begins):
    """One launch at a time where a sequence has segments."""
    config = GradConfig()
    nbytes = config.tiles(width).nbytes
    report = sound(build_decay_grad_chunks(config, width, replace(walk, begins=begins)), ARCH, nbytes)
    assert report.static_shared <= SLACK and nbytes + SLACK <= MOST_BYTES


def test_sums_of_the_gradient_of_log_decay():
    sound(build_decay_grad_sums(GradConfig()), ARCH)
