"""Processes of the tests share several GPUs."""

from pathlib import Path

import pytest

from tests import gpus


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "FILES", str(tmp_path / "nvidia[0-9]*"))
    return tmp_path


def test_each_process_begins_with_another_gpu(files: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
        (files / name).touch()
    found = [gpus.first_gpu(number)["CUDA_VISIBLE_DEVICES"] for number in range(4)]
    assert found == ["0,1,2", "1,2,0", "2,0,1", "0,1,2"]


def test_only_visible_gpus_are_used(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8f")
    assert gpus.first_gpu(1) == {"CUDA_VISIBLE_DEVICES": "GPU-8f,3"}


@pytest.mark.parametrize("visible", [None, "", "2"])
def test_one_gpu_or_none_changes_nothing(visible: str | None, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "nvidia0").touch()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.first_gpu(1) == {}
