"""`patch`: give the modules of one model new forwards; transformers' classes stay unchanged.

Models of transformers are copies of one another, so modules are recognised by their code: a norm is Llama's if its
forward has the instructions of LlamaRMSNorm.forward. A forward that rotates calls the function `apply_rotary_pos_emb`
of its module. It is rebuilt from the same code, with `rotated` under that name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from inspect import unwrap
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from ...arguments import with_dense_rows
from ...nn import RMSNorm
from ...rms_norm import rms_norm
from ...rope import rope
from .attention import NAME, attention
from .code import code_of, same_code, same_methods, with_global
from .context import GROUP, Shared, by_length
from .masks import attention_mask

ROTATION = "apply_rotary_pos_emb"
_RECORD = "_dualops_patch"  # attribute name of a model's Patch


def register() -> None:
    """Register attention with transformers as "dualops", with its masks. Repeated calls change nothing."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)


class Change(NamedTuple):
    """One attribute of a module."""

    module: nn.Module
    name: str
    old: Any  # None if only the module's class has it
    new: Any


class Refusal(NamedTuple):
    """What `patch` leaves unchanged: the error of a strict call, else a line of the report."""

    error: type[Exception]
    reason: str
    remedy: str = ""

    def raised(self) -> Exception:
        return self.error(f"patch: {self.reason}{self.remedy}")


class Patch:
    """The changes of `patch` to a model. Calling it, or leaving a `with` block, undoes them.

    `counts`: how many modules of each option run on dualops. `left`: why others do not, if `strict` was False.
    """

    def __init__(self, model: nn.Module, changes: list[Change], counts: dict[str, int], left: tuple[str, ...]):
        self.model, self.changes, self.counts, self.left = model, changes, counts, left

    def __repr__(self) -> str:
        name = type(self.model).__name__
        if self.model.__dict__.get(_RECORD) is not self:
            return f"<Patch of {name}, undone>"
        changed = ", ".join(f"{option} of {count} modules" for option, count in self.counts.items() if count)
        return f"<Patch of {name}: {changed}{''.join(f'; not: {reason}' for reason in self.left)}>"

    def __call__(self) -> None:
        """Restore the model. Raises RuntimeError, and changes nothing, if other code has changed it since."""
        if self.model.__dict__.get(_RECORD) is not self:
            raise RuntimeError(f"{type(self.model).__name__}: this patch is undone already")
        for change in self.changes:
            if change.module.__dict__.get(change.name) is not change.new:
                raise RuntimeError(
                    f"{type(change.module).__name__}: its {change.name} was replaced after patch(); undo that first"
                )
        self._restore()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error: object) -> None:
        self()

    def __setstate__(self, state: dict[str, Any]) -> None:
        register()  # the process that loads the model may not have registered it
        self.__dict__.update(state)

    def _apply(self) -> None:
        for change in self.changes:
            setattr(change.module, change.name, change.new)
        setattr(self.model, _RECORD, self)

    def _restore(self) -> None:
        for module, name, old, _ in self.changes:
            if old is None:
                delattr(module, name)
            else:
                setattr(module, name, old)
        delattr(self.model, _RECORD)


