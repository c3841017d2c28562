"""The first attention call of a process: `python -m benchmarks.first_call NAME`.

A child process of `host_run`. Prints one line of JSON: {"first": seconds}. Before the call, the process has imported
torch and dualops, and torch has run its own attention and gradient once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class First(NamedTuple):
    """A call, with bfloat16 heads of 128, and the seconds that it should take at most."""

    title: str
    options: dict[str, Any]
    most: float
    gradient: bool = False


FIRST_CALLS = {
    "forward": First("first attention call, causal", {"causal": True}, 3.0),
    "gradient": First("first attention call and its gradient, causal", {"causal": True}, 4.0, gradient=True),
    "softcap": First("first attention call, causal with softcap", {"causal": True, "softcap": 30.0}, 4.5),
}


def main() -> None:
    from dualops import torch_bridge as bridge

    first = FIRST_CALLS[sys.argv[1]]
    heads = [torch.randn(2, 8, 2048, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    inputs, do = [head.requires_grad_(first.gradient) for head in heads[:3]], heads[3]

    def seconds(attention: Callable[..., Tensor]) -> float:
        began = perf_counter()
        o = attention(*inputs)
        if first.gradient:
            o.backward(do)
        torch.cuda.synchronize()
        return perf_counter() - began

    seconds(functional.scaled_dot_product_attention)  # torch imports modules in its first gradient
    print(json.dumps({"first": seconds(lambda *x: bridge.flash_attention(*x, **first.options))}))


if __name__ == "__main__":
    main()
