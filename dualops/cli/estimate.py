"""How long a problem takes before it is run: what the demo refuses, and what it leaves unchecked, follow from these."""

from __future__ import annotations

from math import prod
from typing import Any

from .problems import Job

# Flops a second of NumPy on two cores, float64 truth and float32 baseline together. A matrix product carries attention
# (measured 5e9 to 9e9), passes over whole arrays carry all else (measured 6e7: exp, sums and copies count alike).
REFERENCE_PRODUCT_FLOPS = 5e9
REFERENCE_PASS_FLOPS = 5e7


def reference_seconds(job: Job) -> float:
    """Of the truth and the baseline that a result is held against."""
    return job.flops / (REFERENCE_PRODUCT_FLOPS if job.compute_bound else REFERENCE_PASS_FLOPS)


# The simulator runs kernels as Python, one thread after another.
SIMULATOR_FLOPS = 2e6
SIMULATOR_THREADS = 2e4


def simulator_seconds(job: Job, plan: Any) -> float:
    """Of one call under `plan`: its arithmetic, and the threads that have to be begun whether they work or not."""
    threads = sum(prod(step.grid) * step.kernel.threads for step in plan.steps)
    return job.flops / SIMULATOR_FLOPS + threads / SIMULATOR_THREADS


def duration(seconds: float) -> str:
    """In the unit that a person would use: "40 s", "12 min", "3 h", "2 days"."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
