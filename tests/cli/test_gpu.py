"""The demo's GPU path, with the host in the GPU's place: what is timed and printed. The rest needs a GPU."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dualops.cli import gpu
from dualops.cli.gpu import BURST_SECONDS, BURSTS, CALLS, FLUSH, Bench, TwoBytes
from dualops.cli.own import own_jobs
from dualops.cli.problems import Job, tasks
from dualops.cuda.compiler import cache
from dualops.spec import ArrayMeta
from dualops.spec.meta import numpy_dtype

from .fakes import cuda

L2 = 1 << 20


class Host:
    """Arrays stay where they are; each event pair says a millisecond a call, or what `each` was set to."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.each, self.spans = calls, 1.0, 0

    def upload(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def download(self, array: np.ndarray) -> np.ndarray:
        return array

    def milliseconds(self, work: Callable[[], None]) -> float:
        before = len(self.calls)
        work()
        self.spans += 1
        return (len(self.calls) - before) * self.each * (1 if self.spans != 3 else 50)  # other work disturbed the third

    def peak_bytes(self, work: Callable[[], None]) -> int | None:
        work()
        return 4096


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    """A GPU that is not one: 1 MiB of L2, and a roof of 1e9 bytes a second for reading, half of that for writing."""
    operators = cuda()
    stand_ins = {
        "": operators,
        ".compiler.backend": SimpleNamespace(SIMULATED=False),
        ".launch.device": SimpleNamespace(
            ARCHITECTURES=(),
            current=lambda: SimpleNamespace(
                name="Host", arch="sm_90a", sms=1, l2_bytes=L2, shared_memory_per_block=227 << 10
            ),
        ),
        ".tuning.roof": SimpleNamespace(
            stream_roof=lambda read, written: read / 1e9 + written / 5e8, ceilings=lambda: {"1:1": 4.2e12}
        ),
        ".compiler.cache": cache,
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, f"dualops.cuda{name}", module)  # type: ignore[misc]
    monkeypatch.setenv("DUALOPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("dualops.cli.place.missing", tuple)
    made = Host(operators.calls)
    monkeypatch.setattr(gpu, "library", lambda: made)
    return made


def bench(name: str) -> Bench:
    job = own_jobs(tasks()[name], "simulator", {}, "float32")[-1]
    return Bench(job, job.load(), None)


def bench_of_rows(rows: int, columns: int) -> Bench:
    x = np.zeros((rows, columns), np.float32)
    task = tasks()["softmax"]
    return Bench(Job(task, "rows", task.bind({"x": ArrayMeta.of_numpy(x)}, {}), {}, dict), {"x": x}, None)


def test_memory_bound_calls_go_round_more_than_the_l2(host):
    made = bench_of_rows(512, 1024)
    assert made.job.bytes_moved == 2 * 512 * 1024 * 4
    assert len(made.inputs) * made.job.bytes_moved >= FLUSH * L2
    assert (len(made.inputs) - 1) * made.job.bytes_moved < FLUSH * L2


def test_small_problems_are_not_copied_without_end(host):
    assert len(bench_of_rows(4, 32).inputs) == gpu.MAX_SETS


def test_time_is_the_median_of_bursts(host):
    assert bench("softmax").seconds() == pytest.approx(1e-3)
    assert host.spans == 1 + BURSTS  # the first says how many calls make a burst
    assert len(host.calls) == 2 + CALLS * (1 + BURSTS)


def test_slow_calls_make_short_bursts(host):
    host.each = 250.0
    assert bench("softmax").seconds() == pytest.approx(0.25)
    assert len(host.calls) == 2 + BURST_SECONDS / 0.25 * (1 + BURSTS)
    host.each, host.spans = 5e3, 0
    assert bench("softmax").seconds() == pytest.approx(5)


def test_a_seed_stays_on_the_host_and_options_go_up(host):
    made = bench("flash_attention_varlen")
    (inputs,) = made.inputs[:1]
    assert type(inputs["seed"]) is int
    assert inputs["cu_seqlens_q"].dtype == np.int32
    assert np.isfinite(made.results()["o"]).all()


def test_roof_is_that_of_the_same_bytes(host):
    made = bench("softmax_backward")
    elements = made.job.bytes_moved / 12
    assert made.roof_seconds() == pytest.approx(elements * (8 / 1e9 + 4 / 5e8))


def test_results_are_poisoned_before_the_launch(host):
    made = bench("softmax")
    assert np.isnan(made.outs[0]["y"]).all()
    assert np.isfinite(made.results()["y"]).all()


def test_table_tells_speed_and_roof(run, host, tmp_path):
    x = np.random.default_rng(0).standard_normal((1000, 500)).astype(np.float32)
    np.savez(tmp_path / "in.npz", x=x)
    code, out, _ = run("demo", "softmax", "--input", tmp_path / "in.npz", "--verbose")
    assert code == 0
    # 4 MB in a millisecond; the roof of 2 MB read and 2 MB written is 6 ms
    for words in ("gpu", "1 ms", "0.004 TB/s", "600 %", "4 KiB"):
        assert words in out


def test_compute_bound_problems_tell_arithmetic_and_no_roof(run, host, tmp_path):
    q = np.random.default_rng(0).standard_normal((1, 1, 512, 64)).astype(np.float32)
    np.savez(tmp_path / "in.npz", q=q, k=q, v=q)
    code, out, _ = run("demo", "flash_attention", "--input", tmp_path / "in.npz", "--verbose")
    assert code == 0
    assert "TFLOP/s" in out and "–" in out and "TB/s" not in out


def test_info_tells_device_and_ceilings(run, host):
    code, out, _ = run("info")
    assert code == 0
    for words in ("Host, sm_90a, 1 SMs", "L2 1 MiB, shared memory per block 227 KiB", "read:write 1:1", "4.20 TB/s"):
        assert words in out


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_arrays_come_back_from_torch_bit_for_bit(dtype):
    import torch

    x = np.random.default_rng(0).standard_normal((3, 5)).astype(numpy_dtype(dtype))
    library = gpu.Torch(torch, device="cpu")
    there = library.upload(x)
    assert str(there.dtype) == f"torch.{dtype}"
    assert torch.equal(there.double(), torch.from_numpy(x.astype(np.float64)))
    back = library.download(there)
    assert back.dtype == x.dtype and back.tobytes() == x.tobytes()


def test_bfloat16_without_torch_shows_two_bytes_an_element():
    bits = SimpleNamespace(
        __cuda_array_interface__={"shape": (3,), "typestr": "<u2", "data": (256, False), "version": 3}
    )
    shown = TwoBytes(bits).__cuda_array_interface__
    assert shown == {"shape": (3,), "typestr": "<V2", "data": (256, False), "version": 3}
    assert np.dtype(shown["typestr"]).itemsize == numpy_dtype("bfloat16").itemsize
