"""`patch` and its undo: one model and no other, all of it or nothing; rope's tables against transformers' own."""

import copy
import pickle
from functools import cache, wraps
from inspect import signature
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama

from dualops.reference.rope import inverse_frequencies
from dualops.spec import rope_tables as SPEC_TABLES
from dualops.spec.meta import ArrayMeta
from dualops.torch_bridge import rope, rope_tables
from dualops.torch_bridge.integrations.transformers import patch, patching, register
from tests.processes import printed

from .models import FAMILIES, close, config, model, tokens
from .test_transformers import ROPES


def state_of(model: nn.Module) -> list[tuple[Any, ...]]:
    """All that `patch` may change."""
    modules = model.named_modules()
    return [(place, type(module), id(module.__dict__.get("config")), *module.__dict__) for place, module in modules]


def calls(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **inputs: Any) -> set[str]:
    seen: set[str] = set()

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(str(function))
            return function(*args, **(kwargs or {}))

    with Mode(), torch.no_grad():
        model(tokens(1, 6), **inputs)
    return {name.removeprefix("dualops.").removesuffix(".default") for name in seen if name.startswith("dualops.")}


# --- one model and no other ----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_all_operators_are_ours_and_undo_gives_back_all(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(family)
    before, ids, state = state_of(made), tokens(1, 6), dict(made.state_dict())
    expected = made(ids).logits
    undo = patch(made)
    assert calls(made, monkeypatch) == {"flash_attention", "rms_norm", "rope"}
    assert list(made.state_dict()) == list(state)
    assert not torch.equal(made(ids).logits, expected)
    undo()
    assert state_of(made) == before
    assert calls(made, monkeypatch) == set()
    assert torch.equal(made(ids).logits, expected)


