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


# The simulator runs a kernel as Python, one thread after another, on one core. Measured on attention and softmax,
# within a factor of three: what a thread does at each step whether its row exists or not (a key that it meets; a
# handful of loads, shuffles and barriers elsewhere), and what an operation costs, in a long inner product or by itself.
STEP_SECONDS = 20e-6
STEPS_WITHOUT_KEYS = 5
PRODUCT_FLOP_SECONDS, SINGLE_FLOP_SECONDS = 0.4e-6, 4e-6


def simulator_seconds(job: Job, plan: Any) -> float:
    """Of one call under `plan`."""
    threads = sum(prod(step.grid) * step.kernel.threads for step in plan.steps)
    by_keys = "Sk" in job.problem.dims and plan.choice.rung != "naive"  # a thread of naive has one score, or one sum
    steps = job.problem.Sk if by_keys else STEPS_WITHOUT_KEYS
    flop_seconds = PRODUCT_FLOP_SECONDS if job.compute_bound else SINGLE_FLOP_SECONDS
    return threads * steps * STEP_SECONDS + job.flops * flop_seconds


# Beside the reference's work a run takes about so long: in the simulator the little that comes before the first
# operation; on a GPU compiling, where the cache has no kernel, and being timed.
SIMULATOR_START, GPU_RUN = 0.02, 1.0


def run_seconds(job: Job, place: str, checked: bool) -> float:
    """Of one run before anything is known of its plan, roughly: what the time left on the demo's bar follows from."""
    reference = reference_seconds(job)
    own = {"gpu": GPU_RUN, "simulator": SIMULATOR_START + job.flops * SINGLE_FLOP_SECONDS, "reference": reference}
    return own[place] + (reference if checked else 0)


def duration(seconds: float) -> str:
    """In the unit that a person would use: "0.3 s", "40 s", "12 min", "3 h", "2 days"."""
    if seconds < 1:
        return f"{max(seconds, 0.1):.1f} s"
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
