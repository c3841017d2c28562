"""README's blocks that need a GPU, as printed, each in a process of its own."""

from tests.readme import run


def test_torch_tensors(tmp_path):
    assert run("torch tensors", tmp_path) == ""


def test_numba_device_arrays(tmp_path):
    output = run("Numba device arrays", tmp_path)
    assert "softmax(float32, " in output and "\nrung " in output