@pytest.mark.parametrize("part", ["attention", "rms_norm", "rope"])
def test_a_part_of_it(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, ids = model("qwen3"), tokens(1, 6)
    expected = made(ids).logits
    with patch(made, **{name: name == part for name in ("attention", "rms_norm", "rope")}):
        assert calls(made, monkeypatch) == {"flash_attention" if part == "attention" else part}
        close(made(ids).logits, expected, expected)
    assert calls(made, monkeypatch) == set()


def test_other_models_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, own = FAMILIES["llama"][0], config("llama")
    one, two = kind(own), kind(own)
    before = state_of(two)
    undo = patch(one)
    assert (one.config._attn_implementation, two.config._attn_implementation) == ("dualops", "eager")
    assert state_of(two) == before
    assert calls(two, monkeypatch) == calls(kind(own), monkeypatch) == set()
    undo()
    assert one.config is own


def test_a_copy_of_a_patched_model_has_an_undo_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one = model("llama")
    undo = patch(one)
    two = copy.deepcopy(one)
    assert calls(two, monkeypatch) == calls(one, monkeypatch) != set()
    undo()
    assert calls(one, monkeypatch) == set()
    assert calls(two, monkeypatch) != set()
    two._dualops_patch()
    assert calls(two, monkeypatch) == set()
    assert two.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_model_saved_whole_is_patched_when_it_is_loaded(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, ids = model(family), tokens(2, 6)
    state, eager = state_of(one), one(ids).logits
    undo = patch(one)
    expected = one(ids).logits
    torch.save(one, tmp_path / "model.pt")
    for two in (torch.load(tmp_path / "model.pt", weights_only=False), pickle.loads(pickle.dumps(one))):
        assert calls(two, monkeypatch) == {"flash_attention", "rms_norm", "rope"}
        assert torch.equal(two(ids).logits, expected)
        assert repr(two._dualops_patch) == repr(undo)
        two._dualops_patch()
        assert calls(two, monkeypatch) == set()
        assert torch.equal(two(ids).logits, eager)
    undo()
    assert state_of(one) == state


def test_a_patched_model_is_loaded_by_a_process_that_knows_nothing_of_it(tmp_path: Path) -> None:
    one, ids = model("llama"), tokens(2, 6)
    patch(one)
    torch.save((one, ids, one(ids).logits.detach()), tmp_path / "model.pt")
    script = "import sys, torch\none, ids, expected = torch.load(sys.argv[1], weights_only=False)\n"
    script += "print(torch.equal(one(ids).logits, expected), one.config._attn_implementation, one._dualops_patch)"
    counts = "attention of 2 modules, rms_norm of 5 modules, rope of 2 modules"
    found = printed("-c", script, tmp_path / "model.pt", OMP_NUM_THREADS="1")
    assert found == f"True dualops <Patch of LlamaForCausalLM: {counts}>\n"


def renamed(function: Any) -> Any:
    """As transformers decorates a forward whose argument has another name now."""

    @wraps(function)
    def called(*args: Any, **more: Any) -> Any:
        if "older_mask" in more:
            more["attention_mask"] = more.pop("older_mask")
        return function(*args, **more)

    return called


def test_decorated_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ids = model("llama"), tokens(2, 6)
    expected = made(ids).logits
    kind = type(made.model.layers[0].self_attn)
    for _ in range(2):
        monkeypatch.setattr(kind, "forward", renamed(kind.forward))
        with patch(made):
            assert calls(made, monkeypatch) == {"flash_attention", "rms_norm", "rope"}
            close(made(ids).logits, expected, expected)
            forward = made.model.layers[0].self_attn.forward
            x, tables = torch.randn(2, 6, 24), [torch.ones(1, 6, 8)] * 2
            one, two = (forward(x, tables, **{name: None})[0] for name in ("older_mask", "attention_mask"))
            assert torch.equal(one, two)
            assert "attention_mask" in signature(forward).parameters


def test_decorations_that_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model("llama")
    kind = type(made.model.layers[0].self_attn)
    own = kind.forward
    place = r"patch: model.layers.0.self_attn \(LlamaAttention\): its forward is decorated, by a "

    @wraps(own)
    def elsewhere(*args: Any, **more: Any) -> Any:
        return getattr(modeling_llama, "another")(*args, **more)  # noqa: B009

    for decorated, message in ((cache(own), "_lru_cache_wrapper"), (elsewhere, "function that does not hold it")):
        monkeypatch.setattr(kind, "forward", decorated)
        unchanged(made, NotImplementedError, place + message)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_both_names_of_the_cache() -> None:
    """transformers 5.24 renames past_key_values, and takes both until 5.40."""
    made = model("llama")
    attention = made.model.layers[0].self_attn
    names = {"cache", "past_key_values"} & {*signature(attention.forward).parameters}
    if hasattr(type(attention).forward, "__wrapped__"):
        names.add("past_key_values")
    assert names
    patch(made)
    x, tables = torch.randn(2, 6, 24), [torch.ones(1, 6, 8)] * 2
    for name in names:
        kept = DynamicCache(config=made.config)
        attention.forward(x, tables, attention_mask=None, **{name: kept})
        assert kept.get_seq_length() == 6


def test_registered_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    register()
    made, ids = model("gemma3"), tokens(2, 9)
    expected = made(ids).logits
    made.set_attn_implementation("dualops")
    assert calls(made, monkeypatch) == {"flash_attention"}
    close(made(ids).logits, expected, expected)


# --- all or nothing ------------------------------------------------------------------------------


class OtherRMSNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states)


def unchanged(made: Any, error: type[Exception], message: str, **options: bool) -> None:
    before, implementation = state_of(made), made.config._attn_implementation
    with pytest.raises(error, match=message):
        patch(made, **options)
    assert state_of(made) == before
    assert made.config._attn_implementation == implementation


def test_a_norm_that_is_not_known() -> None:
    made = model("llama")
    made.model.layers[1].input_layernorm = OtherRMSNorm(24)
    message = r"patch: model.layers.1.input_layernorm \(OtherRMSNorm\) is none of the norms that are known \(LlamaRMSN"
    unchanged(made, NotImplementedError, message)
    patch(made, rms_norm=False)


def test_a_rotation_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mistral import modeling_mistral

    made = model("mistral")
    message = r"patch: model.layers.0.self_attn \(MistralAttention\) rotates otherwise than Llama and GPT-OSS"
    with monkeypatch.context() as changed:
        changed.setattr(modeling_mistral, "rotate_half", lambda x: x)
        unchanged(made, NotImplementedError, message)
    with monkeypatch.context() as changed:
        changed.setattr(modeling_mistral, "apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim=1: (q, k))
        unchanged(made, NotImplementedError, message)
    patch(made)


def test_what_cannot_be_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"^patch: model is a Linear, expected a transformers.PreTrainedModel$"):
        patch(nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=40))
    gpt2.set_attn_implementation("eager")
    unchanged(gpt2, ValueError, "patch: GPT2LMHeadModel has no RMSNorm, expected rms_norm=False")
    unchanged(
        gpt2, ValueError, "patch: GPT2LMHeadModel has no apply_rotary_pos_emb, expected rope=False", rms_norm=False
    )
    patch(gpt2, rms_norm=False, rope=False)
    assert calls(gpt2, monkeypatch) == {"flash_attention"}
    made = model("llama")
    layer = made.model.layers[1].self_attn
    layer.forward = layer.forward  # as hooks do
    unchanged(made, NotImplementedError, r"patch: model.layers.1.self_attn \(LlamaAttention\) has had its forward repl")
    del layer.forward
    monkeypatch.setattr(type(made), "_can_set_attn_implementation", classmethod(lambda cls: False))
    unchanged(made, NotImplementedError, "patch: LlamaForCausalLM does not take its attention from transformers' inte")


