"""Hugging Face models on dualops' operators, in one line. Needs transformers 5.17 or newer.

    from transformers import AutoModelForCausalLM
    from dualops.torch_bridge.integrations.transformers import patch

    model = AutoModelForCausalLM.from_pretrained(...)
    undo = patch(model)         # attention, RMSNorm and rotary embeddings of this model
    ...                         # train, generate, compile
    undo()                      # the model as it was

`patch` changes only the given model. `register` registers only attention with transformers, as "dualops":
`model.set_attn_implementation("dualops")`, or `attn_implementation="dualops"` when a model is loaded.

Attention works in any model that goes through transformers' AttentionInterface; norms and rotary embeddings in any
model with Llama's, Gemma 2's or GPT-OSS's code for them. Anything else is refused by name, before any change; with
`strict=False` it is left unchanged, and reported.

These models work in full, tested with transformers 5.23 and 5.24, by `config.model_type`: afmoe apertus arcee aria_text
axk1 bitnet cwm deepseek_v3 diffllama dots1 exaone4 exaone_moe flint gemma gemma2 gemma3 gemma3_text glm4_moe_lite
gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
internlm3 iquestcoder jetmoe kolibri1 lfm2 llama minicpm3 ministral ministral3 mistral mixtral olmoe qwen2 qwen2_moe
qwen3 qwen3_moe seed_oss smollm3 solar_open vaultgemma youtu.

`patch(model, context_parallel=group)` is for sequences whose tokens are split among processes: each passes its own to
the model, and attention sees all of them. `dualops.torch_bridge.distributed` shards inputs and labels, and computes the
positions.

Differences from eager attention:

  - A query without a visible key, as in padding, gives 0, not the mean over all values.
  - Sequences packed into a row, and marked only by `position_ids`, do not see one another. So results differ from eager
    ones in all of these models with `use_cache=True`, the default in `eval()`: transformers then does not look for
    packed sequences, and they see one another. With `use_cache=False` only afmoe and gpt_oss differ, whose eager
    attention never looks.
  - The ends of packed sequences are read from the GPU once per forward, which waits for it; `cu_seq_lens_q` and related
    arguments, as from DataCollatorWithFlattening, avoid that.
  - Under torch.compile and in a CUDA graph nothing can be read. So a mask [B, 1, S, S] is built if sequences might be
    packed: in any forward without an `attention_mask`. Pass one, of ones, to avoid that.
"""

try:
    import transformers  # noqa: F401  asked for here so that its absence is explained
except ImportError as error:
    raise ImportError(
        "dualops.torch_bridge.integrations.transformers needs transformers: pip install 'dualops[transformers]'"
    ) from error

from .patching import Patch, patch, register

__all__ = ["Patch", "patch", "register"]
