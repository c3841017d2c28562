"""Calls of context_parallel that are wrong on one rank, or on all, and the errors that every rank then raises."""

from functools import partial
from typing import Any

import torch
from torch import distributed

from dualops.torch_bridge.distributed import agreement, context_parallel, positions, shard, unshard
from dualops.torch_bridge.distributed.ranks import Ranks

from .context import CASES, error_of, shares_of


def _call(mesh: Any, rank: int, **other: Any) -> Any:
    """A call with all of `other` on one rank alone; a value that is a function makes one of the tensor of that name."""
    made = CASES["documents"]
    given: dict[str, Any] = {**shares_of(made, mesh, "qkv"), "cu_seqlens": made.ends}
    if distributed.get_rank() == rank:
        for name, value in other.items():
            given[name] = value(given.get(name)) if callable(value) else value
    return context_parallel(**given, group=mesh)


DISAGREE: dict[str, tuple[dict[str, Any], str]] = {
    "cu_seqlens": ({"cu_seqlens": (0, 13, 64)}, "cu_seqlens"),
    "no cu_seqlens": ({"cu_seqlens": None}, "cu_seqlens"),
    "window": ({"window": (3, 0)}, "window"),
    "causal": ({"causal": False}, "causal"),
    "softcap": ({"softcap": 2.0}, "softcap"),
    "scale": ({"scale": 2.0}, "scale"),
    "balance": ({"balance": "contiguous"}, "balance"),
    "gather_heads": ({"gather_heads": 1}, "gather_heads"),
    "return_lse": ({"return_lse": True}, "return_lse"),
    "sinks": ({"sinks": torch.zeros(4)}, "sinks"),
    "reduce_sinks": ({"reduce_sinks": False}, "reduce_sinks"),
    "gradients": ({"k": lambda k: k.clone().requires_grad_()}, "which tensors require a gradient"),
    "dtype": (dict.fromkeys("qkv", torch.Tensor.double), "the dtype"),
    "heads": ({"k": lambda k: k[:, :1], "v": lambda v: v[:, :1]}, "heads and their sizes"),
    "tokens": (dict.fromkeys("qkv", lambda x: x[1:]), "tokens, expected"),
}
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "score_mod": ({"score_mod": lambda _: abs}, NotImplementedError, "score_mod is given"),
    "mask_mod": ({"mask_mod": 3}, NotImplementedError, "mask_mod is given"),
    "dropout_p": ({"dropout_p": 0.5}, NotImplementedError, "dropout_p is given"),
    "bias": ({"bias": 3}, NotImplementedError, "bias is given"),
    "key_padding_mask": ({"key_padding_mask": 3}, NotImplementedError, "key_padding_mask is given"),
    "window": ({"causal": False, "window": (3, 3)}, NotImplementedError, "window is (3, 3) and causal is False"),
    "alibi": ({"causal": False, "alibi_slopes": torch.ones(4)}, NotImplementedError, "alibi_slopes is tensor"),
    "another option": ({"widow": 3}, TypeError, "unexpected keyword argument 'widow'"),
    "a wrong option": ({"window": 3}, TypeError, "window is 3, expected None or a pair"),
    "gather_heads": ({"gather_heads": 0}, ValueError, "gather_heads is 0, expected at least 1"),
    "return_lse": ({"return_lse": 1}, TypeError, "return_lse is 1, expected True or False"),
    "balance": ({"balance": "left"}, ValueError, "balance is 'left', expected one of 'head_tail', 'contiguous'"),
    "cu_seqlens fall": ({"cu_seqlens": (0, 5, 3)}, ValueError, "begin at 0 and are nondecreasing"),
    "cu_seqlens of floats": ({"cu_seqlens": (0.0, 5.0)}, TypeError, "expected integers along one axis"),
    "no tensor": ({"q": 3}, TypeError, "q is a int, expected a torch.Tensor"),
    "tokens": ({"k": lambda k: k[1:]}, ValueError, "tokens, q has"),
    "heads": ({"q": lambda q: q[:, :3]}, ValueError, "context_parallel:"),
    "sinks": ({"sinks": torch.zeros(3)}, ValueError, "context_parallel: sinks has H=3, q has H=4"),
}