def test_nothing_to_patch() -> None:
    made = model("llama")
    off = {"attention": False, "rms_norm": False, "rope": False}
    unchanged(made, ValueError, "patch: attention, rms_norm and rope are all False, expected one of them to be", **off)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1))
    part = {"rms_norm": False, "rope": False}
    unchanged(mamba, ValueError, r"^patch: MambaForCausalLM has no attention, expected attention=False$", **part)
    message = r"^patch: nothing of MambaForCausalLM can be patched: MambaForCausalLM has no attention$"
    unchanged(mamba, ValueError, message, strict=False, **part)


def test_what_can_be_patched_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ids = model("llama"), tokens(1, 5)
    norm = made.model.layers[1].input_layernorm = OtherRMSNorm(24)
    expected, before = made(ids).logits, state_of(made)
    done = patch(made, strict=False)
    known = "LlamaRMSNorm, GptOssRMSNorm, Gemma2RMSNorm"
    reason = f"model.layers.1.input_layernorm (OtherRMSNorm) is none of the norms that are known ({known})"
    assert done.left == (reason,)
    assert done.counts == {"attention": 2, "rms_norm": 4, "rope": 2}
    changed = "attention of 2 modules, rms_norm of 4 modules, rope of 2 modules"
    assert repr(done) == f"<Patch of LlamaForCausalLM: {changed}; not: {reason}>"
    assert "forward" not in norm.__dict__
    close(made(ids).logits, expected, expected)
    done()
    assert repr(done) == "<Patch of LlamaForCausalLM, undone>"
    assert state_of(made) == before
    mamba = MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1))
    done = patch(mamba, strict=False)
    assert repr(done).startswith(
        "<Patch of MambaForCausalLM: rms_norm of 2 modules; not: MambaForCausalLM has no apply_"
    )
    assert calls(mamba, monkeypatch) == {"rms_norm"}
    monkeypatch.setattr(type(made), "_can_set_attn_implementation", classmethod(lambda cls: False))
    done = patch(made, strict=False)
    assert "LlamaForCausalLM does not take its attention from transformers' interface" in done.left


def test_patching_twice_and_undoing_twice() -> None:
    made = model("llama")
    undo = patch(made)
    with pytest.raises(RuntimeError, match=r"^patch: LlamaForCausalLM is patched already"):
        patch(made)
    with pytest.raises(NotImplementedError, match=r"patch: .* \(LlamaRMSNorm\) has had its forward replaced"):
        patch(made.model)
    norm = made.model.norm
    own = norm.forward
    norm.forward = lambda x: x
    with pytest.raises(RuntimeError, match="LlamaRMSNorm: its forward was replaced after patch"):
        undo()
    assert made.config._attn_implementation == "dualops"
    norm.forward = own
    undo()
    with pytest.raises(RuntimeError, match="this patch is undone already"):
        undo()
    patch(made)()


# --- norms and rotations by themselves -----------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind, *_ in patching.NORMS])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lower", [False, True])
def test_norms_keep_their_dtypes(kind: Any, weight: torch.dtype, x: torch.dtype, lower: bool, device: str) -> None:
    """Weights kept in float32 among bfloat16, as in GPT-OSS, and narrower ones; under autocast too."""
    norm = kind(16).to(device, weight)
    nn.init.normal_(norm.weight)
    ours = next(function for like, _, function in patching.NORMS if like is kind)
    given = torch.randn(3, 16, device=device).to(x)
    with torch.autocast(device, torch.bfloat16, enabled=lower):
        expected, found = norm(given), ours(norm, given)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_torchs_own_norm() -> None:
    made = model("llama")
    made.model.norm = nn.RMSNorm(24)
    nn.init.normal_(made.model.norm.weight)
    ids = tokens(1, 5)
    expected = made(ids).logits
    patch(made)
    close(made(ids).logits, expected, expected)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_rotations_in_both_orders_of_axes(axis: int, dtypes: tuple[str, str]) -> None:
    x, table = (getattr(torch, name) for name in dtypes)
    q, k = (torch.randn(2, 3, 3, 8).to(x), torch.randn(2, 3, 3, 8).to(x))
    cos, sin = (torch.cat((half, half), -1).to(table) for half in rope_tables(torch.arange(6).reshape(2, 3), 8))
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, axis)
    for found, right in zip(patching.rotated(q, k, cos, sin, axis), expected, strict=True):
        torch.testing.assert_close(found.float(), right.float(), rtol=2e-2, atol=2e-2)
    with pytest.raises(NotImplementedError, match="apply_rotary_pos_emb: unsqueeze_dim is 0, expected 1 or 2"):
        patching.rotated(q, k, cos, sin, 0)


