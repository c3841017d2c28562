"""A Llama on two processes, which split documents and parameters: context parallelism, FSDP2 and Lion.

torchrun --nproc-per-node 2 context_parallel.py
"""

import os

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from dualops.torch_bridge.distributed import positions, shard
from dualops.torch_bridge.integrations.transformers import patch
from dualops.torch_bridge.optim import Lion

here, local = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
kind = "cuda" if torch.cuda.device_count() >= local else "cpu"
if kind == "cuda":
    torch.cuda.set_device(here)
started = {} if "RANK" in os.environ else {"init_method": "tcp://localhost:0", "rank": 0, "world_size": 1}
distributed.init_process_group("nccl" if kind == "cuda" else "gloo", **started)
size = distributed.get_world_size()
group = init_device_mesh(kind, (size,))

torch.manual_seed(0)  # the same weights and documents in every process
config = LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
with torch.device(kind):
    model = LlamaForCausalLM(config)
patch(model, context_parallel=group)
for layer in model.model.layers:
    fully_shard(layer, mesh=group)
fully_shard(model, mesh=group)
optimizer = Lion(model.parameters(), lr=1e-3)

cu_seqlens = [0, 300, 330, 331, 420]  # four documents: where each begins, and the end
tokens = (torch.arange(420, device=kind) ** 2 + 1) % 64
following = tokens.roll(-1)  # the target of each token ...
following[[end - 1 for end in cu_seqlens[1:]]] = -100  # ... except the last of a document
count = (following != -100).sum()


def mine(x):
    """Return this process's part of all tokens."""
    return shard(x, 0, group, cu_seqlens=cu_seqlens)


inputs = {"input_ids": mine(tokens)[None], "position_ids": positions(cu_seqlens, group)[None]}
losses = []
for _ in range(10):
    logits = model(**inputs, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, use_cache=False).logits[0]
    loss = cross_entropy(logits, mine(following), ignore_index=-100, reduction="sum") / count
    (loss * size).backward()  # FSDP averages gradients over the processes, and this loss is a sum
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()
    distributed.all_reduce(total)
    losses.append(total.item())

if distributed.get_rank() == 0:
    print("losses:", *(f"{loss:.3f}" for loss in losses))
distributed.destroy_process_group()
