"""attention by each form of the tensor-core rungs: widths, Configs, options. Gradients: `test_attention_gradients`."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda.flash_attention import sm80
from dualops.cuda.flash_attention.sm80.config import Sm80Config
from dualops.spec.meta import numpy_dtype
from tests.cuda.configs import alone, changed
from tests.cuda.simulator.attention import checked, named, numbers, options_for

Params = dict[str, Any]
CAUSAL: Params = {"causal": True}
TOP_LEFT: Params = {"causal": "top_left"}


def row(
    rung: str, q: tuple[int, ...], k: tuple[int, int], Dv: int, *, dtype: str = "bfloat16", lse: bool = True,
    only: Any = None, chosen: Any = None, **params: Any,
) -> Any:  # fmt: skip
    """q: B, H, Sq, D; k: heads and tokens; only: the rung's Config; chosen: fields of the Config that is chosen;
    lse: whether it is asked for. A bias is given as its shape.
    """
    if isinstance(params.get("bias"), tuple):
        params["bias"] = numbers(*params["bias"], seed=3)
    return pytest.param(
        rung, q, k, Dv, dtype, lse, only, chosen or {}, params, id=f"{rung} {q} {k} {Dv} {named(params)}"
    )


def by_mma_sync() -> Iterator[Any]:
    of = partial(row, "sm80")
    tiles = Sm80Config(1, 32)  # of 32 keys, so that there are more of them
    for params in (Params(), Params(causal=True, window=(30, 0)), TOP_LEFT, *options_for(2, 70, 90)):
        yield of((1, 2, 70, 24), (1, 90), 40, only=tiles, **params)
    for D, Dv in ((32, 96), (128, 64), (200, 136), (256, 256)):  # boxes; Q in registers, and not
        yield of((1, 1, 20, D), (1, 50), Dv, lse=False, **CAUSAL)
    # eight warps: two groups of four share tiles of keys
    yield of((1, 1, 131, 40), (1, 67), 40, only=Sm80Config(2, 32), lse=False, **TOP_LEFT)


def by_wgmma() -> Iterator[Any]:
    of = partial(row, "sm90")
    for sink in (-np.inf, -300, 30, 300):  # joins a row that has seen all of its keys, of which the first see none
        yield of((1, 2, 100, 16), (1, 70), 24, sinks=np.array([sink, 0.5], np.float32), **CAUSAL)
    # queries that see nothing after some that do: what a sink's sum divides must not be of the piece of work before
    yield of((1, 1, 260, 16), (1, 40), 24, lse=False, sinks=np.array([0.5], np.float32), **CAUSAL)
    # biases in boxes: two tiles of queries and of keys, each with an edge
    boxed = partial(of, (2, 2, 140, 16), (1, 136), 24, chosen={"bias_stages": 1})
    yield boxed(bias=(1, 2, 140, 136), **CAUSAL)
    yield boxed(bias=(140, 136), window=(60, 3), **CAUSAL)
    yield boxed(bias=(2, 1, 140, 136), sinks=np.array([0.5, -2], np.float32))


def of_three_parts() -> Iterator[Any]:
    """float32, whose numbers are three of bfloat16 each."""
    of = partial(row, "sm90", dtype="float32")
    for D, Dv, Sq, Sk in ((64, 64, 70, 40), (40, 72, 66, 150), (128, 128, 140, 90), (7, 9, 65, 1)):
        yield of((1, 1, Sq, D), (1, Sk), Dv)
    for params in options_for(2, 66, 70):
        yield of((1, 2, 66, 32), (1, 70), 40, lse=False, **params)


def wide_heads() -> Iterator[Any]:
    """V's columns in slices, o over Q."""
    of = partial(row, "sm90")
    # two pieces of work for a block, so that Q is loaded where o was; of 320, the second slice has 64 beyond V's
    for D, Dv, over, slices in ((256, 256, True, 1), (192, 184, True, 1), (128, 256, False, 1), (256, 320, True, 2)):
        yield of((1, 1, 150, D), (1, 90), Dv, chosen={"o_over_q": over, "slices": slices}, **CAUSAL)
    for params in (Params(window=(30, 5)), TOP_LEFT, *options_for(1, 70, 90)):
        slices = 1 + bool(params.keys() & {"bias", "dropout_p"})  # of 128 columns where they read
        yield of((1, 1, 70, 256), (1, 90), 256, lse=False, chosen={"slices": slices}, **params)


def few_queries() -> Iterator[Any]:
    """Keys split among blocks, heads of a group in one tile, parts merged."""
    of = partial(row, "sm90")
    for params in (
        Params(),
        Params(causal=True, window=(400, 0)),  # of some splits a row sees nothing
        Params(softcap=2.0, window=(400, 0)),
        Params(alibi_slopes=np.array([0.01, 0.02, 0.04], np.float32)),  # rows are heads
        *options_for(3, 3, 700),
    ):
        yield of((1, 3, 3, 24), (1, 700), 40, chosen={"split": True}, **params)
    for H in (2, 5, 12):  # 60 rows of 64 where heads are 5 or 12; a tile, two, three
        yield of((1, H, 30, 24), (1, 530), 40, lse=False, chosen={"heads": H, "queries": 64 // H})
    yield of((1, 2, 3, 256), (1, 600), 256, chosen={"split": True, "slices": 2}, **CAUSAL)
    yield of((1, 2, 3, 64), (1, 600), 512, chosen={"split": True, "slices": 4}, **CAUSAL)
    yield of((1, 2, 3, 256), (1, 600), 384, chosen={"split": True, "slices": 3}, bias=(2, 3, 600))


ROWS = [*by_mma_sync(), *by_wgmma(), *of_three_parts(), *wide_heads(), *few_queries()]


@pytest.mark.parametrize(("rung", "q", "k", "Dv", "dtype", "lse", "only", "chosen", "params"), ROWS)
def test_forward(rung, q, k, Dv, dtype, lse, only, chosen, params):
    (B, _, _, D), (Hkv, Sk) = q, k
    rngs = map(np.random.default_rng, range(3))
    shapes = q, (B, Hkv, Sk, D), (B, Hkv, Sk, Dv)
    arrays = [rng.standard_normal(shape).astype(numpy_dtype(dtype)) for rng, shape in zip(rngs, shapes, strict=True)]
    if "bias" in params:
        params = {**params, "bias": params["bias"].astype(arrays[0].dtype)}
    with changed("flash_attention", *([alone(sm80, only)] if only else [])):
        config = dualops.cuda.plan("flash_attention", *arrays, kernel=rung, **params).choice.config
        assert {name: getattr(config, name) for name in chosen} == chosen
        found = dualops.cuda.flash_attention(*arrays, kernel=rung, return_lse=lse, **params)
    checked(found, reference.flash_attention, *arrays, **params)
