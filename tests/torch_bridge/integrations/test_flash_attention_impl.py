"""torch's own switch: on the CPU the functions behind it, on a GPU the kernels that ran."""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.nested._internal import sdpa as nested_sdpa
from torch.nn.attention import SDPBackend
from torch.nn.attention.varlen import varlen_attn as torchs_varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from dualops.torch_bridge.flash_attention import flash_attention, flash_attention_varlen
from dualops.torch_bridge.integrations import flash_attention_impl as module
from tests.torch_bridge.integrations.conftest import drawn
from tests.torch_bridge.integrations.test_flash_attn import truth as formula

ATEN: Any = torch.ops.aten
varlen_attn: Any = torchs_varlen_attn
varlen: Any = flash_attention_varlen
LENGTHS_Q, LENGTHS_K = (3, 1, 5), (4, 6, 5)
WINDOWS = [(-1, -1), (-1, 0), (2, 0), (1, 2), (-1, 1)]
IN_PLACE = pytest.mark.skipif(
    not hasattr(ATEN, "_flash_attention_forward_no_dropout_inplace"), reason="this torch has no such operator"
)


@pytest.fixture
def overrides() -> Iterator[module.Overrides]:
    """dualops in torch's place for CPU tensors, which have no flash kernels under those names."""
    made = module.Overrides("CPU")
    yield made
    made.remove()


@pytest.fixture
def activated() -> Iterator[None]:
    module.register()
    torch.nn.attention.activate_flash_attention_impl("dualops")
    yield
    torch.nn.attention.restore_flash_attention_impl()


def ends(lengths: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


def truth(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int] = (-1, -1), scale: float | None = None) -> Tensor:
    """Attention of [S, H, D] in float64; a window counts from the last key, and -1 is unbounded."""
    return formula(*(x[None].double() for x in (q, k, v)), window_size=window, softmax_scale=scale)[0]


def packed(heads: int = 2, device: str = "cpu", dtype: torch.dtype = torch.float64, D: int = 8) -> Any:
    """q, k and v of sequences one after another, [total, heads, D]."""
    return [
        drawn(sum(lengths), count, D, device=device, dtype=dtype, seed=i).requires_grad_()
        for i, (lengths, count) in enumerate([(LENGTHS_Q, heads), (LENGTHS_K, 2), (LENGTHS_K, 2)])
    ]


def truth_of_packed(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
    parts = zip(q.split(LENGTHS_Q), k.split(LENGTHS_K), v.split(LENGTHS_K), strict=True)
    return torch.cat([truth(*part, *args, **options) for part in parts])


def lengths_of(device: str = "cpu") -> tuple[Tensor, Tensor, int, int]:
    return ends(LENGTHS_Q, device), ends(LENGTHS_K, device), max(LENGTHS_Q), max(LENGTHS_K)


def nested(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Packed sequences as jagged tensors [B, heads, S, D]."""
    for_q, for_k = (
        {"offsets": ends(n, q.device.type).long(), "min_seqlen": min(n), "max_seqlen": max(n)}
        for n in (LENGTHS_Q, LENGTHS_K)
    )
    made = torch.nested.nested_tensor_from_jagged
    return [made(x, **options).transpose(1, 2) for x, options in ((q, for_q), (k, for_k), (v, for_k))]


def same(found: Tensor, expected: Tensor, leaves: Any) -> None:
    """Results and gradients."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    incoming = drawn(*found.shape, seed=9)
    for x, y in zip(*(torch.autograd.grad(o, leaves, incoming) for o in (found, expected)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


# --- the operators -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [2, 4])
def test_scaled_dot_product_flash_attention(is_causal: bool, heads: int, overrides: Any) -> None:
    q, k, v = leaves = [drawn(2, n, 5, 4, seed=i).requires_grad_() for i, n in enumerate((heads, 2, 2))]
    found, lse, ends_q, ends_k, max_q, max_k, state, _, debug = ATEN._scaled_dot_product_flash_attention(
        q, k, v, 0.0, is_causal, scale=0.7
    )
    same(found, scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.7, enable_gqa=True), leaves)
    assert (lse.shape, ends_q, ends_k, max_q, max_k, debug.numel()) == ((2, heads, 5), None, None, 5, 5, 0)
    assert (state.shape, state.dtype) == ((2,), torch.uint64)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7)])
