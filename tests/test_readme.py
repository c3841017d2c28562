"""README as its reader would use it: its blocks run as printed; tests/cuda/gpu has those that need a GPU."""

import re
import shlex
import tomllib

import numpy as np

from dualops import reference
from tests.processes import ROOT, printed
from tests.readme import BLOCKS, README, run
from tests.wheel import install_lines, wrong_files


def test_what_extras_it_names_there_are():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = {extra for group in re.findall(r"dualops\[([\w,]+)\]", README) for extra in group.split(",")}
    assert named == {"cu13", "torch", "transformers"} <= extras.keys()


def test_it_installs_nothing_that_is_not_published():
    """dualops itself comes from a path or a URL."""
    assert set(re.findall(r"pip install '?dualops(?:\[[\w,]+\])?(...)", README)) == {" @ "}


def test_make_wheel_runs_its_lines_that_install():
    assert install_lines().keys() == {"", "[cu13]"}


def test_make_wheel_finds_what_does_not_belong_and_what_is_missing():
    found = wrong_files(["dualops/__init__.py", "dualops/new.py", "tests/test_readme.py"])
    assert {"dualops/py.typed is missing", "there is no license"} < set(found)
    assert {"dualops/new.py does not belong there", "tests/test_readme.py does not belong there"} < set(found)
    assert "dualops/__init__.py is missing" not in found


def test_a_hugging_face_model(tmp_path):
    assert run("A Hugging Face model", tmp_path) == ""


def test_laptop(tmp_path):
    switch, program, *words = shlex.split(BLOCKS["A laptop"])
    assert program == "python"
    output = printed(*words, cwd=tmp_path, **dict([switch.split("=")]))
    assert re.findall(r"0\.\d{4}", output) == ["0.5761", *["0.2119"] * 3] * 2 + ["0.5761"]


def test_reference(tmp_path):
    assert run("The reference", tmp_path) == ""


def test_oracle(tmp_path):
    assert run("The oracle", tmp_path) == ""


def test_your_own_arrays(tmp_path):
    q = np.random.default_rng(0).standard_normal((1, 1, 20, 8)).astype(np.float32)
    np.savez(tmp_path / "qkv.npz", q=q, k=q, v=q)
    commands = [line.partition("#")[0].split() for line in BLOCKS["Your own arrays, no code"].splitlines()]
    assert all(command[:3] == ["python", "-m", "dualops"] for command in commands)
    demos = [command[1:] for command in commands if command[3] not in ("check", "tune", "warm")]
    outputs = [printed(*words, cwd=tmp_path) for words in demos]
    assert len(outputs) == 3
    assert "flash_attention  1 of 1 within tolerance" in outputs[0] and "wrote o.npz: o 1×1×20×8 float32" in outputs[0]
    o = reference.flash_attention(q, q, q, causal=True)
    np.testing.assert_allclose(np.load(tmp_path / "o.npz")["o"], o, rtol=0, atol=1e-5)
    assert "rms error" not in outputs[0] and "rms error" in outputs[1]
    assert "on NVIDIA H200" in outputs[2] and "\nbackward\n" in outputs[2]
