"""dualops in other libraries' places. Nothing here is imported unasked, and each module says what it needs.

transformers                    Hugging Face models: `register` and `patch`
scaled_dot_product_attention    torch's function of that name
flash_attention_impl            torch's own switch of attention kernels: `register`
flash_attn                      flash-attn's functions
"""
