"""Hugging Face models on dualops' operators, compared with eager ones: what they compute, trained and generating."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, StaticCache

from .models import FAMILIES, Pair, all_close, close, labels, padding, tokens, trained, with_cache

B, S = 2, 11
every_family = pytest.mark.parametrize("family", FAMILIES)
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


@every_family
def test_loss_and_gradients(family: str, device: str) -> None:
    ids = tokens(B, S, device=device)
    Pair.of(family, device).call(lambda model: trained(model, input_ids=ids, labels=ids))


@every_family
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(family: str, side: str, device: str) -> None:
    ids, mask = tokens(B, S, device=device), padding(side, B, S, device)
    pair = Pair.of(family, device)
    pair.call(lambda model: model(ids, attention_mask=mask).logits, where=mask.bool())
    pair.call(lambda model: trained(model, input_ids=ids, attention_mask=mask, labels=labels(ids, mask)))


def test_a_mask_of_ones_is_none(device: str) -> None:
    ids = tokens(B, S, device=device)
    pair = Pair.of("mistral", device)
    assert torch.equal(pair.ours(ids).logits, pair.ours(ids, attention_mask=torch.ones_like(ids)).logits)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("length", [S, 40])
def test_scaled_rotary_embeddings(kind: str, length: int, device: str) -> None:
    """Longer than the 24 positions that a dynamic one starts from, too."""
    parameters = {"rope_theta": 1000.0, **ROPES[kind]}
    pair = Pair.of("llama", device, rope_parameters=parameters, max_position_embeddings=24)
    ids = tokens(1, length, device=device)
    pair.call(lambda model: model(ids).logits)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_gradient_checkpointing(family: str, device: str) -> None:
    ids, mask = tokens(B, S, device=device), padding("left", B, S, device)
    pair = Pair.of(family, device)
    plain = trained(pair.ours.train(), input_ids=ids, attention_mask=mask, labels=labels(ids, mask))
    pair.ours.gradient_checkpointing_enable()
    again = trained(pair.ours, input_ids=ids, attention_mask=mask, labels=labels(ids, mask))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_dropout_is_drawn_again_and_repeated_by_checkpointing(device: str) -> None:
    pair = Pair.of("llama", device, attention_dropout=0.5)
    ids = tokens(B, S, device=device)
    model = pair.ours.train()

    def seeded(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return trained(model, input_ids=ids, labels=ids)

    plain, other = seeded(1), seeded(2)
    assert not torch.equal(plain["loss"], other["loss"])
    model.gradient_checkpointing_enable()
    again = seeded(1)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_autocast(family: str, device: str) -> None:
    """Results no further from float32 than eager's under autocast."""
    ids, mask = tokens(B, S, device=device), padding("left", B, S, device)
    pair = Pair.of(family, device, dtype=torch.float32)

    def loss(model: Any, lower: bool) -> dict[str, Tensor]:
        with torch.autocast(device, torch.bfloat16, enabled=lower):
            return trained(model, input_ids=ids, attention_mask=mask, labels=labels(ids, mask))

    ours, eager, exact = loss(pair.ours, True), loss(pair.eager, True), loss(pair.exact, False)
    assert not torch.equal(eager["loss"], exact["loss"])
    all_close(ours, eager, exact)


LENGTHS = (4, 1, 6)


def alone(model: Any, rows: Tensor, **options: Any) -> Tensor:
    """Logits of each sequence by itself, in the places that they have when packed."""
    return torch.cat(
        [torch.cat([model(part[None], **options).logits[0] for part in row.split(LENGTHS)]) for row in rows]
    )


def positions(device: str) -> Tensor:
    return torch.cat([torch.arange(length, device=device) for length in LENGTHS])[None]


@every_family
@pytest.mark.parametrize("use_cache", [False, True])
def test_sequences_packed_by_positions_do_not_see_one_another(family: str, use_cache: bool, device: str) -> None:
    """Whatever transformers tells a mask function: it does not where there is a cache, and for GPT-OSS never."""
    pair, ids = Pair.of(family, device), tokens(B, sum(LENGTHS), device=device)
    found = pair.ours(ids, position_ids=positions(device), use_cache=use_cache).logits.flatten(0, 1)
    expected = alone(pair.exact, ids)
    close(found, alone(pair.eager, ids), expected)
    # which the package's docstring tells
    others = pair.exact(ids, position_ids=positions(device), use_cache=use_cache).logits.flatten(0, 1)
    seen = float((others - expected).abs().max() / expected.abs().max())
    assert (seen > 0.01) == (use_cache or family == "gpt_oss")


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_gradients_of_packed_sequences(family: str, device: str) -> None:
    ids, places = tokens(B, sum(LENGTHS), device=device), positions(device).expand(B, -1)
    pair = Pair.of(family, device, use_cache=False)
    pair.call(lambda model: trained(model, input_ids=ids, position_ids=places, labels=ids))


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("longest", [None, "number", "tensor"])
def test_sequences_packed_by_lengths(family: str, longest: str | None, device: str) -> None:
    """As DataCollatorWithFlattening tells of them, with positions and without."""
    ends = torch.tensor([0, 4, 5, 11], dtype=torch.int32, device=device)
    lengths: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    if longest is not None:
        most = max(LENGTHS) if longest == "number" else torch.tensor(max(LENGTHS), device=device)
        lengths |= {"max_length_q": most, "max_length_k": most}
    pair, ids = Pair.of(family, device), tokens(1, sum(LENGTHS), device=device)
    found = pair.ours(ids, position_ids=positions(device), **lengths).logits[0]
    close(found, alone(pair.eager, ids), alone(pair.exact, ids))


