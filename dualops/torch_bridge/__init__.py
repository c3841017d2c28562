"""dualops in PyTorch: operators with autograd, torch.compile, torch.func and autocast.

CUDA tensors go to the kernels of `dualops.cuda`, which is imported when the first one arrives; CPU tensors go to the
NumPy of `dualops.reference`. Importing this package needs torch and loads neither numba nor a CUDA library.

Operators accept DTensors too, for all tensors of a call or none:`sharding` says which axes may be sharded. `optim.Lion`
steps the shards of each process. The modules of `nn` work under FSDP1, FSDP2 and tensor parallelism. Attention over
sequences that several processes share is in `dualops.torch_bridge.distributed`; import it by its name.
"""

try:
    import torch  # noqa: F401  asked for here so that its absence is explained
except ImportError as error:
    raise ImportError("dualops.torch_bridge needs PyTorch 2.11 or newer: pip install torch") from error

from . import nn, optim
from .flash_attention import block_mask, flash_attention, flash_attention_varlen
from .layer_norm import layer_norm
from .lion import lion
from .matmul import matmul
from .retention import retention, retention_varlen
from .rms_norm import rms_norm
from .rope import rope, rope_tables
from .softmax import softmax

__all__ = [
    "block_mask",
    "flash_attention",
    "flash_attention_varlen",
    "layer_norm",
    "lion",
    "matmul",
    "nn",
    "optim",
    "retention",
    "retention_varlen",
    "rms_norm",
    "rope",
    "rope_tables",
    "softmax",
]
