"""Models of transformers whose tokens are split among processes: what each of these does."""

import copy
import pickle
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.functional import cross_entropy

from dualops.torch_bridge.distributed import positions, shard, unshard
from dualops.torch_bridge.integrations.transformers import patch

from ..context import error_of
from .models import model, tokens

ENDS = [0, 9, 9, 30, 31, 37]
FAMILIES = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss")
Found = dict[str, Tensor]


def batch() -> dict[str, Any]:
    """All tokens: ids, and what each of them predicts, -100 at the end of a document."""
    ids = tokens(ENDS[-1])
    following = ids.roll(-1)
    following[[end - 1 for end in ENDS[1:]]] = -100
    return {"input_ids": ids, "following": following}


def trained(made: Any, group: Any | None = None, **more: Any) -> Found:
    """Logits of all tokens, the loss of this rank's, and the gradient of every parameter."""
    given, cu = batch(), torch.tensor(ENDS, dtype=torch.int32)
    if group is None:
        place = torch.cat([torch.arange(b - a) for a, b in pairwise(ENDS)])
    else:
        place = positions(ENDS, group)
        given = {name: shard(x, 0, group, cu_seqlens=ENDS) for name, x in given.items()}
    count = int((batch()["following"] != -100).sum())
    longest = max(b - a for a, b in pairwise(ENDS))
    lengths: dict[str, Any] = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    lengths |= {"max_length_q": longest, "max_length_k": longest} if group is None else {}
    lengths |= {"position_ids": place[None], "use_cache": False}
    logits = made(given["input_ids"][None], **lengths | more).logits[0]
    # transformers' own loss is of float32
    loss = cross_entropy(logits, given["following"], ignore_index=-100, reduction="sum") / count
    loss.backward()
    gradients = {f"d {name}": weight.grad for name, weight in made.named_parameters() if weight.grad is not None}
    return {"logits": logits.detach(), "loss": loss.detach(), **gradients}


def seeded(family: str) -> Any:
    """The same weights in every process, also those that transformers draws."""
    torch.manual_seed(0)
    return model(family, dtype=torch.float64)


def alone(family: str) -> Found:
    made = seeded(family)
    patch(made)
    return trained(made)


def together(family: str, mesh: Any) -> Found:
    """Of all ranks: the logits of all tokens, and sums of losses and gradients."""
    made = seeded(family)
    undo = patch(made, context_parallel=mesh)
    copied = copy.deepcopy(made)
    found = trained(made, mesh)
    again = trained(copied, mesh)
    assert all(torch.equal(x, again[name]) for name, x in found.items())
    for name, x in found.items():
        if name != "logits":
            distributed.all_reduce(x)
    found["logits"] = unshard(found["logits"], 0, mesh, cu_seqlens=ENDS)
    undo()
    assert not any("_dualops_context_parallel" in vars(module) for module in made.modules())
    return found


def errors(mesh: Any) -> dict[str, tuple[str, str]]:
    """What the last rank gives otherwise."""
    made = model("llama")
    patch(made, context_parallel=mesh)
    last = mesh.get_local_rank() == mesh.size() - 1
    found = {}
    for name, other in {
        "no cu_seq_lens": {"cu_seq_lens_q": None, "cu_seq_lens_k": None},
        "two cu_seq_lens": {"cu_seq_lens_k": [0, ENDS[-1]]},
        "other cu_seq_lens": {"cu_seq_lens_q": [0, ENDS[-1]], "cu_seq_lens_k": None},
        "padding": {"attention_mask": torch.zeros(1, len(positions(ENDS, mesh)), dtype=torch.int64)},
    }.items():
        found[name] = error_of(partial(trained, made, mesh, **other if last else {}))
    found["right"] = error_of(partial(trained, made, mesh))
    ids = shard(batch()["input_ids"], 0, mesh, cu_seqlens=ENDS)[None]
    lengths: dict[str, Any] = {"cu_seq_lens_q": ENDS, "use_cache": False}
    found["positions of nobody"] = error_of(lambda: made(ids, **lengths))
    twice = torch.cat([ids, ids])
    found["two rows"] = error_of(lambda: made(twice, **lengths))
    found["pickled"] = error_of(lambda: pickle.dumps(made))
    return found