def test_a_rotation_that_the_package_kernels_has_made_a_module_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def module_of(function: FunctionType) -> nn.Module:
        class Func(nn.Module):
            def forward(self, *args: Any, **more: Any) -> Any:
                return function(*args, **more)

        return Func()

    wrapped = module_of(modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", wrapped)
    made = model("llama")
    patch(made)
    assert calls(made, monkeypatch) == {"flash_attention", "rms_norm", "rope"}


# --- tables --------------------------------------------------------------------------------------

SCALINGS: dict[str, dict[str, Any]] = {
    **ROPES,
    "default": {"rope_type": "default"},
    "yarn with its numbers": {**ROPES["yarn"], "attention_factor": 1.7, "truncate": False, "beta_slow": 0.5},
    "yarn, of magnitudes": {**ROPES["yarn"], "mscale": 0.7, "mscale_all_dim": 1.2},
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("theta", [1000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_frequencies_are_those_of_transformers(kind: str, theta: float, head_dim: int) -> None:
    own = config(
        "llama", rope_parameters={"rope_theta": theta, **SCALINGS[kind]}, max_position_embeddings=64, head_dim=head_dim
    )
    parameters, more = own.rope_parameters, {}
    length = 200 if kind == "dynamic" else None
    if kind == "dynamic":
        more = {"max_position_embeddings": own.max_position_embeddings, "seq_len": length}
    if kind == "default":
        expected, factor = modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(own)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](own, seq_len=length)
    scaling: Any = {**parameters, **more}
    problem = SPEC_TABLES.bind(
        {"positions": ArrayMeta((1,), "int64", (1,), "cpu", 0)}, {"dim": head_dim, "scaling": scaling}
    )
    found = inverse_frequencies(2 * problem.half, problem.theta, problem.scaling)
    torch.testing.assert_close(torch.from_numpy(found), expected.double(), rtol=2e-6, atol=0)
    assert dict(problem.scaling).get("attention_factor", 1.0) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "partial"), [("default", None), ("linear", None), ("linear", 0.5), ("llama3", 0.5), ("yarn", 0.5)]
)
def test_a_models_tables_from_its_config_as_it_is(kind: str, partial: float | None, device: str) -> None:
    more = {} if partial is None else {"partial_rotary_factor": partial}
    parameters = {"rope_theta": 1000.0, **SCALINGS[kind], **more}
    own = config("llama", rope_parameters=parameters, head_dim=16)
    embedding = modeling_llama.LlamaRotaryEmbedding(own).to(device)
    positions = torch.arange(40, device=device).reshape(2, 20)
    theirs = embedding(torch.zeros(1, device=device), positions)
    cos, sin = rope_tables(positions, own.head_dim, scaling=own.rope_parameters)
    R = theirs[0].shape[-1]
    assert cos.shape[-1] == R // 2
    for one, two in zip((cos, sin), theirs, strict=True):
        torch.testing.assert_close(torch.cat((one, one), -1), two, rtol=0, atol=2e-5)
    q, k = torch.randn(2, 2, 4, 20, 16, device=device).unbind()
    for one, two in zip(rope(q, k, cos, sin, dim=R), rope(q, k, *theirs, dim=R), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-4)


# --- imports -------------------------------------------------------------------------------------


def test_nothing_of_it_is_imported_unasked() -> None:
    script = (
        "import sys, dualops.torch_bridge\n"
        "assert not [name for name in sys.modules if 'integrations' in name and 'dualops' in name]\n"
        "import dualops.torch_bridge.integrations\n"
        "assert 'transformers' not in sys.modules\n"
        "sys.modules['transformers'] = None\n"
        "try:\n    import dualops.torch_bridge.integrations.transformers\n"
        "except ImportError as error:\n    print(error)\n"
    )
    assert printed("-c", script).strip().endswith("needs transformers: pip install 'dualops[transformers]'")
