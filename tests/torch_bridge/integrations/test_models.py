"""The models that the package's docstring names work in full: tiny ones with random weights, against eager ones."""

import copy
import re
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from dualops.torch_bridge.integrations import transformers as package
from dualops.torch_bridge.integrations.transformers import patch

from .models import FAMILIES, SIZES, VOCABULARY, close, padding, randomize, tokens

NAMES = re.findall(r"\w+", re.findall(r"by `config\.model_type`:([\w\s]+)\.", str(package.__doc__))[0])
NAMES.remove("gemma3")  # with images: below
NEWER = {"flint", "iquestcoder", "internlm3", "kolibri1"}  # missing in some releases that the bridge supports
# what of a config makes a model tiny; every token has all experts, for a choice could depend on a rounding
TINY: dict[str, Any] = {
    **SIZES,
    "hidden_size": 32,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "num_experts_per_tok"), 2),
    **dict.fromkeys(("moe_num_experts", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
}


def tiny(name: str) -> Any:
    """An eager model of this type, with a layer of each kind that it has."""
    kind = CONFIG_MAPPING[name]
    default = kind()
    own = {key: value for key, value in TINY.items() if hasattr(default, key)}
    for layers in ("layer_types", "mlp_layer_types"):
        if kinds := list(dict.fromkeys(getattr(default, layers, None) or ())):
            own[layers] = (2 * kinds)[:2]
    if hasattr(default, "qk_rope_head_dim"):  # of latent attention: then head_dim is that, and keys are as many
        own |= {"num_key_value_heads": SIZES["num_attention_heads"]}
        own.pop("head_dim", None)
    config = kind(**own)
    config._attn_implementation = "eager"
    return randomize(AutoModelForCausalLM.from_config(config))


def test_the_models_exist() -> None:
    assert {name for name in NAMES if name not in CONFIG_MAPPING} <= NEWER <= {*NAMES}


@pytest.mark.parametrize("name", [name for name in NAMES if name in CONFIG_MAPPING])
def test_models_work_in_full(name: str) -> None:
    made, ids, mask = tiny(name), tokens(2, 9), padding("left", 2, 9, "cpu")
    assert sum(weight.numel() for weight in made.parameters()) < 1_000_000
    with torch.no_grad():
        calls = ({}, {"attention_mask": mask})
        expected = [made(ids, **inputs).logits for inputs in calls]
        done = patch(made)
        assert done.left == () and all(done.counts.values())
        for inputs, logits in zip(calls, expected, strict=True):
            where = mask.bool() if inputs else slice(None)
            found = made(ids, **inputs).logits[where]
            assert not torch.equal(found, logits[where])
            close(found, logits[where], logits[where])


def test_a_model_with_an_image() -> None:
    """Its projector has a norm of columns, whose rows lie apart."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    image, (*_, text) = VOCABULARY + 3, FAMILIES["gemma3"]
    config = Gemma3Config(
        text_config={**SIZES, **text, "vocab_size": VOCABULARY + 4},
        vision_config={**vision, "image_size": 8, "patch_size": 2},
        mm_tokens_per_image=4,
        boi_token_index=VOCABULARY + 1,
        eoi_token_index=VOCABULARY + 2,
        image_token_index=image,
    )
    config._attn_implementation = "eager"
    made, ids = randomize(Gemma3ForConditionalGeneration(config)), tokens(2, 9)
    ids[:, 2:6] = image
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "pixel_values": pixels, "token_type_ids": (ids == image).long()}
    ours = copy.deepcopy(made)
    patch(ours)
    with torch.no_grad():
        expected = made(**inputs).logits
        close(ours(**inputs).logits, expected, expected)