def test_positions_are_read_once_a_forward(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dualops.torch_bridge.integrations.transformers import attention as module

    pair, ids = Pair.of("llama", device), tokens(1, sum(LENGTHS), device=device)
    places, calls = positions(device), []
    original = module.find_packed_sequence_indices
    monkeypatch.setattr(module, "find_packed_sequence_indices", lambda x: calls.append(x) or original(x))
    expected = pair.ours(ids, position_ids=places).logits
    assert len(calls) == 1
    pair.ours(ids, position_ids=places)
    assert len(calls) == 1
    places[0, 5:] += 7  # changed in place: the same sequences, at other positions
    places[0, 4] += 3
    assert not torch.equal(pair.ours(ids, position_ids=places).logits, expected)
    assert len(calls) == 2


@every_family
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(family: str, cache: str, device: str) -> None:
    """A batch with padding on the left, past the sliding window; logits of every step."""
    pair = Pair.of(family, device, dtype=torch.float32)
    ids, mask = tokens(B, 6, device=device), padding("left", B, 6, device)

    def logits(model: Any) -> dict[str, Tensor]:
        found = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=5,
            do_sample=False,
            cache_implementation=cache if cache == "static" else None,
            disable_compile=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return {"tokens": found.sequences.float(), "logits": torch.stack(found.logits)}

    pair.call(logits)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_that_grows_by_several_tokens(family: str, kind: str, device: str) -> None:
    pair, ids = Pair.of(family, device, dtype=torch.float32), tokens(B, 13, device=device)

    def logits(model: Any) -> Tensor:
        cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=16)
        parts = [model(part, **with_cache(model.forward, cache)).logits for part in ids.split([3, 4, 1, 5], 1)]
        return torch.cat(parts, 1)

    with torch.no_grad():
        pair.call(logits)
        if kind == "dynamic":
            close(logits(pair.ours), pair.eager(ids).logits, pair.exact(ids).logits)


def compiled(model: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(("family", "masked"), [("llama", True), ("gemma3", False), ("gpt_oss", True)])
def test_compiled(family: str, masked: bool, device: str) -> None:
    """Without a mask of the caller's sequences might be packed, which a compiled function cannot look up."""
    ids, mask = tokens(B, S, device=device), padding("left", B, S, device)
    inputs: dict[str, Any] = {"attention_mask": mask, "labels": labels(ids, mask)} if masked else {"labels": ids}
    pair = Pair.of(family, device, use_cache=False)
    found, eager, exact = (
        trained(compiled(model) if model is pair.ours else model, input_ids=ids, **inputs) for model in pair.all
    )
    all_close(found, eager, exact)


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_compiled_packed_sequences(family: str, device: str) -> None:
    pair, ids = Pair.of(family, device, use_cache=False), tokens(B, sum(LENGTHS), device=device)
    found = compiled(pair.ours)(ids, position_ids=positions(device)).logits.flatten(0, 1)
    close(found, alone(pair.eager, ids), alone(pair.exact, ids))


def test_compiled_decoding(device: str) -> None:
    """One graph for all steps: nothing depends on how far a static cache is filled."""
    pair, ids = Pair.of("llama", device, dtype=torch.float32), tokens(B, 8, device=device)

    def logits(model: Any, step: Any) -> Tensor:
        cached = with_cache(model.forward, StaticCache(model.config, max_cache_len=12))
        parts = [model(ids[:, :3], **cached).logits]
        parts += [step(ids[:, i : i + 1], **cached).logits for i in range(3, 8)]
        return torch.cat(parts, 1)

    with torch.no_grad():
        counter = CompileCounterWithBackend("aot_eager")
        torch._dynamo.reset()
        step = torch.compile(pair.ours, backend=counter, fullgraph=True)
        close(logits(pair.ours, step), pair.eager(ids).logits, pair.exact(ids).logits)
        assert counter.frame_count == 1
