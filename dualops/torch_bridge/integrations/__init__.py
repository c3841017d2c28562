"""dualops as a replacement in other libraries. Import these modules explicitly; each says what it needs.

transformers                    Hugging Face models: `register` and `patch`
scaled_dot_product_attention    torch's function of that name
flash_attention_impl            torch's own switch of attention kernels: `register`
flash_attn                      flash-attn's functions
"""
