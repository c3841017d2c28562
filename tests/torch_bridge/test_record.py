"""What is kept of the bridge's calls, for the kernels to be compiled before tests on a GPU need them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np

from dualops import reference
from dualops.cuda import device as devices
from dualops.spec import OPERATORS
from tests.cuda.calls import Call, steps_of
from tests.cuda.gpu.warm import recorded_calls
from tests.torch_bridge.record import Recorder

ROOT = Path(__file__).parents[2]


def test_calls_of_tests(tmp_path: Path) -> None:
    """Forward and backward of a test, as the bridge made them, by whichever way; and what other tests asked is not."""
    test = "tests/torch_bridge/test_llama.py::test_checkpointing_draws_the_same_seeds_again"
    environment = {**os.environ, "DUALOPS_TEST_CALLS": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", test, "-k", "cpu"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    calls = list(recorded_calls(tmp_path))
    made = {(call.operator, call.backward) for call in calls}
    assert made == {
        (name, backward) for name in ("flash_attention", "rms_norm", "rope") for backward in (False, True)
    } | {("rope_tables", False)}
    assert {call.params["dropout_p"] for call in calls if call.operator == "flash_attention"} == {0.25}
    assert all(steps_of(call, devices.known("sm_90a")) for call in calls)


def test_what_cannot_be_handed_to_another_process_is_left_out(tmp_path: Path) -> None:
    recorder = Recorder()
    q = np.zeros((1, 1, 4, 8), np.float32)
    spec = OPERATORS["flash_attention"]
    recorder.note(spec, False, {"q": q, "k": q, "v": q, "score_mod": lambda score, b, h, i, j: score})
    for _ in range(2):
        recorder.note(spec, False, {"q": q, "k": q, "v": q[..., :3], "causal": True})
    recorder.note(OPERATORS["lion"], False, {"params": [q], "grads": [q], "momenta": [q], "lr": 0.1})
    recorder.write(tmp_path)
    (call,) = recorded_calls(tmp_path)
    assert isinstance(call, Call) and call.params == {"causal": True}
    assert call.arrays["v"].strides == (32, 32, 8, 1) and call.arrays["q"].device == "cuda:0"
    assert pickle.loads(pickle.dumps(call)) == call


def test_only_what_the_bridge_asks_is_kept() -> None:
    recorder = Recorder()
    noting = recorder.noting(OPERATORS["softmax"], False, reference.softmax)
    x = np.ones((2, 4), np.float32)
    assert np.array_equal(noting(x=x, axis=-1), np.full_like(x, 0.25))
    assert recorder.calls == {}
