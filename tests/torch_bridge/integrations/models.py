"""Tiny models of transformers with random weights, in pairs: eager, and on dualops' operators."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor

from dualops.torch_bridge.integrations.transformers import patch

VOCABULARY, WINDOW = 40, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
LAYERS = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig, {"sliding_window": WINDOW}),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, {}),
    "gemma2": (
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config,
        {"sliding_window": WINDOW, "layer_types": LAYERS, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 3.0},
    ),
    "gemma3": (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig,
        {"sliding_window": WINDOW, "layer_types": LAYERS, "query_pre_attn_scalar": 12},
    ),
    "gpt_oss": (
        transformers.GptOssForCausalLM,
        transformers.GptOssConfig,
        {
            "sliding_window": WINDOW,
            "layer_types": LAYERS,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,  # all of them for every token: a choice could depend on a rounding
            "experts_implementation": "batched_mm",  # torch.compile cannot follow the others on a CPU
        },
    ),
}


def config(family: str, **more: Any) -> Any:
    _, kind, own = FAMILIES[family]
    return kind(**{**SIZES, **own, "attn_implementation": "eager", **more})


def model(family: str, device: str = "cpu", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Eager, with random weights."""
    return randomize(FAMILIES[family][0](config(family, **more))).to(device, dtype)


def randomize(made: Any) -> Any:
    """The model, with weights that make every part of it count: transformers' own are near 0, and norms are 1 or 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight += 0.3 * drawn  # of norms, biases and sinks
            else:
                weight.copy_(drawn * (1.0 if "embed" in name else weight.shape[-1] ** -0.5))
    return made.eval()


@dataclass
class Pair:
    """The same model twice. exact: a third one in float32, where that is not what `eager` is."""

    ours: Any
    eager: Any
    exact: Any

    @classmethod
    def of(cls, family: str, device: str, *, dtype: torch.dtype | None = None, **more: Any) -> Pair:
        """On the CPU in float32, on a GPU in bfloat16, unless a dtype is given."""
        dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
        exact = model(family, device, **more)
        eager = exact if dtype is torch.float32 else copy.deepcopy(exact).to(dtype)
        ours = copy.deepcopy(eager)
        patch(ours)
        return cls(ours, eager, exact)

    @property
    def all(self) -> tuple[Any, Any, Any]:
        return self.ours, self.eager, self.exact

    def call(self, function: Callable[[Any], Any], *, where: Tensor | None = None) -> None:
        """`function` of each model gives the same tensors, or dicts of them; `where`: at these places."""
        ours, eager, exact = (_named(function(model), where) for model in self.all)
        all_close(ours, eager, exact)


def _named(found: Any, where: Tensor | None) -> dict[str, Tensor]:
    found = found if isinstance(found, dict) else {"result": found}
    return {name: x if where is None or x.ndim < 3 else x[where] for name, x in found.items()}


def _distance(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """RMS of the difference, and what share it is of the RMS of what is exact."""
    difference, size = ((x.detach().float() ** 2).mean().sqrt().item() for x in (found.float() - exact.float(), exact))
    return difference, difference / size if size else 0.0


def all_close(ours: Mapping[str, Tensor], eager: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """The same names, and `close` of each, with what is usual among them."""
    assert ours.keys() == eager.keys()
    assert ours
    usual = median([_distance(eager[name], exact[name])[1] for name in ours])
    for name, found in ours.items():
        close(found, eager[name], exact[name], name, usual)


def close(ours: Tensor, eager: Tensor, exact: Tensor, name: str = "", usual: float = 0.0) -> None:
    """float32: 1e-5 of the largest. bfloat16: no further from float32 than eager is twice, and an eps more, by RMS.

    usual: the share of a tensor by which eager's are usually off. Of a tensor of a few numbers, such as a router's
    bias, eager's own may be nearer by chance.
    """
    assert ours.dtype is eager.dtype, name
    ours, eager, exact = ours.float(), eager.float(), exact.float()
    if torch.equal(eager, exact):
        limit = (1e-5 if ours.device.type == "cpu" else 1e-4) * max(1.0, float(exact.abs().max()))
        error = float((ours - exact).abs().max())
        assert error <= limit, f"{name}: {error:.2e} above {limit:.2e}"
        return
    size = exact.detach().square().mean().sqrt().item()
    limit = 2 * max(_distance(eager, exact)[0], usual * size) + 2.0**-8 * size
    found = _distance(ours, exact)[0]
    assert found <= limit, f"{name}: RMS {found:.2e} above {limit:.2e}"


def with_cache(function: Callable[..., Any], cache: Any) -> dict[str, Any]:
    """The cache by the name that a function of transformers has for it: another one from 5.24 on."""
    return {"cache" if "cache" in signature(function).parameters else "past_key_values": cache}


def tokens(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    drawn = torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device)


def trained(model: Any, **inputs: Any) -> dict[str, Tensor]:
    """Logits, the loss, and the gradient of every parameter."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    named = ((name.removeprefix("_orig_mod."), weight.grad) for name, weight in model.named_parameters())
    gradients = {name: grad for name, grad in named if grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return {"loss": output.loss.detach(), **gradients}


def labels(ids: Tensor, mask: Tensor) -> Tensor:
    """Every token that a token predicts: what comes after padding, which sees nothing, is anybody's guess."""
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return ids.masked_fill(mask * before == 0, -100)


def padding(side: str, B: int, S: int, device: str) -> Tensor:
    """1 for tokens, 0 for padding, with more of it in each row."""
    lengths = S - 2 * torch.arange(B, device=device)[:, None]
    places = torch.arange(S, device=device)
    return (places < lengths if side == "right" else places >= S - lengths).long()
