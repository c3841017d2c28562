"""A Llama whose attention, norms and rotary embeddings are dualops'."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dualops.torch_bridge.integrations.transformers import patch

torch.manual_seed(0)
config = LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)  # or LlamaForCausalLM.from_pretrained(...)
tokens = torch.randint(99, (2, 32))  # [B, S]
eager = model(tokens, labels=tokens)

undo = patch(model)
ours = model(tokens, labels=tokens)
ours.loss.backward()
print("logits agree:", torch.allclose(ours.logits, eager.logits, atol=1e-5))
print("all have a gradient:", all(p.grad is not None for p in model.parameters()))
undo()
