"""Calls of context_parallel, as processes make them, and as one process does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils.checkpoint import checkpoint

from dualops import reference
from dualops.torch_bridge import flash_attention_varlen
from dualops.torch_bridge.distributed import context_parallel, layout, positions, shard, unshard

from .conftest import values

MIXED = (0, 13, 13, 50, 52, 53, 64)  # documents of 13, 0, 37, 2, 1 and 11 tokens
FEW = (0, 2, 3)  # of four ranks one has nothing
PER_HEAD = ("alibi_slopes", "sinks")
Found = dict[str, Any]


def with_short_chunks(*_: Any) -> None:
    """Cut documents and windows of a few tokens too: to be called before anything else, in each process."""
    layout.TILE, layout.KEY_TILES = 4, (4, 4)
    layout.layout_of.cache_clear()


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@dataclass(frozen=True)
class Case:
    """A call of context_parallel and its gradient."""

    options: dict[str, Any] = field(default_factory=dict)
    ends: tuple[int, ...] = MIXED
    named: bool = True  # documents are named by cu_seqlens
    heads: tuple[int, int] = (4, 2)  # of q, of k and v
    sizes: tuple[int, int] = (8, 6)  # of heads of q and k, of v
    balance: str = "head_tail"
    gather_heads: int | None = None
    per_head: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32

    def tensors(self, device: str = "cpu") -> Found:
        """All tokens; do and dlse are the gradients that arrive."""
        (H, Hkv), (D, Dv), T = self.heads, self.sizes, self.ends[-1]
        shapes = {"q": (T, H, D), "k": (T, Hkv, D), "v": (T, Hkv, Dv), "do": (T, H, Dv), "dlse": (H, T)}
        shapes |= dict.fromkeys(self.per_head, (H,))
        made = {name: values(shape, self.dtype, device, seed=i) / 2 for i, (name, shape) in enumerate(shapes.items())}
        wide = torch.promote_types(self.dtype, torch.float32)
        made["dlse"] = made["dlse"].to(wide)
        for name in self.per_head:
            made[name] = made[name].to(wide).abs()
        return made

    @property
    def wanted(self) -> list[str]:
        """What is differentiated by."""
        return ["q", "k", "v", *(name for name in self.per_head if name == "sinks")]

    def run(self, call: Callable[..., Any], tensors: Found) -> Found:
        """Results and gradients of a call."""
        given = {name: x for name, x in tensors.items() if name not in ("do", "dlse")}
        leaves = {name: given[name].clone().requires_grad_() for name in self.wanted}
        o, lse = call(**given | leaves, return_lse=True, **{"causal": True} | self.options)
        torch.autograd.backward((o, lse), (tensors["do"], tensors["dlse"]))
        return {"o": o.detach(), "lse": lse.detach()} | {f"d{name}": x.grad for name, x in leaves.items()}

    def alone(self, device: str = "cpu") -> Found:
        """In one process."""
        cu = torch.tensor(self.ends, dtype=torch.int32, device=device)
        call = partial(flash_attention_varlen, cu_seqlens_q=cu, cu_seqlens_k=cu)
        return self.run(call, self.tensors(device))

    def gradients(self, given: Found, dtype: torch.dtype) -> Found:
        """Of one sequence, or of packed ones with cu_seqlens, by the reference in `dtype`; given has o and lse too."""
        wide = {name: x if name.startswith("cu_") else x.to(dtype) for name, x in given.items()}
        arrays: dict[str, Any] = {name: x.numpy() for name, x in wide.items()}
        options: dict[str, Any] = {"causal": True} | self.options
        found = reference.flash_attention_varlen_backward(**arrays, **options)
        return {f"d{name}": torch.from_numpy(x) for name, x in zip(self.wanted, found)}

    def saved(self, found: Found) -> Found:
        """What backward reads: all tensors, and o and lse as forward found them."""
        return self.tensors() | {name: found[name] for name in ("o", "lse")}

    def exact(self, found: Found) -> Found:
        """The gradients of one process, in float64 on the same numbers."""
        cu = torch.tensor(self.ends, dtype=torch.int32)
        return self.gradients(self.saved(found) | {"cu_seqlens_q": cu, "cu_seqlens_k": cu}, torch.float64)

    def rounded(self, found: Found, size: int, *, pieces: bool) -> Found:
        """Gradients in float32, where each rank's part of dk and dv is rounded to k's dtype, and then their sum.

        pieces: parts of each piece of a document are rounded first, as kernels write them.
        """
        every = self.saved(found)
        shares = layout.layout_of(self.ends, size, self.balance)
        sums = {f"d{name}": torch.zeros(every[name].shape) for name in self.wanted}
        for rank in range(size):
            part = {name: torch.zeros_like(x) for name, x in sums.items()}
            for start, stop, document in zip(*(each.tolist() for each in shares.pieces[rank])):
                last = stop if self.options.get("causal", True) else self.ends[document + 1]
                queries, keys = slice(start, stop), slice(self.ends[document], last)
                where: dict[str, Any] = {}
                where |= dict.fromkeys(("q", "o", "do"), queries) | dict.fromkeys(("k", "v"), keys)
                where |= dict.fromkeys(("lse", "dlse"), (slice(None), queries))
                given = {name: x[where.get(name, slice(None))] for name, x in every.items()}
                for side in "qk":
                    given[f"cu_seqlens_{side}"] = torch.tensor([0, len(given[side])], dtype=torch.int32)
                for name, x in self.gradients(given, torch.float32).items():
                    rounds = pieces and name in ("dk", "dv")
                    part[name][where.get(name[1:], slice(None))] += x.to(self.dtype).float() if rounds else x
            for name, x in sums.items():
                x += part[name] if name == "dsinks" else part[name].to(self.dtype).float()
        return {name: x.to(every[name[1:]].dtype) for name, x in sums.items()}

    def together(self, group: Any, device: str = "cpu", tensors: Found | None = None, **more: Any) -> Found:
        """This rank's share. tensors: in place of the case's own."""
        where: dict[str, Any] = {"cu_seqlens": self.ends if self.named else None, "balance": self.balance}
        shares = {
            name: x if name in PER_HEAD else shard(x, int(name == "dlse"), group, **where)
            for name, x in (tensors or self.tensors(device)).items()
        }
        given: dict[str, Any] = {"gather_heads": self.gather_heads, **where, **more}
        return self.run(partial(context_parallel, group=group, **given), shares)

    def whole(self, group: Any, share: Found) -> Found:
        """All tokens, of the shares of all ranks."""
        where: dict[str, Any] = {"cu_seqlens": self.ends if self.named else None, "balance": self.balance}
        return {
            name: x if name == "dsinks" else unshard(x, int(name == "lse"), group, **where) for name, x in share.items()
        }


CASES: dict[str, Case] = {
    "documents": Case(),
    "one document": Case(ends=(0, 41), named=False),
    "one document, named": Case(ends=(0, 41)),
    "a share of nothing": Case(ends=FEW),
    "a share of nothing, not named": Case(ends=(0, 3), named=False),
    "no token": Case(ends=(0, 0)),
    "contiguous": Case(balance="contiguous"),
    "contiguous, in place": Case(ends=(0, 13, 64), balance="contiguous"),
    "a head at a time": Case(gather_heads=1),
    "three heads, two at a time": Case(heads=(6, 3), gather_heads=2),
    "contiguous, a head at a time": Case(heads=(3, 3), ends=(0, 13, 64), balance="contiguous", gather_heads=1),
    "full": Case({"causal": False}),
    "top_left": Case({"causal": "top_left"}),
    "window": Case({"window": (5, None)}),
    "window without causality": Case({"causal": False, "window": (4, 0)}),
    "softcap": Case({"softcap": 1.5, "scale": 0.7}),
    "alibi": Case(per_head=("alibi_slopes",)),
    "sinks": Case(per_head=("sinks",)),
    "all": Case({"window": (9, 3), "softcap": 2.0}, per_head=PER_HEAD, gather_heads=1),
    "bfloat16": Case(dtype=torch.bfloat16, per_head=PER_HEAD),
    "bfloat16, full": Case({"causal": False}, dtype=torch.bfloat16),
    "float64": Case(dtype=torch.float64, per_head=("sinks",)),
}


LONG = (0, 700, 707, 1500)
HALF: dict[str, Any] = {"ends": LONG, "sizes": (64, 64), "dtype": torch.bfloat16}
ON_GPUS: dict[str, Case] = {
    "bfloat16": Case(**HALF),
    "bfloat16, a head at a time": Case(**HALF, gather_heads=1),
    "bfloat16, contiguous": Case(**HALF, balance="contiguous", gather_heads=1),
    "bfloat16, full": Case({"causal": False}, **HALF),
    "bfloat16, window and softcap": Case({"window": (200, 0), "softcap": 3.0}, **HALF),
    "bfloat16, alibi and sinks": Case(**HALF, per_head=PER_HEAD, gather_heads=1),
    "bfloat16, a share of nothing": Case(ends=(0, 1), sizes=(64, 64), dtype=torch.bfloat16),
    "float16, heads of 128": Case(ends=LONG, sizes=(128, 128), dtype=torch.float16),
    "float32": Case(ends=LONG, sizes=(64, 64), gather_heads=1),
    "float32, odd heads": Case(ends=LONG),
}


def case(name: str, mesh: Any) -> dict[str, Any]:
    """All tokens, and whether a second run has the same bits, on this rank."""
    chosen = CASES[name]
    share, again = (chosen.together(mesh) for _ in range(2))
    return chosen.whole(mesh, share) | {"same": all(torch.equal(x, again[key]) for key, x in share.items())}


def on_gpus(name: str, mesh: Any) -> dict[str, Any]:
    """The same on GPUs, and whether the second run, which waits for no rank's arguments, has the same bits."""
    chosen, device = ON_GPUS[name], f"cuda:{mesh.get_local_rank()}"
    share, again = (chosen.together(mesh, device) for _ in range(2))
    found = {key: x.cpu() for key, x in chosen.whole(mesh, share).items()}
    return found | {"same": all(torch.equal(x, again[key]) for key, x in share.items())}


