"""Your own `score_mod` and `mask_mod`: the same functions for NumPy and for a kernel."""

import math

import numpy as np

import dualops
from dualops import cuda, reference


def score_mod(score, b, h, i, j):
    """Limit scores to -20 to 20, and subtract more for distant keys."""
    return 20.0 * math.tanh(score / 20.0) - 0.05 * abs(i - j)


def mask_mod(b, h, i, j):
    """Causal within documents of 32 tokens."""
    return (j <= i) & (i // 32 == j // 32)


rng = np.random.default_rng(0)
q, k, v, do = rng.standard_normal((4, 1, 1, 40, 8), dtype=np.float32)  # [B, H, S, D]
own = {"score_mod": score_mod, "mask_mod": mask_mod}

o, lse = cuda.flash_attention(q, k, v, **own, return_lse=True)
expected = reference.flash_attention(q, k, v, **own)
print("as the reference:", np.allclose(o, expected, atol=1e-5))

# the derivative of score_mod is generated from its source
gradients = cuda.flash_attention_backward(q, k, v, o, lse, do, **own)
wanted = reference.flash_attention_backward(q, k, v, o, lse, do, **own)
agree = [np.allclose(x, y, atol=1e-5) for x, y in zip(gradients, wanted)]
print("gradients too:", all(agree))

# which tiles of 128 by 128 pairs have a visible one, for all batches and heads
mask = dualops.block_mask(mask_mod, None, None, 1024, 1024, like=q)
listed = mask.lists[0, 0, :, 0]
print(f"tiles to look at: {listed.sum()} of {listed.size**2}")
