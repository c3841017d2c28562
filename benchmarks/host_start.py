"""The costs of a new process: the import of the bridge, and the kernels of a Llama block with Lion, forward and
backward.

A child process of `host_run`. Prints one line of JSON, in seconds: "import", the bridge's import without torch's;
"kernels", how much longer the first step takes than the second.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from time import perf_counter

import torch

HEADS, KEY_HEADS, WIDTH, TOKENS = 8, 2, 64, 256


def main() -> None:
    began = perf_counter()
    from dualops import torch_bridge as bridge

    imported = perf_counter() - began
    hidden = HEADS * WIDTH

    def weight(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(*shape, device="cuda")).bfloat16().requires_grad_()

    norms = [torch.ones(hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    query, key, value, output = (weight(hidden, n * WIDTH) for n in (HEADS, KEY_HEADS, KEY_HEADS, HEADS))
    gate, up, down = weight(hidden, 2 * hidden), weight(hidden, 2 * hidden), weight(2 * hidden, hidden)
    params = [*norms, query, key, value, output, gate, up, down]
    optimizer = bridge.optim.Lion(params, lr=1e-4, weight_decay=0.1)
    cos, sin = bridge.rope_tables(torch.arange(TOKENS, device="cuda"), WIDTH)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, WIDTH)).transpose(1, 2)

    def projections_alone(x: torch.Tensor) -> torch.Tensor:
        """Run the parts of a block that torch computes, so that their first-call costs are not counted."""
        q, k, v = (heads(x @ query) * cos.repeat(1, 2)).bfloat16(), heads(x @ key), heads(x @ value)
        x = (q + k.repeat(1, HEADS // KEY_HEADS, 1, 1) + v.repeat(1, HEADS // KEY_HEADS, 1, 1)).transpose(1, 2)
        h = x.flatten(2) @ output * norms[0] + norms[1]
        return x.flatten(2) + (torch.nn.functional.silu(h @ gate) * (h @ up)) @ down

    def block(x: torch.Tensor) -> torch.Tensor:
        h = bridge.rms_norm(x, norms[0])
        q, k = bridge.rope(heads(h @ query), heads(h @ key), cos, sin)
        o = bridge.flash_attention(q, k, heads(h @ value), causal=True)
        h, x = bridge.rms_norm(o.transpose(1, 2).flatten(2) @ output, norms[1], residual=x)
        return x + (torch.nn.functional.silu(h @ gate) * (h @ up)) @ down

    def step(function: Callable[[torch.Tensor], torch.Tensor]) -> float:
        began = perf_counter()
        x = torch.randn(2, TOKENS, hidden, device="cuda", dtype=torch.bfloat16)
        function(x).float().square().mean().backward()
        if function is block:
            optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        return perf_counter() - began

    step(projections_alone)
    first = step(block)
    step(block)
    print(json.dumps({"import": imported, "kernels": first - step(block)}))


if __name__ == "__main__":
    main()
