"""The command as a process: what it imports, `info`, and the demo on real kernels in the simulator."""

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import numpy as np

from dualops import reference
from dualops.cli.estimate import duration
from tests import processes
from tests.processes import AS_A_USER, python_path

python = partial(processes.python, COLUMNS="80")


def test_the_command_line_imports_neither_numba_nor_torch():
    """Numba reads its switch when it is imported: `demo` must be able to set it first."""
    done = python("-c", "import sys, dualops.cli; print(sorted({'numba', 'torch', 'cuda'} & sys.modules.keys()))")
    assert done.stdout == "[]\n", done.stderr


def test_info(tmp_path):
    (tmp_path / "one.cubin").write_bytes(bytes(2048))
    done = python("-m", "dualops", "info", DUALOPS_CACHE_DIR=str(tmp_path), NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    for name in ("python", "dualops", "numba", "numba-cuda", "cuda-core", "numpy", "ml_dtypes", "torch", "device"):
        assert name in names
    assert f"{tmp_path}: 1 kernels, 2 KiB" in " ".join(done.stdout.split())  # a long path makes more lines of it
    assert "the simulator" in done.stdout


def test_info_where_the_cache_can_not_be_entered(tmp_path):
    """As in a container with --user 1000 and HOME=/root. All is imported before: Python may lie there too."""
    (tmp_path / "closed").mkdir(mode=0)
    program = f"from dualops.cli import main\nmain(['info'])\n{AS_A_USER}\nraise SystemExit(main(['info']))"
    folder = tmp_path / "closed" / "below"
    done = python("-c", program, DUALOPS_CACHE_DIR=str(folder), NUMBA_ENABLE_CUDASIM="1", COLUMNS="500")
    assert done.returncode == 0, done.stderr
    assert f"{folder}: not used, Permission denied" in " ".join(done.stdout.split())


def test_info_where_others_may_write_to_the_cache(tmp_path):
    tmp_path.chmod(0o770)
    done = python("-m", "dualops", "info", DUALOPS_CACHE_DIR=str(tmp_path), NUMBA_ENABLE_CUDASIM="1", COLUMNS="500")
    assert done.returncode == 0 and "Warning" not in done.stderr
    assert f"{tmp_path}: not used, other users may write to it (mode 0770)" in " ".join(done.stdout.split())


def test_demo_in_the_simulator(tmp_path):
    """Real kernels, the user's arrays, no line lost on a narrow terminal."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, 20, 16)).astype(np.float32) for heads in (2, 1, 1))
    np.savez(tmp_path / "qkv.npz", q=q, k=k, v=v)
    arguments = ("--input", tmp_path / "qkv.npz", "--output", tmp_path / "o.npz", "--param", "causal=True")
    done = python("-m", "dualops", "demo", "flash_attention", *arguments, "--where", "simulator")
    assert done.returncode == 0, done.stderr
    assert "flash_attention  1 of 1 within tolerance, worst at " in done.stdout
    assert f"\nwrote {tmp_path / 'o.npz'}: o 1×2×20×16 float32\n" in done.stdout
    assert "\n1 of 1 within tolerance, in the simulator, " in done.stdout
    verbose = python("-m", "dualops", "demo", "flash_attention", *arguments, "--where", "simulator", "--verbose")
    assert "simt" in verbose.stdout and "q 1×2×20×16" in verbose.stdout
    o = np.load(tmp_path / "o.npz")["o"]
    np.testing.assert_allclose(o, reference.flash_attention(q, k, v, causal=True), rtol=0, atol=1e-5)


def test_check_builds_real_kernels():
    """Its first two lines: that the whole list is as it must be is for tests/cuda/compile."""
    command = [sys.executable, "-m", "dualops", "check", "lion", "--json", "--arch", "sm_80"]
    if find_spec("numba_cuda") is None:  # a system that NVIDIA publishes no compiler for
        assert python(*command[1:]).returncode == 2
        return
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout
        found = [json.loads(running.stdout.readline()) for _ in range(2)]
        running.kill()
    assert {one["arch"] for one in found} == {"sm_80"} and len({one["name"] for one in found}) == 2
    for one in found:
        assert one["registers"] > 0 and one["cubin_bytes"] > 0 and one["seconds"] > 0


def test_durations_are_formatted_in_readable_units():
    texts = [duration(seconds) for seconds in (0, 0.26, 3.4, 119, 121, 7199, 7201, 200000)]
    assert texts == ["0.1 s", "0.3 s", "3 s", "119 s", "2 min", "120 min", "2 h", "2 days"]
