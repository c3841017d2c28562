"""Train a Llama of a billion parameters: on dualops in bfloat16, compared with eager bfloat16 and float32.

    python -m benchmarks training --json FILE

All three start from the same random weights, in float32, and see the same batches. dualops is what a user gets in two
lines: `patch(model)` and `torch_bridge.optim.Lion`. The others run transformers' own modules on torch's
scaled_dot_product_attention, and Lion written out in torch. In bfloat16 both optimizers keep float32 copies of the
weights: Lion's steps are smaller than the last bit of most of them.

Sequences are made so that there is something to learn in 30 steps: of a vocabulary of 32,000 tokens 256 occur, and
after each of them one other follows nine times out of ten. So the loss falls from ln 32000 = 10.4 over ln 256 = 5.5
towards 0.9, the entropy of that rule.

Time is the host's, from a step's begin to the end of its work on the GPU. The first step compiles kernels and is shown
separately. Memory is the peak of torch's allocations, including weights and optimizer.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .comparison import commit
from .training_plot import EXACT
from .tree import ROOT

SYMBOLS, FOLLOWS = 256, 0.9  # number of tokens that occur, and the probability of the rule
BETAS, WEIGHT_DECAY, WARM_UP = (0.9, 0.99), 0.1, 5
SKIPPED = 3  # first steps, with compilation and allocations, that do not count in the time per step
OURS = "dualops, bfloat16"
WHO = (OURS, "eager, bfloat16", EXACT)


@dataclass(frozen=True)
class Size:
    """The sizes of a model and of its training data."""

    config: dict[str, Any]
    batch: int
    length: int
    lr: float


LLAMA_1B = Size(
    {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 2048,
    },
    batch=4,
    length=1024,
    lr=1e-4,
)
TINY = Size(  # for a CPU
    {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    },
    batch=2,
    length=24,
    lr=3e-3,
)


@dataclass(frozen=True)
class Run:
    """One training: a loss and a time for each step."""

    who: str
    losses: list[float]
    seconds: list[float]
    peak_memory: int | None  # bytes; None on a CPU

    @property
    def step(self) -> float:
        """Seconds per step, after compilation."""
        return median(self.seconds[SKIPPED:] or self.seconds)


def run(size: Size, *, steps: int, device: str, show: Callable[[str], None]) -> list[Run]:
    """Train all three, and show each when it is done."""
    found = []
    for who in WHO:
        found.append(trained(who, size, steps=steps, device=device))
        show(line(found[-1]))
    return found


def trained(who: str, size: Size, *, steps: int, device: str) -> Run:
    model = make_model(size, device)
    if who != EXACT:
        model.to(torch.bfloat16)
    if who == OURS:
        from dualops.torch_bridge.integrations.transformers import patch
        from dualops.torch_bridge.optim import Lion

        patch(model)
        more: dict[str, Any] = {"betas": BETAS, "weight_decay": WEIGHT_DECAY, "master_weights": True}
        optimizer: Any = Lion(model.parameters(), size.lr, **more)
    else:
        optimizer = PlainLion(model.parameters(), size.lr)
    gc.collect()
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for number, ids in enumerate(batches(size, steps, device)):
        for group in optimizer.param_groups:
            group["lr"] = size.lr * min(1.0, (number + 1) / WARM_UP)
        started = perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))  # waits for everything except the optimizer's step
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(perf_counter() - started)
    return Run(who, losses, seconds, torch.cuda.max_memory_allocated() if on_gpu else None)


def make_model(size: Size, device: str) -> Any:
    """Return a model with random float32 weights, the same in each call on a device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    more: dict[str, Any] = {"tie_word_embeddings": False, "attn_implementation": "sdpa"}
    torch.manual_seed(0)
    with torch.device(device):
        made = LlamaForCausalLM(LlamaConfig(**size.config, **more))
    return made.float().train()


