"""Gradients of attention by kernels and Configs that a test chooses, compared with truth."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np

import dualops.cuda
from dualops import reference, spec
from dualops.cuda.flash_attention import sm80
from dualops.cuda.flash_attention.sm80.config import Sm80DkvConfig, Sm80DqConfig
from dualops.cuda.flash_attention.sm90 import backward
from dualops.spec import OPERATORS, Case
from dualops.spec.attention.cases import lists_shape, paired
from tests.checks import check
from tests.cuda.configs import Change, changed
from tests.cuda.simulator.attention import FLOOR, numbers, widened

TWO_KERNELS: Change = (backward, {"fused_choices": lambda *_: iter(())})  # one for dq, one for dk and dv
VARLEN = "flash_attention_varlen"
NAMES = ("dq", "dk", "dv")
gradient: Any = partial(dualops.cuda.flash_attention_backward, kernel="sm90")
gradient_varlen: Any = partial(dualops.cuda.flash_attention_varlen_backward, kernel="sm90")


@contextmanager
def _both(*changes: Change) -> Iterator[None]:
    with changed("flash_attention", *changes), changed(VARLEN, *changes):
        yield


def _alone(config: Any) -> Callable[..., Any]:
    return lambda *_: iter([(config, "alone")])


def served(config: Any = None) -> AbstractContextManager[None]:
    """Inside the with statement sm90 has two kernels, with this Config of dk and dv if one is given."""
    return _both(TWO_KERNELS, *([(backward, {"dkv_configs": _alone(config)})] if config is not None else []))


def fused(config: Any = None, operator: str = "flash_attention") -> AbstractContextManager[None]:
    """Inside the with statement sm90 has one kernel, also for problems as small as a test's."""
    instead: dict[str, Any] = {"LEAST_TILES": 1}
    if config is not None:
        instead["fused_configs"] = _alone(config)
    return changed(operator, (backward, instead | {"dq_configs": lambda *_: iter(())}))


OF_SM80 = Sm80DqConfig(1, 32), Sm80DkvConfig(1, 32)


def on_sm80(configs: Any = OF_SM80) -> AbstractContextManager[None]:
    """Inside the with statement sm80 has these Configs of dq, and of dk and dv; None: those that a call takes."""
    if configs is None:
        return _both()
    dq, dkv = configs
    return _both((sm80, {"dq_configs": _alone(dq), "dkv_configs": _alone(dkv)}))


# "own": what sm90 takes of its own accord
WAYS: dict[str, Callable[..., AbstractContextManager[None]]] = {
    "two": served,
    "fused": fused,
    "sm80": on_sm80,
    "own": nullcontext,
}


def _run(way: str, operator: str) -> Any:
    return partial(getattr(dualops.cuda, f"{operator}_backward"), kernel="sm80" if way == "sm80" else "sm90")


def checked(
    q: tuple[int, ...],
    k: tuple[int, int],
    Dv: int,
    *configs: Any,
    way: str = "two",
    dtype: str = "bfloat16",
    special: bool = False,
    blocks: tuple[int, int] | None = None,
    **params: Any,
) -> None:
    """The gradient of a call. q: B, H, Sq, D; k: heads and tokens; configs: the way's, if one is given; blocks: batches
    and heads of a block mask, where there is one; params as `paired` takes them, or a mask_mod.
    """
    mask_mod = params.pop("mask_mod", None)
    if mask_mod is True:
        params["mask_mod"], mask_mod = True, None
    shapes, params = paired(params, q, k, Dv)
    if mask_mod is not None:
        params["mask_mod"] = mask_mod
    if blocks is not None:
        shapes["block_mask"] = lists_shape(*blocks, q[2], k[1])
    with WAYS[way](*configs):
        case, run = Case(way, dtype, shapes, params), _run(way, "flash_attention")
        check(OPERATORS["flash_attention"], case, run, backward=True, ways=("given",), special=special)


def checked_varlen(D: int, Dv: int, *configs: Any, way: str = "two", dtype: str = "bfloat16", **params: Any) -> None:
    """Do `checked` for four sequences. Of params, tuples are shapes of arrays."""
    shapes = {"q": (120, 2, D), "k": (150, 1, D), "v": (150, 1, Dv), "cu_seqlens_q": (5,), "cu_seqlens_k": (5,)}
    shapes |= {name: value for name, value in params.items() if isinstance(value, tuple)}
    params = {name: value for name, value in params.items() if name not in shapes}
    case = Case(way, dtype, shapes, {"max_seqlen_q": 70, "max_seqlen_k": 80, "return_lse": True, **params})
    with fused(*configs, operator=VARLEN) if way == "fused" else WAYS[way](*configs):
        check(OPERATORS[VARLEN], case, _run(way, VARLEN), backward=True, ways=("given",))


def held(found: Any, *given: Any, **params: Any) -> None:
    """Gradients of these arrays, of sequences where q has three axes, by the spec's rule of accuracy; NaN and
    infinities where truth has them.
    """
    function = "flash_attention_backward" if given[0].ndim == 4 else f"{VARLEN}_backward"
    wide = {name: widened(value) for name, value in params.items()}
    truths = getattr(reference, function)(*map(widened, given), **wide)
    baselines = getattr(reference, function)(*given, **params)
    for name, actual, truth, baseline in zip(NAMES, found, truths, baselines):
        result = spec.compare(actual, truth, baseline, dtype=str(given[0].dtype), floor=FLOOR, name=name)
        assert result.passed, result.message


def arrays_for(q: tuple[int, ...], k: tuple[int, ...], Dv: int, dtype: Any = None) -> list[np.ndarray]:
    """q, k, v and do for arrays of these shapes."""
    shapes = (q, k, (*k[:-1], Dv), (*q[:-1], Dv))
    made = [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    return [x.astype(dtype) for x in made] if dtype else made


def checked_arrays(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray, dlse: Any = None, way: Any = "", **params: Any
) -> Any:
    """The gradients of these arrays, compared with truth. way: "sm80", or as sm90 is served meanwhile."""
    o, lse = reference.flash_attention(q, k, v, return_lse=True, **params)
    arrays = (q, k, v, o, lse, do, dlse)
    found = _run(way, "flash_attention")(*arrays, **params)
    held(found, *arrays, **params)
    return found
