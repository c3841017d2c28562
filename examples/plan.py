"""Read a plan: which kernel serves a call, how it is launched, and why. Nothing runs."""

import numpy as np

from dualops import cuda

x = np.zeros((8192, 4096), np.float16)  # only shapes, dtypes and strides matter
print(cuda.plan("softmax", x))
print()
print(cuda.plan("softmax", x, axis=0))

q, k, v = np.zeros((3, 2, 16, 4096, 128), np.float16)  # [B, H, S, D]
print()
for kernel in (None, "simt"):
    plan = cuda.plan("flash_attention", q, k, v, causal=True, kernel=kernel)
    print(plan.choice.rung, [(step.kernel.name, step.grid) for step in plan.steps])

try:
    cuda.plan("softmax", x, kernel="sm80")
except ValueError as error:
    print(error)
