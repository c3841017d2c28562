"""A small Llama of dualops' operators, and its training: what tests of whole steps are about."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dualops import torch_bridge
from dualops.torch_bridge.optim import Lion

VOCABULARY, WIDTH, HEADS, KV_HEADS, HIDDEN, LAYERS = 61, 32, 4, 2, 72, 2
BATCH, TOKENS = 4, 24


class Layer(nn.Module):
    """Attention and SwiGLU; what is to be added to the residual stream is handed on, since norms add."""

    def __init__(self, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.attention_norm, self.mlp_norm = (torch_bridge.nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2))
        D = WIDTH // HEADS
        sizes = {"q": HEADS * D, "k": KV_HEADS * D, "v": KV_HEADS * D, "gate": HIDDEN, "up": HIDDEN}
        self.into = nn.ModuleDict({name: nn.Linear(WIDTH, size, bias=False) for name, size in sizes.items()})
        self.out = nn.Linear(HEADS * D, WIDTH, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, added: Tensor, cos: Tensor, sin: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        y, x = self.attention_norm(x, added.to(x.dtype))
        q, k, v = (self.into[name](y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for name in "qkv")
        q, k = torch_bridge.rope(q, k, cos, sin)
        o = torch_bridge.flash_attention(q, k, v, causal=True, dropout_p=self.dropout, seed=seed)  # [B, H, S, D]
        y, x = self.mlp_norm(x, self.out(o.transpose(1, 2).flatten(2)).to(x.dtype))
        return x, self.down(F.silu(self.into["gate"](y)) * self.into["up"](y))


class Llama(nn.Module):
    """forward(tokens [B, S + 1], seeds [LAYERS] or None) is the mean loss of predicting each token but the first."""

    def __init__(self, *, dropout: float = 0.0, checkpointed: bool = False):
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(LAYERS))
        self.norm = torch_bridge.nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, seeds: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, sin = torch_bridge.rope_tables(positions, WIDTH // HEADS, dtype=wide)
        added = torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            given = (x, added, cos, sin, None if seeds is None else seeds[number])
            if self.checkpointed:
                # a generator's state can't be asked for in a captured graph; seeds make that unnecessary
                x, added = checkpoint(layer, *given, use_reentrant=False, preserve_rng_state=seeds is None)
            else:
                x, added = layer(*given)
        y, _ = self.norm(x, added.to(x.dtype))
        return F.cross_entropy(self.head(y).to(wide).flatten(0, 1), tokens[:, 1:].flatten())


class Mode(NamedTuple):
    """How a model is run."""

    dtype: torch.dtype = torch.float32
    autocast: bool = False
    checkpointed: bool = False
    dropout: float = 0.0
    compiled: bool = False

    def model(self, device: str) -> Llama:
        """The same parameters in every mode, rounded to its dtype."""
        made = Llama(dropout=self.dropout, checkpointed=self.checkpointed).to(device, self.dtype)
        fill(made)
        return made

    def running(self, model: Llama, device: str, *, graphs: bool = False) -> Callable[..., Tensor]:
        """The loss as a function, compiled if that is the mode; graphs: by a compiler that captures what it can."""
        if not self.compiled:
            return model
        torch._dynamo.reset()
        how: dict[str, Any] = {"mode": "reduce-overhead"} if graphs else {}
        if device == "cpu":
            how = {"backend": "aot_eager"}
        return torch.compile(model, fullgraph=True, dynamic=False, **how)

    def casting(self, device: str) -> Any:
        return torch.autocast(device, torch.bfloat16) if self.autocast else nullcontext()

    def seeds(self, device: str) -> Tensor | None:
        return torch.arange(LAYERS, device=device) + 7 if self.dropout else None


@torch.no_grad()
def fill(model: Llama, seed: int = 0) -> None:
    """Give a model other parameters, so small that no error grows much on its way through it; no norm is at rest."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(0.15 * drawn + (1 if "norm" in name else 0))


MODES = {
    "plain": Mode(),
    "bfloat16": Mode(dtype=torch.bfloat16),
    "autocast": Mode(autocast=True),
    "checkpointed": Mode(checkpointed=True),
    "dropout": Mode(dropout=0.25),
    "compiled": Mode(compiled=True),
    "everything": Mode(autocast=True, checkpointed=True, dropout=0.25, compiled=True),
}


def batches(count: int, device: str, seed: int = 0) -> list[Tensor]:
    """Random tokens [BATCH, TOKENS + 1]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, TOKENS + 1)
    return [torch.randint(VOCABULARY, shape, generator=generator).to(device) for _ in range(count)]


def gradients(mode: Mode, device: str) -> dict[str, Tensor]:
    """Of the loss of one batch by all parameters, and the loss."""
    model = mode.model(device)
    with mode.casting(device):
        loss = mode.running(model, device)(*batches(1, device), mode.seeds(device))
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Training:
    """Steps of Lion on batches, each whole: forward, backward, update. It can be captured in a CUDA graph."""

    def __init__(self, mode: Mode, device: str, *, graphs: bool = False):
        self.mode, self.device = mode, device
        self.model = mode.model(device)
        self.run = mode.running(self.model, device, graphs=graphs)
        halves = mode.dtype is torch.bfloat16
        self.optimizer = Lion(
            self.model.parameters(), 2e-3, weight_decay=0.1, capturable=device == "cuda", master_weights=halves
        )
        self.tokens, self.seeds = torch.zeros_like(batches(1, device)[0]), mode.seeds(device)
        self.loss = torch.zeros((), device=device)

    def step(self) -> None:
        """One step on what `tokens` holds now."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.mode.casting(self.device):
            loss = self.run(self.tokens, self.seeds)
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())
        if self.seeds is not None:
            self.seeds += LAYERS

    def steps(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The losses of steps on these batches."""
        losses = []
        for batch in given:
            self.tokens.copy_(batch)
            self.step()
            losses.append(self.loss.clone())
        return losses

    def state(self) -> tuple[Tensor, ...]:
        """Parameters, momenta and master weights."""
        kept = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return tuple(x.detach() for x in (*self.model.parameters(), *kept) if isinstance(x, Tensor))
