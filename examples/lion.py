"""Train with Lion: bfloat16 parameters, float32 master weights, a falling learning rate."""

import torch
from torch.nn.functional import mse_loss

from dualops.torch_bridge.optim import Lion

torch.manual_seed(0)
x = torch.randn(512, 16)  # [batch, features]
wanted = torch.nn.Linear(16, 4)
model = torch.nn.Linear(16, 4).bfloat16()

params = model.parameters()
optimizer = Lion(params, lr=0.02, master_weights=True, momentum_dtype=torch.float32)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
losses = []
for _ in range(100):
    loss = mse_loss(model(x.bfloat16()).float(), wanted(x).detach())
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()

print("the loss fell a hundredfold:", losses[-1] < losses[0] / 100)
state = optimizer.state[model.weight]
print({name: str(tensor.dtype) for name, tensor in sorted(state.items())})
