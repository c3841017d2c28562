"""Estimate how long a problem takes. The demo refuses problems and skips checks on this basis."""

from __future__ import annotations

from math import prod
from typing import Any

from .problems import Job

# NumPy's flops per second on two cores, float64 truth and float32 baseline together. Matrix products dominate attention
# (measured 5e9 to 9e9). Passes over whole arrays dominate all else (measured 6e7: exp, sums and copies count alike).
REFERENCE_PRODUCT_FLOPS = 5e9
REFERENCE_PASS_FLOPS = 5e7


def reference_seconds(job: Job) -> float:
    """Estimate the seconds of the truth and the baseline together."""
    return job.flops / (REFERENCE_PRODUCT_FLOPS if job.compute_bound else REFERENCE_PASS_FLOPS)


# The simulator runs a kernel as Python, one thread after another, on one core. Measured on attention and softmax,
# within a factor of three. A thread costs time at each step, even if its row does not exist: a step per key in
# attention, and a handful of loads, shuffles and barriers elsewhere. An operation costs less in a long inner product
# than by itself.
STEP_SECONDS = 20e-6
STEPS_WITHOUT_KEYS = 5
PRODUCT_FLOP_SECONDS, SINGLE_FLOP_SECONDS = 0.4e-6, 4e-6


def simulator_seconds(job: Job, plan: Any) -> float:
    """Estimate the seconds of one call under `plan`."""
    threads = sum(prod(step.grid) * step.kernel.threads for step in plan.steps)
    by_keys = "Sk" in job.problem.dims and plan.choice.rung != "naive"  # a thread of naive has one score or sum
    steps = job.problem.Sk if by_keys else STEPS_WITHOUT_KEYS
    flop_seconds = PRODUCT_FLOP_SECONDS if job.compute_bound else SINGLE_FLOP_SECONDS
    return threads * steps * STEP_SECONDS + job.flops * flop_seconds


# A run takes about this long in addition to the reference: in the simulator, the start before the first operation; on a
# GPU, compiling (if the cache has no kernel) and timing.
SIMULATOR_START, GPU_RUN = 0.02, 1.0


def run_seconds(job: Job, place: str, checked: bool) -> float:
    """Estimate the seconds of one run before its plan is known, roughly: for the time left on the demo's bar."""
    reference = reference_seconds(job)
    own = {"gpu": GPU_RUN, "simulator": SIMULATOR_START + job.flops * SINGLE_FLOP_SECONDS, "reference": reference}
    return own[place] + (reference if checked else 0)


def duration(seconds: float) -> str:
    """Format seconds in the unit that a person would use: "0.3 s", "40 s", "12 min", "3 h", "2 days"."""
    if seconds < 1:
        return f"{max(seconds, 0.1):.1f} s"
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
