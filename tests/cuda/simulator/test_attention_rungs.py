"""Which rung takes a call of attention, which rungs refuse it, and whether their tiles fit into shared memory."""

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

import dualops.cuda
from dualops.cuda.flash_attention.sm80 import config as sm80
from dualops.cuda.flash_attention.sm90 import config as sm90
from dualops.cuda.flash_attention.sm90.dkv_config import DkvApartConfig, DkvConfig, dkv_configs
from dualops.cuda.flash_attention.sm90.dq_config import dbias_configs, dq_configs
from dualops.cuda.launch.device import known
from dualops.spec.attention import OPTIONS
from tests.cuda.simulator.attention import BFLOAT16, numbers

CONSUMERS, HOPPER = 99 * 1024, known("sm_90a").shared_memory_per_block
# by where rows begin, elements before them and between them: boxes, multiples of 8 bytes and of 2 bytes
PLACES = {"boxes": (0, 0), "by 8 bytes": (4, 8), "by 2 bytes": (1, 1)}


class Call(NamedTuple):
    """Of one head. refuse: rungs that say so where they are asked for."""

    rung: str
    refuse: tuple[str, ...] = ()
    backward: bool = False
    D: int = 16
    Dv: int = 16
    Sq: int = 8
    Sk: int = 8
    dtype: Any = BFLOAT16
    place: str = "boxes"
    same: str = ""  # arrays whose rows are all one, in memory too
    scale: float | None = None
    causal: bool = False

    def arrays(self) -> dict[str, np.ndarray]:
        sizes = {"q": (self.Sq, self.D), "k": (self.Sk, self.D), "v": (self.Sk, self.Dv)}
        sizes |= {"o": (self.Sq, self.Dv), "do": (self.Sq, self.Dv)} if self.backward else {}
        made, (first, more) = {}, PLACES[self.place]
        for name, (S, width) in sizes.items():
            rows = numbers(1, 1, S, width + more).astype(self.dtype)[..., first : first + width]
            made[name] = np.broadcast_to(rows[:, :, :1], rows.shape) if name in self.same.split() else rows
        return made | ({"lse": np.zeros((1, 1, self.Sq), np.float32)} if self.backward else {})


BOTH = ("sm80", "sm90")
SINGLE: dict[str, Any] = {"dtype": np.float32}
GRADIENT: dict[str, Any] = {"backward": True}
CALLS = [
    *(Call("sm90", D=D, Dv=D) for D in (16, 64)),
    Call("sm80", ("sm90",), place="by 8 bytes"),
    Call("sm80", ("sm90",), same="q k v"),
    Call("simt", BOTH, D=264),
    *(Call("simt", BOTH, scale=scale) for scale in (0.0, -1.0)),
    Call("simt", ("sm80",), dtype=np.float64),
    Call("simt", ("sm80",), Dv=264, **SINGLE),
    # float32 by sm90 where queries are many, and by simt
    Call("simt", ("sm90",), D=64, Dv=64, **SINGLE),
    Call("sm90", D=8, Dv=8, Sq=65, Sk=65, **SINGLE),
    Call("simt", ("sm90",), D=8, Dv=8, Sq=64, Sk=65, **SINGLE),
    *(Call("simt", D=D, Dv=Dv, Sq=65, Sk=65, **SINGLE) for D, Dv in ((136, 8), (8, 136))),
    # gradients
    Call("sm90", **GRADIENT),
    Call("simt", scale=0.0, **GRADIENT),
    Call("sm80", same="do", **GRADIENT),
    Call("simt", **GRADIENT, **SINGLE),
    Call("sm90", D=136, **GRADIENT),
    Call("simt", D=264, **GRADIENT),
    Call("sm80", D=12, Dv=12, **GRADIENT),
    Call("sm90", D=8, Dv=8, Sq=65, Sk=65, **GRADIENT, **SINGLE),
    Call("simt", D=8, Dv=8, Sq=65, Sk=64, **GRADIENT, **SINGLE),
    Call("sm90", D=128, Dv=8, Sq=65, Sk=65, **GRADIENT, **SINGLE),
    Call("sm80", place="by 2 bytes", **GRADIENT),
    Call("sm80", D=128, Dv=40, place="by 2 bytes", causal=True, **GRADIENT),
    *(Call("simt", D=D, Dv=Dv, place="by 2 bytes", **GRADIENT) for D, Dv in ((136, 16), (16, 136))),
    Call("simt", place="by 2 bytes", scale=0.0, **GRADIENT),
    Call("simt", place="by 2 bytes", **GRADIENT, **SINGLE),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_which_rung_takes_a_call(call):
    arrays, params = call.arrays(), {"scale": call.scale, "causal": call.causal}
    plan = dualops.cuda.plan("flash_attention", **arrays, **params, backward=call.backward)
    assert plan.choice.rung == call.rung
    for rung in call.refuse:
        with pytest.raises(NotImplementedError, match=f"flash_attention: rung {rung} does not do"):
            dualops.cuda.flash_attention(**arrays, **params, kernel=rung)


def test_tiles_of_sm80_fit_into_what_a_block_of_a_consumers_card_has():
    for D in (32, 64, 128, 192, 256):
        assert min(config.shared_bytes(D, D) for config, _ in sm80.configs(D, D, [])) <= CONSUMERS
    for D, options in product((32, 64, 128), ([], ["bias"])):
        dq = [each for each, _ in sm80.dq_configs(D, D, options)]
        assert min(each.min_blocks * each.shared_bytes(D, D) for each in dq) <= CONSUMERS
        dkv = [each for each, _ in sm80.dkv_configs(D, D, options)]
        assert min(each.shared_bytes(D, D) + each.statistics_bytes for each in dkv) <= CONSUMERS


@pytest.mark.parametrize("options", [[], *([option.name] for option in OPTIONS), [option.name for option in OPTIONS]])
def test_tiles_of_forward_fit(options):
    for D, Dv in product(range(64, 257, 64), range(64, 513, 64)):
        for config, _ in [*sm90.configs(D, Dv, options), sm90.short_config(D, Dv, options, 4)]:
            assert config.shared_bytes(D, Dv) <= HOPPER - sm90.SLACK, (D, Dv, config)
            assert config.columns(Dv) <= 256 and config.columns(Dv) * config.slices >= Dv


@pytest.mark.parametrize(
    "options", [[], ["softcap"], ["dropout"], ["bias", "softcap"], ["mask_mod", "block_mask"]], ids="-".join
)
@pytest.mark.parametrize(("D", "Dv"), [(64, 192), (192, 64), (192, 128), (128, 256), (192, 192), (256, 256)])
def test_tiles_of_gradients_of_wide_heads_fit(D, Dv, options):
    ((dkv, _),) = dkv_configs(D, Dv, options)
    ((dq, _),) = dq_configs(D, Dv, options)
    assert isinstance(dkv, DkvApartConfig | DkvConfig)
    assert dkv.shared_bytes(D, Dv) + dkv.slack <= HOPPER and dq.shared_bytes(D, Dv) + 1024 <= HOPPER


def test_tiles_of_dq_and_dbias_fit():
    options = ([], ["mask_mod"], ["bias"], ["bias", "dropout"], ["mask_mod", "block_mask"])
    for D, given in product((64, 128), options):
        for config, _ in dq_configs(D, D, given, "bias" in given):
            assert config.shared_bytes(D, D) + sm90.SLACK <= HOPPER
    for D in (64, 128, 192, 256):
        config, _ = next(dbias_configs(D, D, HOPPER - 1024, ["bias"]))
        assert config.shared_bytes(D, D) + config.words_bytes <= HOPPER - 1024
