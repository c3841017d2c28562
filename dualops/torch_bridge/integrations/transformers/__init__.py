"""Hugging Face models on dualops' operators, in one line. Needs transformers 5.17 or newer.

    from transformers import AutoModelForCausalLM
    from dualops.torch_bridge.integrations.transformers import patch

    model = AutoModelForCausalLM.from_pretrained(...)
    undo = patch(model)         # attention, RMSNorm and rotary embeddings of this model
    ...                         # train, generate, compile
    undo()                      # the model as it was

`patch` changes the model that it is given and no other one. `register` makes attention alone known to transformers, as
"dualops": `model.set_attn_implementation("dualops")`, or `attn_implementation="dualops"` when a model is loaded.

Tried with Llama, Mistral, Qwen3, Gemma 2 and 3 and GPT-OSS. Attention is for any model that goes through transformers'
AttentionInterface; norms and rotary embeddings for any whose code for them is that of one of these. Anything else is
refused by name, before anything has been changed.

What differs from eager attention:

  - A query that sees nothing, which is one of padding, gives 0, not the mean over all values.
  - Sequences packed into a row, and told by `position_ids` alone, do not see one another, whatever the model (eager
    GPT-OSS forgets to look). Where one ends is read from the GPU once in a forward, which waits for it; `cu_seq_lens_q`
    and the like, as DataCollatorWithFlattening gives them, spare that.
  - Under torch.compile and in a CUDA graph nothing can be read, so a mask [B, 1, S, S] is made wherever sequences might
    be packed: in any forward without an `attention_mask`. Give one, of ones, and it is not made.
"""

try:
    import transformers  # noqa: F401  asked for here so that its absence is explained
except ImportError as error:
    raise ImportError(
        "dualops.torch_bridge.integrations.transformers needs transformers: pip install 'dualops[transformers]'"
    ) from error

from .patching import Patch, patch, register

__all__ = ["Patch", "patch", "register"]
