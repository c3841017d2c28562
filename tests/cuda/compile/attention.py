"""What attention's kernels are built for, by the names of options."""

from __future__ import annotations

from typing import Any

from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.flash_attention.arguments import Variant, variant
from dualops.spec import OPERATORS, Case
from dualops.spec.attention.cases import EVERYTHING, lists_shape, paired

S, H, Hkv = 256, 2, 1


def variant_of(
    D: int, Dv: int, *options: str, dtype: str = "bfloat16", varlen: bool = False, blocks_of: Any = None
) -> Variant:
    """Heads of these widths with these options; blocks_of: a mask_mod, which is there with its block mask."""
    shapes, params = paired({name: EVERYTHING[name] for name in options}, (1, H, S, D), (Hkv, S), Dv)
    if blocks_of is not None:
        params["mask_mod"], shapes["block_mask"] = blocks_of, lists_shape(1, 1, S, S)
    if varlen:
        shapes |= {"q": (S, H, D), "k": (S, Hkv, D), "v": (S, Hkv, Dv), "cu_seqlens_q": (3,), "cu_seqlens_k": (3,)}
        params |= {"max_seqlen_q": S, "max_seqlen_k": S}
    spec = OPERATORS["flash_attention_varlen" if varlen else "flash_attention"]
    return variant(absent_problem(spec, Case("compiled", dtype, shapes, params)))


def names(found: Variant) -> list[str]:
    """The options of a variant, as a rung's `configs` takes them."""
    return [option.name for option, _ in found.having.variants]