# --- other ways to call it ------------------------------------------------------------------------


def all_at_once(mesh: Any) -> bool:
    """How many heads are gathered at a time changes no bit."""
    made = CASES["all"]
    one, all_heads = (made.together(mesh, gather_heads=count) for count in (1, 99))
    return all(torch.equal(x, all_heads[name]) for name, x in one.items())


def process_group(mesh: Any) -> bool:
    """A ProcessGroup, cu_seqlens as a tensor, or as NumPy's numbers."""
    made = CASES["documents"]
    first = made.together(mesh)
    for ends in (torch.tensor(MIXED, dtype=torch.int32), torch.tensor(MIXED).numpy()):
        again = made.together(mesh.get_group(), cu_seqlens=ends)
        assert all(torch.equal(x, again[name]) for name, x in first.items())
    return True


def group_of_one(mesh: Any) -> bool:
    """The bits of the plain call."""
    from torch.distributed.device_mesh import init_device_mesh

    one = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("all", "one"))["one"]
    for name in ("documents", "one document", "all"):
        expected = CASES[name].alone()
        assert all(torch.equal(x, expected[key]) for key, x in CASES[name].together(one).items())
    return True


def checkpointed(mesh: Any) -> bool:
    made = CASES["documents"]
    first = made.together(mesh)

    def call(reentrant: bool, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        return checkpoint(partial(context_parallel, **more), q, k, v, use_reentrant=reentrant)

    for reentrant in (False, True):
        share = {name: shard(x, int(name == "dlse"), mesh, cu_seqlens=made.ends) for name, x in made.tensors().items()}
        again = made.run(partial(call, reentrant, group=mesh, cu_seqlens=made.ends), share)
        assert all(torch.equal(x, first[name]) for name, x in again.items())
    return True


def autocast(mesh: Any) -> bool:
    """Tensors travel in autocast's dtype, and float32 leaves get float32 gradients."""
    made = CASES["sinks"]
    with torch.autocast("cpu", torch.bfloat16):
        share = made.together(mesh)
    tensors = {name: x.bfloat16() if name in ("q", "k", "v", "do") else x for name, x in made.tensors().items()}
    narrow = made.together(mesh, tensors=tensors)
    assert share["o"].dtype is torch.bfloat16 and share["dk"].dtype is torch.float32
    return torch.equal(share["o"], narrow["o"])


def shares_of(made: Case, mesh: Any, names: Any) -> Found:
    return {name: shard(made.tensors()[name], 0, mesh, cu_seqlens=made.ends) for name in names}


def compiled(mesh: Any) -> bool:
    """A graph of torch.compile ends there, and goes on behind."""
    made = CASES["documents"]
    q, k, v = shares_of(made, mesh, "qkv").values()

    def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * context_parallel(q + 1, k, v, group=mesh, cu_seqlens=made.ends)

    found = torch.compile(doubled, backend="aot_eager")(q, k, v)
    return torch.equal(found, doubled(q, k, v))


def parts_of_gradients(mesh: Any) -> bool:
    """Only lse is used; only k wants a gradient."""
    made = CASES["documents"]
    q, k, v = shares_of(made, mesh, "qkv").values()
    leaf = k.requires_grad_()
    _, lse = context_parallel(q, k, v, group=mesh, cu_seqlens=made.ends, return_lse=True)
    (found,) = torch.autograd.grad(lse.sum(), leaf)
    whole = {name: x.requires_grad_(name == "k") for name, x in made.tensors().items() if name in "qkv"}
    cu = torch.tensor(made.ends, dtype=torch.int32)
    expected = flash_attention_varlen(**whole, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True)[1]
    (dk,) = torch.autograd.grad(expected.sum(), whole["k"])
    torch.testing.assert_close(found, shard(dk, 0, mesh, cu_seqlens=made.ends))
    return True


def parts_of_sinks(mesh: Any) -> bool:
    """With reduce_sinks=False the sum over the ranks is left to the caller."""
    made = CASES["sinks"]
    whole, part = made.together(mesh), made.together(mesh, reduce_sinks=False)
    distributed.all_reduce(part["dsinks"])
    torch.testing.assert_close(part["dsinks"], whole["dsinks"])
    return all(torch.equal(x, part[name]) for name, x in whole.items() if name != "dsinks")


def tokens(mesh: Any) -> bool:
    """shard, unshard and positions, along any axis."""
    x = values((3, 64, 2), torch.float32, "cpu")
    for balance in ("head_tail", "contiguous"):
        for ends in (MIXED, None):
            where: dict[str, Any] = {"cu_seqlens": ends, "balance": balance}
            mine = shard(x, -2, mesh, **where)
            assert torch.equal(unshard(mine, 1, mesh, **where), x)
            known = MIXED if ends else (0, 64)
            every = torch.cat([torch.arange(b - a) for a, b in pairwise(known)])
            assert torch.equal(positions(known, mesh, balance=balance), shard(every, 0, mesh, **where))
    leaf = shard(x, 1, mesh).requires_grad_()
    (unshard(leaf, 1, mesh) * (x + mesh.get_local_rank())).sum().backward()
    size = mesh.size()
    expected = shard(size * x + size * (size - 1) / 2, 1, mesh)
    torch.testing.assert_close(leaf.grad, expected)
    return True


SLOW: dict[str, Callable[[Any], Any]] = {
    "checkpointed": checkpointed,
    "compiled": compiled,
}  # they import torch._dynamo
WAYS: dict[str, Callable[[Any], Any]] = {
    "all at once": all_at_once,
    "process group": process_group,
    "group of one": group_of_one,
    "autocast": autocast,
    "parts of gradients": parts_of_gradients,
    "parts of sinks": parts_of_sinks,
    "tokens": tokens,
}
