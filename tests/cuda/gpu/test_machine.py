"""What is said to be missing where a GPU is there: nothing, until it is hidden or a package is."""

import os
import subprocess
import sys

import pytest
import torch

from dualops.machine import ask_driver, missing
from tests.processes import python_path


def output_of(code: str, **environment: str) -> str:
    """What a new process prints; whatever it raises too."""
    environment = {**os.environ, "PYTHONPATH": python_path(), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


def test_nothing_is_missing():
    assert missing() == ()
    driver = ask_driver()
    assert driver.gpus == torch.cuda.device_count() and driver.major >= 12 and not driver.error


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_hidden_gpu(visible):
    found = output_of("import dualops.cuda; dualops.cuda.launch.device.current()", CUDA_VISIBLE_DEVICES=visible)
    assert f"dualops.cuda: kernels can't run on a GPU here. CUDA_VISIBLE_DEVICES is '{visible}' and leaves no" in found


def test_a_missing_package():
    code = "import sys; sys.modules['numba_cuda'] = None; from dualops.machine import missing; print(missing())"
    found = output_of(code)
    assert "numba-cuda is not installed: pip install '" in found
    assert f"[cu{min(13, ask_driver().major)}]" in found


def test_the_demo_falls_back_to_the_simulator_and_says_why():
    code = "import sys; from dualops.cli import main; sys.exit(main(['demo', 'rope_tables', '--dtype', 'float32']))"
    found = output_of(code, CUDA_VISIBLE_DEVICES="")
    assert "dualops demo: kernels run in the simulator. CUDA_VISIBLE_DEVICES is ''" in found
    assert "in the simulator, " in found
    assert ", on the GPU, " in output_of(code)
