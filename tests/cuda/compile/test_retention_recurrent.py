"""Retention's decode step compiled: the state in accesses of 16 bytes, all of them started before threads meet."""

import re

import pytest

from dualops.cuda.launch.device import known
from dualops.cuda.retention.arguments import Variant
from dualops.cuda.retention.simt import configs
from dualops.cuda.retention.simt_recurrent import RecurrentConfig, build_recurrent
from dualops.cuda.tile.products import THREADS
from dualops.spec import ArrayMeta, retention as SPEC
from tests.cuda.compile.ptx import ptx_of, sound

ARCH = "sm_90a"
TOKEN = RecurrentConfig(8, 4, min_blocks=4)  # of D = Dv = 128
REGISTERS = 65536  # of an SM
LOAD, STORE, MEET = r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32", r"\b(?:bar|barrier)\S*sync"


def test_a_decode_step_moves_its_state_by_16_bytes() -> None:
    """One load and one store for each of a thread's rows; nothing is waited for before the last load."""
    text = ptx_of(build_recurrent(TOKEN, Variant("bfloat16", aligned=True)), ARCH)
    loads, stores, meetings = ([found.start() for found in re.finditer(x, text)] for x in (LOAD, STORE, MEET))
    assert len(loads) == len(stores) == TOKEN.state_rows and len(meetings) == 2
    assert max(loads) < min(meetings) and max(meetings) < min(stores)
    assert not re.search(r"ld\.global\S*[bf]32|ld\.shared", text[: max(loads)].replace("v4.b32", ""))


@pytest.mark.parametrize(
    ("dtype", "width", "blocks", "options"),
    [
        ("bfloat16", 128, 4, {"aligned": True}),
        ("bfloat16", 128, 4, {"aligned": True, "normalized": True, "stepwise": True}),
        ("float32", 128, 4, {"normalized": True}),
        ("bfloat16", 256, 2, {"aligned": True, "normalized": True, "stepwise": True}),
        ("float64", 256, 1, {"normalized": True}),
    ],
)
def test_as_many_blocks_fit_as_are_asked_for(dtype, width, blocks, options) -> None:
    """Of one token's kernel, where D is so wide; and nothing is spilled for it."""
    x = ArrayMeta((1, 1, 1, width), dtype, (width, width, width, 1), "cuda:0", 0)
    (config, _), *_ = configs(SPEC.bind({"q": x, "k": x, "v": x}, {"form": "recurrent"}), known(ARCH))
    assert isinstance(config, RecurrentConfig) and config.min_blocks == blocks
    report = sound(build_recurrent(config, Variant(dtype, **options)), ARCH, config.shared_bytes(dtype, width))
    assert report.registers * THREADS * blocks <= REGISTERS
