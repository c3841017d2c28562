"""dualops on more than one GPU: attention over sequences whose tokens are split among processes.

    from dualops.torch_bridge.distributed import context_parallel, positions, shard

    x = shard(x, 0, group, cu_seqlens=cu_seqlens)               # this rank's tokens of [tokens, ...]
    p = positions(cu_seqlens, group)                            # each in its document, for rotary embeddings
    o = context_parallel(q, k, v, group=group, cu_seqlens=cu_seqlens)

The engine is torch.distributed; `torchrun` starts the processes. Tensor parallelism and FSDP need nothing from here:
operators take DTensors, see `dualops.torch_bridge.sharding`.
"""

from .context_parallel import context_parallel
from .tokens import positions, shard, unshard

__all__ = ["context_parallel", "positions", "shard", "unshard"]