def batches(size: Size, steps: int, device: str) -> Iterator[Tensor]:
    """Yield token ids [batch, length], the same in each call."""
    generator = torch.Generator().manual_seed(1)
    symbols = torch.randperm(size.config["vocab_size"], generator=generator)[:SYMBOLS]
    follower = torch.randperm(SYMBOLS, generator=generator)
    for _ in range(steps):
        drawn = torch.randint(SYMBOLS, (size.batch, size.length), generator=generator)
        ruled = torch.rand((size.batch, size.length), generator=generator) < FOLLOWS
        for place in range(1, size.length):
            drawn[:, place] = torch.where(ruled[:, place], follower[drawn[:, place - 1]], drawn[:, place])
        yield symbols[drawn].to(device)


def entropy() -> float:
    """Return the entropy of a token given the previous one: a lower bound of the expected loss."""
    other = (1 - FOLLOWS) / SYMBOLS
    ruled = FOLLOWS + other
    return -(ruled * math.log(ruled) + (SYMBOLS - 1) * other * math.log(other))


class PlainLion:
    """Lion, line by line in torch and float32; 16-bit parameters have float32 copies."""

    def __init__(self, params: Iterable[Tensor], lr: float):
        self.params = list(params)
        self.param_groups: list[dict[str, Any]] = [{"lr": lr}]
        self.momenta = [torch.zeros_like(p) for p in self.params]
        self.masters = [p.detach() if p.dtype is torch.float32 else p.detach().float() for p in self.params]

    @torch.no_grad()
    def step(self) -> None:
        beta1, beta2 = BETAS
        (group,) = self.param_groups
        for p, m, master in zip(self.params, self.momenta, self.masters, strict=True):
            g, old = (p.new_zeros(()) if p.grad is None else p.grad).float(), m.float()
            direction = (beta1 * old + (1 - beta1) * g).sign()
            master.mul_(1 - group["lr"] * WEIGHT_DECAY).sub_(group["lr"] * direction)
            m.copy_(beta2 * old + (1 - beta2) * g)
            if master is not p:
                p.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.params:
            p.grad = None


def distance(one: Run, two: Run) -> float:
    """Return the largest difference of their losses."""
    return max(abs(x - y) for x, y in zip(one.losses, two.losses, strict=True))


def line(run: Run) -> str:
    memory = "" if run.peak_memory is None else f", {run.peak_memory / 2**30:.1f} GiB"
    return f"{run.who}: loss {run.losses[0]:.3f} to {run.losses[-1]:.3f}, {1e3 * run.step:.1f} ms per step{memory}"


def table(runs: list[Run]) -> str:
    """Summarize the runs in a few lines; the last one says whether the curves agree."""
    ours, eager, exact = runs
    rows = [f"{'':18}{'first loss':>11}{'last':>9}{'from float32':>14}{'ms per step':>13}{'first step':>12}{'GiB':>7}"]
    for one in runs:
        memory = "–" if one.peak_memory is None else f"{one.peak_memory / 2**30:.1f}"
        row = (f"{one.losses[0]:.4f}", f"{one.losses[-1]:.4f}", f"{distance(one, exact):.4f}", f"{1e3 * one.step:.1f}")
        widths = zip(row, (11, 9, 14, 13), strict=True)
        cells = "".join(f"{text:>{width}}" for text, width in widths)
        rows.append(f"{one.who:18}{cells}{one.seconds[0]:>10.1f} s{memory:>7}")
    noise, off = distance(eager, exact), distance(ours, exact)
    verdict = "within" if off <= 2 * noise else "BEYOND"
    rows.append(f"{verdict} bfloat16's noise: {off:.4f} from float32 at most, eager {noise:.4f}, twice that is allowed")
    return "\n".join(rows)


def document(runs: list[Run], size: Size, device: str) -> dict[str, Any]:
    """Return the content of the file that `training_plot` reads."""
    import transformers

    return {
        "model": size.config,
        "parameters": sum(p.numel() for p in make_model(size, "meta").parameters()),
        "batch": size.batch,
        "length": size.length,
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit(ROOT),
        "floor": entropy(),
        "runs": [{**asdict(one), "step": one.step} for one in runs],
    }