def test_flash_attention_forward_of_whole_batches(window: Any, lengths: tuple[int, int], overrides: Any) -> None:
    """[B, S, H, D], whose memory is read and written as it is."""
    Sq, Sk = lengths
    q, k, v = leaves = [drawn(2, S, 2, 4, seed=i).requires_grad_() for i, S in enumerate((Sq, Sk, Sk))]
    left, right = window
    found, lse, *_ = ATEN._flash_attention_forward(
        q, k, v, None, None, Sq, Sk, 0.0, False, False, scale=0.7, window_size_left=left, window_size_right=right
    )
    same(found, torch.stack([truth(*x, window, 0.7) for x in zip(q, k, v, strict=True)]), leaves)
    assert (lse.shape, found.is_contiguous()) == ((2, 2, Sq), True)


@pytest.mark.parametrize("heads_first", [False, True])
def test_causal_counts_from_the_last_key(heads_first: bool, overrides: Any) -> None:
    q, k, v = leaves = [drawn(1, S, 2, 4, seed=i).requires_grad_() for i, S in enumerate((3, 7, 7))]
    if heads_first:
        q, k, v = (x.transpose(1, 2) for x in leaves)
        found = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0].transpose(1, 2)
    else:
        found, *_ = ATEN._flash_attention_forward(q, k, v, None, None, 3, 7, 0.0, True, False)
    same(found, truth(leaves[0][0], leaves[1][0], leaves[2][0], (-1, 0))[None], leaves)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", [2, 4])
def test_flash_attention_forward_of_packed_sequences(window: Any, heads: int, overrides: Any) -> None:
    q, k, v = leaves = packed(heads)
    left, right = window
    found, lse, *_ = ATEN._flash_attention_forward(
        q, k, v, *lengths_of(), 0.0, False, False, window_size_left=left, window_size_right=right
    )
    same(found, truth_of_packed(q, k, v, window), leaves)
    assert lse.shape == (heads, sum(LENGTHS_Q))