def patch(
    model: PreTrainedModel,
    attention: bool = True,
    rms_norm: bool = True,
    rope: bool = True,
    *,
    context_parallel: Any = None,
    strict: bool = True,
) -> Patch:
    """Replace operators of a transformers model by dualops'. Returns the undo: call it, or use it as a context.

    attention: flash_attention, as by `model.set_attn_implementation("dualops")`; the model gets a copy of its config,
    which another model may share. rms_norm: every RMSNorm; rope: every rotation by `apply_rotary_pos_emb`. Parameters,
    buffers and state dict are unchanged. Norms keep their dtypes but round once, where Llama's round before the weight
    too. Patch a model before it is compiled or wrapped. A deep copy of a patched model is patched, and so is one that
    was saved whole (`torch.save`, `pickle`) and loaded; each has its own undo, `copied._dualops_patch`.

    context_parallel: a ProcessGroup, or a DeviceMesh of one axis, whose ranks split the tokens of documents: each
    passes its own to the model, and attention is `dualops.torch_bridge.distributed.context_parallel`. Call
        model(input_ids=shard(ids, 0, group, cu_seqlens=cu)[None], position_ids=positions(cu, group)[None],
              cu_seq_lens_q=cu, cu_seq_lens_k=cu, use_cache=False)
    where cu is of all tokens: a list, or a tensor as DataCollatorWithFlattening makes it (on a GPU it is read once, as
    position_ids are in every forward, which waits for the GPU). A model shifts labels within a rank's tokens: pass
    shift_labels, sharded in the same way. Padding and caches are errors, as are rotary embeddings that
    depend on the longest position ("dynamic", "longrope"). Such a model can't be saved whole.

    strict=False: patch what can be patched, and leave the rest unchanged. The result's `left` and its repr list the
    rest and the reasons.

    Raises TypeError if it is no transformers model, and RuntimeError if it is patched already. Raises ValueError if
    there is nothing to patch for an option that is True. Raises NotImplementedError, with its name, for a module whose
    arithmetic differs from the known ones. With strict=False it is an error only if nothing at all can be patched.
    After an error nothing has changed.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"patch: model is a {type(model).__name__}, expected a transformers.PreTrainedModel")
    if any(_RECORD in module.__dict__ for module in model.modules()):
        raise RuntimeError(f"patch: {type(model).__name__} is patched already, expected its undo first")
    shared = None if context_parallel is None else Shared(context_parallel)
    if shared is not None:
        if not attention:
            raise ValueError("patch: context_parallel is given and attention is False, expected True")
        for reason in by_length(model):
            raise NotImplementedError(f"patch: {reason} the longest position: not with context_parallel")
    if not (attention or rms_norm or rope):
        raise ValueError("patch: attention, rms_norm and rope are all False, expected one of them to be True")
    changes: list[Change] = []
    left: list[str] = []
    counts: dict[str, int] = {"attention": 0, "rms_norm": 0, "rope": 0}

    def leave(refusal: Refusal, needed: bool = False) -> None:
        if strict or needed:
            raise refusal.raised()
        left.append(refusal.reason)

    for asked, option, what, found in (
        (rms_norm, "rms_norm", "RMSNorm", _norms(model)),
        (rope, "rope", ROTATION, _rotations(model)),
    ):
        every = list(found) if asked else []
        for each in every:
            if isinstance(each, Refusal):
                leave(each)
            else:
                changes.append(each)
                counts[option] += 1
        if asked and not every:
            leave(_nothing_of(model, what, option))
    if attention and not any(_attends(kind) for kind in {type(module) for module in model.modules()}):
        leave(_nothing_of(model, "attention", "attention"), shared is not None)
        attention = False
    if shared is not None:
        asking = [module for module in model.modules() if _asks(type(module))]
        changes += [Change(module, GROUP, None, shared) for module in asking]
    configs = _configs(model) if attention else []
    made = Patch(model, changes + configs, counts, ())
    made._apply()
    try:
        if attention:
            for refusal in _set_attention(model):
                leave(refusal, shared is not None)
            counts["attention"] = _count_of_ours(model)
        if not any(counts.values()):
            raise ValueError(f"patch: nothing of {type(model).__name__} can be patched: {'; '.join(left)}")
    except BaseException:
        made._restore()
        raise
    made.left = tuple(left)
    return made


def _nothing_of(model: nn.Module, what: str, option: str) -> Refusal:
    return Refusal(ValueError, f"{type(model).__name__} has no {what}", f", expected {option}=False")


def _forward(module: nn.Module, place: str, forward: Callable[[nn.Module], Any]) -> Change | Refusal:
    """A new forward for one module."""
    if "forward" in module.__dict__:
        return Refusal(
            NotImplementedError,
            f"{place} ({type(module).__name__}) has had its forward replaced, by hooks or by another library",
        )
    return Change(module, "forward", None, forward(module))


# --- attention -----------------------------------------------------------------------------------


def _configs(model: PreTrainedModel) -> list[Change]:
    """Copy the configs of the model's modules: other models may share them, and keep their attention."""
    having = [module for module in model.modules() if isinstance(module.__dict__.get("config"), PreTrainedConfig)]
    copies: dict[int, Any] = {}

    def copied(config: Any) -> Any:
        if id(config) not in copies:
            copies[id(config)] = own = copy.copy(config)
            for name in type(config).sub_configs:
                if isinstance(part := getattr(config, name, None), PreTrainedConfig):
                    setattr(own, name, copied(part))
        return copies[id(config)]

    return [Change(module, "config", module.config, copied(module.config)) for module in having]


