"""The host's time per call, compared with torch's own call in the same process; and the start of a process.

    python -m benchmarks host --json benchmarks/host/h200.json

Tensors are tiny, so that a loop never waits for the GPU. A figure is the median of batches of calls, with dualops and
torch in turns. For new lengths, it is the median of calls with a new length each. A start is measured in a new process
(`host_start`): first without cubins on the disk, then with those that the first process left. A first call is measured
in a new process (`first_call`) without cubins on the disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .cases import require_gpu
from .comparison import commit
from .first_call import FIRST_CALLS
from .tree import ROOT

Call = Callable[[], object]
BATCHES, CALLS = 60, 100  # a queue of the GPU holds a thousand launches: a batch must not fill it
LENGTHS = 400  # that were never seen


@dataclass(frozen=True)
class Row:
    """Seconds of dualops and of torch; and the target: at most `times` torch's, or at most `most` seconds."""

    name: str
    seconds: float
    torch: float | None = None
    times: float | None = None
    most: float | None = None

    @property
    def reached(self) -> bool | None:
        if self.torch is not None and self.times is not None:
            return self.seconds <= self.times * self.torch
        return None if self.most is None else self.seconds <= self.most


def run(show: Callable[[str], None]) -> list[Row]:
    """Measure all rows, and show each when it is done."""
    require_gpu()
    found = []
    for row in (*calls(), *new_lengths(), *starts()):
        show(line(row))
        found.append(row)
    return found


def batch(call: Call) -> float:
    """Measure seconds per call, over CALLS calls."""
    torch.cuda.synchronize()
    began = perf_counter()
    for _ in range(CALLS):
        call()
    seconds = (perf_counter() - began) / CALLS
    torch.cuda.synchronize()
    return seconds


def paired(ours: Call, theirs: Call) -> tuple[float, float]:
    """Measure the seconds of both, in turns."""
    for call in (ours, theirs) * 2:
        batch(call)
    both = [(batch(ours), batch(theirs)) for _ in range(BATCHES)]
    return median(one for one, _ in both), median(other for _, other in both)


def calls() -> Iterator[Row]:
    """Measure calls with known layouts."""
    import dualops.cuda as cuda
    from dualops import torch_bridge as bridge

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, w, dy = numbers(128, 128), numbers(128), numbers(128, 128)
    q, k, v = numbers(1, 8, 128, 64), numbers(1, 8, 128, 64), numbers(1, 8, 128, 64)
    with torch.no_grad():
        both = paired(lambda: cuda.softmax(x), lambda: torch.softmax(x, -1))
        yield Row("cuda.softmax", *both, times=1.3)
        both = paired(lambda: bridge.softmax(x), lambda: torch.softmax(x, -1))
        yield Row("bridge softmax, no grad", *both, times=1.3)
        both = paired(lambda: bridge.flash_attention(q, k, v), lambda: functional.scaled_dot_product_attention(q, k, v))
        yield Row("bridge attention, no grad", *both)
    for leaf in (x, w, q, k, v):
        leaf.requires_grad_()
    yield Row("bridge softmax, forward", *paired(lambda: bridge.softmax(x), lambda: torch.softmax(x, -1)), times=2.0)
    both = paired(lambda: bridge.flash_attention(q, k, v), lambda: functional.scaled_dot_product_attention(q, k, v))
    yield Row("bridge attention, forward", *both, times=1.3)
    both = paired(lambda: bridge.rms_norm(x, w), lambda: functional.rms_norm(x, (128,), w))
    yield Row("bridge rms_norm, forward", *both)

    def step(forward: Callable[[], Tensor]) -> Call:
        return lambda: torch.autograd.grad(forward(), (x, w), dy)

    both = paired(step(lambda: bridge.rms_norm(x, w)), step(lambda: functional.rms_norm(x, (128,), w)))
    yield Row("bridge rms_norm, forward and backward", *both, times=1.5)


def new_lengths() -> Iterator[Row]:
    """Measure calls with a new length, on which their kernel does not depend."""
    import dualops.cuda as cuda

    def each(call: Callable[[Tensor], object], arguments: Iterable[Tensor]) -> float:
        seconds = []
        for argument in arguments:
            began = perf_counter()
            call(argument)
            seconds.append(perf_counter() - began)
        return median(seconds)

    w = torch.ones(128, device="cuda", dtype=torch.bfloat16)
    rows = [torch.zeros(M, 128, device="cuda", dtype=torch.bfloat16) for M in range(3, 3 + LENGTHS)]
    yield Row("cuda.softmax, a new M", each(cuda.softmax, rows), most=25e-6)
    yield Row("cuda.rms_norm, a new M", each(lambda x: cuda.rms_norm(x, w), rows))
    q = torch.zeros(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    keys = [torch.zeros(1, 2, Sk, 64, device="cuda", dtype=torch.bfloat16) for Sk in range(300, 300 + LENGTHS)]
    yield Row("cuda.flash_attention, Sk one longer", each(lambda k: cuda.flash_attention(q, k, k), keys), most=30e-6)


def starts() -> Iterator[Row]:
    """Measure new processes. One that is not measured writes Python's bytecode."""
    with tempfile.TemporaryDirectory() as folder:
        started(folder, "first_call", "gradient")
    for name, first in FIRST_CALLS.items():
        with tempfile.TemporaryDirectory() as folder:
            yield Row(first.title, started(folder, "first_call", name)["first"], most=first.most)
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = started(folder, "host_start"), started(folder, "host_start")
    yield Row("kernels of a Llama block, nothing on the disk", cold["kernels"], most=5.0)
    yield Row("kernels of a Llama block, from the disk", warm["kernels"], most=0.1)
    yield Row("import dualops.torch_bridge beyond torch", warm["import"], most=0.4)


def started(cache: str, program: str, *words: str) -> dict[str, float]:
    """Return the measurements of a program of `benchmarks` in a process with its cubins in folder `cache`, and cached
    bytecode.
    """
    environment = {**os.environ, "DUALOPS_CACHE_DIR": cache, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", f"{__package__}.{program}", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"{command[2]} failed and said nothing")
    return json.loads(done.stdout.splitlines()[-1])


def line(row: Row) -> str:
    """`bridge softmax, forward     12.3 µs   torch 8.1 µs   1.52 x, at most 2.0 x: reached`."""
    parts = [f"{row.name:48}", f"{format_seconds(row.seconds):>10}"]
    if row.torch is not None:
        parts.append(f"torch {format_seconds(row.torch):>10}   {row.seconds / row.torch:5.2f} x")
    if row.reached is not None:
        limit = f"{row.times} x" if row.times is not None else format_seconds(row.most or 0.0)
        parts.append(f"at most {limit}: {'reached' if row.reached else 'MISSED'}")
    return "   ".join(parts)


def format_seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds:.3f} s"


def document(rows: Iterable[Row]) -> dict[str, Any]:
    """Return the content for `--json`."""
    return {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(ROOT),
        "cpus": os.cpu_count(),
        "rows": [asdict(row) | {"reached": row.reached} for row in rows],
    }


def save(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(rows), indent=1) + "\n")