@pytest.mark.parametrize("window", WINDOWS)
def test_varlen_attn(window: Any, overrides: Any) -> None:
    q, k, v = leaves = packed()
    same(
        varlen_attn(q, k, v, *lengths_of(), window_size=window, scale=0.4),
        truth_of_packed(*leaves, window, 0.4),
        leaves,
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_nested_tensors(is_causal: bool, overrides: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU torch would not choose flash for them."""
    monkeypatch.setattr(nested_sdpa, "_select_sdp_backend", lambda *args: SDPBackend.FLASH_ATTENTION)
    leaves = packed()
    found = scaled_dot_product_attention(*nested(*leaves), is_causal=is_causal)
    same(found.transpose(1, 2).values(), truth_of_packed(*leaves, (-1, 0) if is_causal else (-1, -1)), leaves)


@IN_PLACE
@pytest.mark.parametrize("window", WINDOWS)
def test_flash_attention_forward_in_place(window: Any, overrides: Any) -> None:
    q, k, v = (x.detach() for x in packed())
    out = torch.full_like(q, torch.nan)
    left, right = window
    lse = ATEN._flash_attention_forward_no_dropout_inplace(
        out, q, k, v, *lengths_of(), 0.0, False, False, window_size_left=left, window_size_right=right
    )
    torch.testing.assert_close(out, truth_of_packed(q, k, v, window), rtol=1e-12, atol=1e-12)
    assert lse.shape == (2, sum(LENGTHS_Q))
    with pytest.raises(NotImplementedError, match=r"inplace: dropout_p is 0\.5"):
        ATEN._flash_attention_forward_no_dropout_inplace(out, q, k, v, *lengths_of(), 0.5, False, False)


@pytest.mark.parametrize("form", ["heads first", "batches", "packed"])
def test_dropout_is_repeated_by_the_gradient(form: str, overrides: Any) -> None:
    q, k, v = (drawn(1, 2, 16, 4, seed=i).requires_grad_() for i in range(3))
    one = torch.tensor([0, 16], dtype=torch.int32)
    calls: dict[str, Callable[[], Any]] = {
        "heads first": lambda: ATEN._scaled_dot_product_flash_attention(q, k, v, 0.4),
        "batches": lambda: ATEN._flash_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)), None, None, 16, 16, 0.4, False, False
        ),
        "packed": lambda: ATEN._flash_attention_forward(
            *(x[0].transpose(0, 1) for x in (q, k, v)), one, one, 16, 16, 0.4, False, False
        ),
    }
    found = calls[form]()[0]
    assert not torch.equal(found, calls[form]()[0])
    (dv,) = torch.autograd.grad(found.sum(), v)
    # o is linear in v: the same dropout gives o.sum() as v * dv, summed
    torch.testing.assert_close((v * dv).sum(), found.sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"return_debug_mask": True}, "return_debug_mask is True"),
        ({"alibi_slopes": torch.ones(2)}, "alibi_slopes is given"),
        ({"seqused_k": torch.ones(3, dtype=torch.int32)}, "seqused_k is given"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, "block_table is given"),
        ({"num_splits": 1}, "num_splits is 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_dualops_does_not_have_is_named(option: dict[str, Any], message: str, overrides: Any) -> None:
    (name,) = option
    known = {argument.name for argument in ATEN._flash_attention_forward.default._schema.arguments}
    tensors = [x.detach() for x in packed()]
    call: Any = ATEN._flash_attention_forward if name in known else module._flash_attention_forward
    options = {"return_debug_mask": False, **option}
    with pytest.raises(NotImplementedError, match=f"_flash_attention_forward: {message}, which dualops does not have"):
        call(*tensors, *lengths_of(), 0.0, False, **options)
    if name == "return_debug_mask":
        with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention: return_debug_mask is True"):
            ATEN._scaled_dot_product_flash_attention(*[x[None].transpose(1, 2) for x in tensors], 0.0, False, True)


def test_one_of_the_lengths_alone(overrides: Any) -> None:
    ends_q, _, *longest = lengths_of()
    with pytest.raises(NotImplementedError, match="cum_seq_k is None and the other is given, expected both or none"):
        ATEN._flash_attention_forward(*packed(), ends_q, None, *longest, 0.0, False, False)


# --- the switch ----------------------------------------------------------------------------------


def test_the_order_is_restored() -> None:
    before = torch._C._get_sdp_priority_order()
    module.register()
    assert "dualops" in torch.nn.attention.list_flash_attention_impls()
    flash, cudnn = int(SDPBackend.FLASH_ATTENTION), int(SDPBackend.CUDNN_ATTENTION)  # pyright: ignore
    cudnn_first = [cudnn, *(backend for backend in before if backend != cudnn)]
    torch._C._set_sdp_priority_order(cudnn_first)
    try:
        torch.nn.attention.activate_flash_attention_impl("dualops")
        found = torch._C._get_sdp_priority_order()
        assert torch.nn.attention.current_flash_attention_impl() == "dualops"
        assert found == [flash, *(backend for backend in cudnn_first if backend != flash)]
        torch.nn.attention.restore_flash_attention_impl()
        assert torch.nn.attention.current_flash_attention_impl() is None
        assert torch._C._get_sdp_priority_order() == cudnn_first
    finally:
        torch._C._set_sdp_priority_order(before)


def test_an_order_that_was_set_since_stays() -> None:
    before = torch._C._get_sdp_priority_order()
    try:
        made = module.Overrides("CPU")
        theirs = list(reversed(before))
        torch._C._set_sdp_priority_order(theirs)
        made.remove()
        assert torch._C._get_sdp_priority_order() == theirs
    finally:
        torch._C._set_sdp_priority_order(before)


def test_torchs_operators_come_back(overrides: Any) -> None:
    tensors = [drawn(1, 2, 5, 4) for _ in range(3)]
    ATEN._scaled_dot_product_flash_attention(*tensors)
    overrides.remove()
    with pytest.raises(NotImplementedError, match="Could not run 'aten::_scaled_dot_product_flash_attention'"):
        ATEN._scaled_dot_product_flash_attention(*tensors)


@pytest.mark.parametrize("before", [False, True])
def test_varlen_attn_of_newer_torch_goes_by_the_order(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of torch 2.15 has cuDNN first unless this variable is set, as `sdpa_kernel(..., set_priority=True)` does."""
    obeyed = ContextVar("obeyed", default=before)
    monkeypatch.setattr(torch.nn.attention, "_sdpa_kernel_uses_priority", obeyed, raising=False)
    made = module.Overrides("CPU")
    assert obeyed.get()
    made.remove()
    assert obeyed.get() is before


# --- on a GPU: the kernels that ran --------------------------------------------------------------


def kernels(work: Callable[[], Any]) -> set[str]:
    """Names of the attention kernels that ran."""
    work()  # builds and loads
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    names = {event.name for event in seen.events() or () if event.device_type == DeviceType.CUDA}
    return {name for name in names if any(word in name for word in ("attention", "cudnn", "fmha", "flash", "sdp"))}


def ran_on_dualops(torchs: Callable[..., Tensor], ours: Callable[..., Tensor], leaves: Any) -> None:
    """No attention kernel of forward and backward is another's; results are dualops' own, bit for bit."""

    def both_ways(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        found = function(*leaves)
        return found, *torch.autograd.grad(found, leaves, drawn(*found.shape, device="cuda", dtype=found.dtype, seed=9))

    names = kernels(lambda: both_ways(torchs))
    assert names and all("dualops" in name for name in names), names
    for x, y in zip(both_ways(torchs), both_ways(ours), strict=True):
        assert torch.equal(x, y)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_plain_call_runs_dualops(is_causal: bool, dtype: torch.dtype, activated: None) -> None:
    leaves = [drawn(2, 3, 256, 64, device="cuda", dtype=dtype, seed=i).requires_grad_() for i in range(3)]
    ran_on_dualops(
        lambda *qkv: scaled_dot_product_attention(*qkv, is_causal=is_causal),
        lambda *qkv: flash_attention(*qkv, causal=is_causal),
        leaves,
    )


@pytest.mark.cuda
@pytest.mark.parametrize("window", WINDOWS)
def test_varlen_attn_runs_dualops(window: tuple[int, int], activated: None) -> None:
    left, right = (None if side < 0 else side for side in window)
    causal = right == 0
    options: Any = {"causal": causal, "window": (left, None if causal else right)}
    if options["window"] == (None, None):
        options["window"] = None
    lengths = lengths_of("cuda")
    ran_on_dualops(
        lambda *qkv: varlen_attn(*qkv, *lengths, window_size=window),
        lambda *qkv: varlen(*qkv, *lengths, **options),
        packed(device="cuda", dtype=torch.bfloat16, D=64),
    )


@pytest.mark.cuda
@pytest.mark.parametrize("is_causal", [False, True])
def test_nested_tensors_run_dualops(is_causal: bool, activated: None) -> None:
    lengths = lengths_of("cuda")
    ran_on_dualops(
        lambda *qkv: scaled_dot_product_attention(*nested(*qkv), is_causal=is_causal).transpose(1, 2).values(),
        lambda *qkv: varlen(*qkv, *lengths, causal=is_causal),
        packed(device="cuda", dtype=torch.bfloat16, D=64),
    )


@pytest.mark.cuda
def test_torchs_kernels_come_back() -> None:
    x = drawn(2, 3, 256, 64, device="cuda", dtype=torch.bfloat16)
    scaled_dot_product_attention(x, x, x)  # torch sets its order of kernels at the first call
    before, order = kernels(lambda: scaled_dot_product_attention(x, x, x)), torch._C._get_sdp_priority_order()
    module.register()
    torch.nn.attention.activate_flash_attention_impl("dualops")
    during = kernels(lambda: scaled_dot_product_attention(x, x, x))
    torch.nn.attention.restore_flash_attention_impl()
    assert before.isdisjoint(during)
    assert kernels(lambda: scaled_dot_product_attention(x, x, x)) == before
    assert torch._C._get_sdp_priority_order() == order
