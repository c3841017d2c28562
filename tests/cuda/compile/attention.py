"""What attention's kernels are built for, by the names of options."""

from typing import Any

import numpy as np

from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.flash_attention.arguments import Variant, variant
from dualops.spec import OPERATORS, Case
from dualops.spec.attention.cases import EVERYTHING, documents, lists_shape, paired, tanh_softcap, woven

S, H, Hkv = 256, 2, 1
IDS = np.arange(16384, dtype=np.int32) // 700


def causal_documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i // 1000 == j // 1000) & (j <= i)


def read_documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (IDS[i] == IDS[j]) & (j <= i)


# by name, a mask_mod that comes with its block mask, or a score_mod
BLOCKS = {f"blocks:{each.__name__}": each for each in (documents, woven, causal_documents, read_documents)}
OF_SCORE = "score_mod:tanh_softcap"  # of the score alone: `bent`, which "score_mod" is, needs more registers


def variant_of(D: int, Dv: int, options: str = "", dtype: str = "bfloat16", varlen: bool = False) -> Variant:
    """Heads of these widths with these options, "everything" for all."""
    given = options.split()
    named = [*EVERYTHING] if given == ["everything"] else [name for name in given if name in EVERYTHING]
    shapes, params = paired({name: EVERYTHING[name] for name in named}, (1, H, S, D), (Hkv, S), Dv)
    for name in given:
        if name in BLOCKS:
            params["mask_mod"], shapes["block_mask"] = BLOCKS[name], lists_shape(1, 1, S, S)
        elif name == OF_SCORE:
            params["score_mod"] = tanh_softcap
        elif name not in (*EVERYTHING, "everything"):
            raise ValueError(f"no option {name}")
    if varlen:
        shapes |= {"q": (S, H, D), "k": (S, Hkv, D), "v": (S, Hkv, Dv), "cu_seqlens_q": (3,), "cu_seqlens_k": (3,)}
        params |= {"max_seqlen_q": S, "max_seqlen_k": S}
    spec = OPERATORS["flash_attention_varlen" if varlen else "flash_attention"]
    return variant(absent_problem(spec, Case("compiled", dtype, shapes, params)))


def names(found: Variant) -> list[str]:
    """The options of a variant, as a rung's `configs` takes them."""
    return [option.name for option, _ in found.having.variants]