def _set_attention(model: PreTrainedModel) -> Iterator[Refusal]:
    """Set attention on every module that allows it; yield a Refusal for each other one."""
    register()
    model.set_attn_implementation(NAME)
    models = [(place, module) for place, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    without = [each for each in models if each[1].config._attn_implementation != NAME]
    for place, module in without or ([] if _count_of_ours(model) else models[:1]):
        called = f"{place} ({type(module).__name__})" if place else type(module).__name__
        yield Refusal(NotImplementedError, f"{called} does not take its attention from transformers' interface")


def _attends(kind: type) -> bool:
    """Whether a class of modules computes attention, by its name, or calls transformers' interface for it."""
    return "Attention" in kind.__name__ or _asks(kind)


def _asks(kind: type) -> bool:
    methods = (member for base in kind.__mro__ if base not in PreTrainedModel.__mro__ for member in vars(base).values())
    return any("ALL_ATTENTION_FUNCTIONS" in code_of(unwrap(method)).co_names for method in methods)


def _count_of_ours(model: nn.Module) -> int:
    """Count the modules that call the interface for attention and get dualops'."""
    asking = {kind for kind in {type(module) for module in model.modules()} if _asks(kind)}
    configs = [module.__dict__.get("config") for module in model.modules() if type(module) in asking]
    return sum(getattr(config, "_attn_implementation", None) == NAME for config in configs)


# --- norms ---------------------------------------------------------------------------------------


def _readable(weight: Tensor, x: Tensor) -> Tensor:
    """Return a weight or a table in x's dtype or, if its dtype differs, in that of arithmetic, as operators require."""
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    return weight if weight.dtype in (x.dtype, wide) else weight.to(wide)


def _llama_norm(self: Any, hidden_states: Tensor) -> Tensor:
    x = with_dense_rows(hidden_states)
    y = rms_norm(x, _readable(self.weight, x), eps=self.variance_epsilon)
    return y.to(torch.promote_types(x.dtype, self.weight.dtype))


def _gpt_oss_norm(self: Any, hidden_states: Tensor) -> Tensor:
    x = with_dense_rows(hidden_states)
    return rms_norm(x, _readable(self.weight, x), eps=self.variance_epsilon).to(x.dtype)


def _gemma_norm(self: Any, x: Tensor) -> Tensor:
    x = with_dense_rows(x)
    return rms_norm(x, _readable(self.weight, x), eps=self.eps, offset=1.0).to(x.dtype)


# a class, the methods that identify its norm, and dualops' forward
NORMS: tuple[tuple[type[nn.Module], tuple[str, ...], Callable[..., Tensor]], ...] = (
    (modeling_llama.LlamaRMSNorm, ("forward",), _llama_norm),
    (modeling_gpt_oss.GptOssRMSNorm, ("forward",), _gpt_oss_norm),
    (Gemma2RMSNorm, ("forward", "_norm"), _gemma_norm),
)


def _norms(model: nn.Module) -> Iterator[Change | Refusal]:
    for place, module in model.named_modules():
        if not type(module).__name__.endswith("RMSNorm"):
            continue
        if type(module) is nn.RMSNorm:
            yield _forward(module, place, partial(partial, RMSNorm.forward))
            continue
        ours = next((function for like, names, function in NORMS if same_methods(type(module), like, names)), None)
        if ours is None:
            known = ", ".join(like.__name__ for like, *_ in NORMS)
            yield Refusal(
                NotImplementedError,
                f"{place} ({type(module).__name__}) is none of the norms that are known ({known})",
                "; leave norms out with rms_norm=False",
            )
            continue
        yield _forward(module, place, partial(partial, ours))


# --- rotary embeddings ---------------------------------------------------------------------------


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """transformers' `apply_rotary_pos_emb`, computed by `rope`.

    q [B, H, S, R], k [B, Hkv, S, R]; with unsqueeze_dim=2 [B, S, H, R]. cos, sin [B or 1, S, R or R/2]; if not of q's
    dtype, they are read as float32.
    """
    if unsqueeze_dim not in (1, 2):
        raise NotImplementedError(f"{ROTATION}: unsqueeze_dim is {unsqueeze_dim}, expected 1 or 2")
    q, k = with_dense_rows(q), with_dense_rows(k)
    cos, sin = (_readable(table, q).contiguous() for table in (cos, sin))  # GPT-OSS transposes them
    if unsqueeze_dim == 1:
        return rope(q, k, cos, sin)
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


# modules with such a function, and the helpers that it calls
ROTATIONS = ((modeling_llama, ("rotate_half",)), (modeling_gpt_oss, ("_apply_rotary_emb",)))


def _rotations(model: nn.Module) -> Iterator[Change | Refusal]:
    made: dict[type, Rotation] = {}
    for place, module in model.named_modules():
        kind = type(module)
        function = unwrap(kind.forward)
        if ROTATION not in code_of(function).co_names:
            continue
        if not any(_same_rotation(function.__globals__[ROTATION], vars(like), called) for like, called in ROTATIONS):
            yield Refusal(
                NotImplementedError,
                f"{place} ({kind.__name__}) rotates otherwise than Llama and GPT-OSS",
                "; leave rotations out with rope=False",
            )
            continue
        try:
            made[kind] = made.get(kind) or Rotation(kind)
        except NotImplementedError as error:
            yield Refusal(NotImplementedError, f"{place} ({kind.__name__}): {error}")
        else:
            yield _forward(module, place, partial(RotatingForward.of, made[kind]))


class Rotation:
    """The forward of a class of modules, with `rotated`. It is pickled as the class, since its functions can't be
    imported.
    """

    def __init__(self, kind: type[nn.Module]):
        self.kind, self.function = kind, with_global(kind.forward, ROTATION, rotated)

    def __reduce__(self) -> tuple[Any, ...]:
        return Rotation, (self.kind,)


class RotatingForward(partial[Any]):
    """The forward of one module."""

    rotation: Rotation

    @classmethod
    def of(cls, rotation: Rotation, module: nn.Module) -> RotatingForward:
        made = cls(rotation.function, module)
        made.rotation = rotation
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return RotatingForward.of, (self.rotation, *self.args)


def _same_rotation(theirs: Any, like: dict[str, Any], called: tuple[str, ...]) -> bool:
    one, two = _plain(theirs), _plain(like[ROTATION])
    return same_code(one, two) and all(same_code(one.__globals__.get(name), two.__globals__[name]) for name in called)


def _plain(function: Any) -> Any:
    """Return the function, even if the package `kernels` has wrapped it in a module."""
    if isinstance(function, nn.Module):
        forward = type(function).forward
        inside = [cell.cell_contents for cell in forward.__closure__ or ()]
        return next((value for value in inside if isinstance(value, FunctionType)), forward)
    return function