def disagreements(mesh: Any) -> dict[str, tuple[str, str]]:
    """The errors of this rank where the last rank calls otherwise; a right call after each."""
    found = {}
    for name, (other, _) in DISAGREE.items():
        found[name] = error_of(partial(_call, mesh, mesh.size() - 1, **other))
        _call(mesh, 0)
    return found


def refusals(mesh: Any) -> dict[str, tuple[str, str]]:
    found = {}
    for name, (other, _, _) in REFUSED.items():
        found[name] = error_of(partial(_call, mesh, mesh.size() - 1, **other))
        _call(mesh, 0)
    return found


def other_errors(mesh: Any) -> dict[str, tuple[str, str]]:
    from torch.distributed.device_mesh import init_device_mesh

    x = torch.zeros(4, 1, 4)
    axes = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("all", "one"))
    others = distributed.new_group([0])
    twice = x.clone().requires_grad_()
    share = context_parallel(twice, x, x, group=mesh)
    (dq,) = torch.autograd.grad(share.square().sum(), twice, create_graph=True)
    slopes = torch.ones(1, requires_grad=True)
    last = mesh.get_local_rank() == mesh.size() - 1
    return {
        "two axes": error_of(lambda: context_parallel(x, x, x, group=axes)),
        "no group": error_of(lambda: context_parallel(x, x, x, group=None)),
        "no member": error_of(lambda: positions((0, 4), others)) if distributed.get_rank() else ("ValueError", ""),
        "twice": error_of(lambda: dq.sum().backward()),
        "slopes": error_of(lambda: context_parallel(x, x, x, group=mesh, alibi_slopes=slopes).sum().backward()),
        "another function": error_of(lambda: unshard(x, 0, mesh) if last else context_parallel(x, x, x, group=mesh)),
        "unshard": error_of(lambda: unshard(x, int(last), mesh)),
        "unshard of nothing": error_of(lambda: unshard(x, 5 if last else 0, mesh)),
        "shard": error_of(lambda: shard(x, 0, mesh, cu_seqlens=(0, 5))),
    }


OTHER_ERRORS = {
    "two axes": ("ValueError", "group is a DeviceMesh of 2 axes, expected one"),
    "no group": ("TypeError", "group is a NoneType"),
    "no member": ("ValueError", ""),
    "twice": ("NotImplementedError", "context_parallel_backward: its gradient is not implemented"),
    "slopes": ("NotImplementedError", "alibi_slopes requires a gradient"),
    "another function": ("ValueError", "disagree on the function"),
    "unshard": ("ValueError", "disagree on dim"),
    "unshard of nothing": ("ValueError", ""),
    "shard": ("ValueError", "x has 4 tokens along axis 0, expected 5"),
}


def compared(mesh: Any) -> bool:
    """What GPUs do in place of waiting; on a CPU the assertion fails at once."""
    ranks, row = Ranks.of("compared", mesh), (0, mesh.get_local_rank(), *[7] * 18)
    table, _ = agreement._found(ranks, row)
    agreement._compare("compared", ranks, table)
    other = table.clone()
    other[(ranks.rank + 1) % ranks.size] += 1
    kind, message = error_of(partial(agreement._compare, "compared", ranks, other))
    return kind == "RuntimeError" and "compared: the ranks of the group disagree on their arguments" in message


def disagreement_on_gpus(mesh: Any) -> tuple[str, str]:
    """The error of this rank in a first call, of which the last rank's is another."""
    x = torch.zeros(300, 1, 64, device=f"cuda:{mesh.get_local_rank()}", dtype=torch.bfloat16)
    window = (7, 0) if mesh.get_local_rank() == mesh.size() - 1 else None
    return error_of(lambda: context_parallel(x, x, x, group=mesh, cu_seqlens=(0, 600), window=window))
