"""Attention whose tokens are split among processes: as in one process, for any documents and options."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dualops import testing
from dualops.spec import compare, flash_attention_varlen as SPEC
from dualops.torch_bridge.distributed import layout
from tests.processes import ROOT, printed

from . import context, context_errors
from .context import CASES, ON_GPUS, SLOW, WAYS, Case
from .context_errors import DISAGREE, OTHER_ERRORS, REFUSED
from .in_threads import in_threads
from .sharded import Found, found_by

# the processes start once. Tests on GPUs take longest: their groups run at the same time
pytestmark = pytest.mark.xdist_group("context_parallel")
two_gpus = pytest.mark.xdist_group("two_gpus")
CALLS: dict[str, Any] = {name: partial(context.case, name) for name in CASES}
ERRORS: dict[str, Any] = {
    "disagreements": context_errors.disagreements,
    "refusals": context_errors.refusals,
    "other errors": context_errors.other_errors,
    "compared": context_errors.compared,
}
EVERY: dict[str, Any] = {"short chunks": context.with_short_chunks, **CALLS, **WAYS, **ERRORS}


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this process, too."""
    for name in ("TILE", "KEY_TILES"):
        monkeypatch.setattr(layout, name, getattr(layout, name))
    context.with_short_chunks()
    yield
    layout.layout_of.cache_clear()


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return found_by((2,), EVERY | SLOW, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return found_by((4,), EVERY, tmp_path_factory.mktemp("four"))


@pytest.fixture(params=[2, 4])
def found(request: pytest.FixtureRequest) -> list[Found]:
    return request.getfixturevalue("of_two" if request.param == 2 else "of_four")


def hold_gradients(made: Case, found: Found, size: int, *, pieces: bool) -> None:
    """By the accuracy rule. Parts of 16 bits are rounded before they are summed, which is in the baseline too."""
    if made.dtype.itemsize == 2:
        truth, baseline = made.exact(found), made.rounded(found, size, pieces=pieces)
        for name, x in baseline.items():
            arrays = (each[name].double().numpy() for each in (found, truth, baseline))
            result = compare(*arrays, dtype=str(x.dtype)[6:], floor=SPEC.floor, name=name)
            assert result.passed, result.message
        return
    ends, longest = torch.tensor(made.ends, dtype=torch.int32), max(b - a for a, b in pairwise(made.ends))
    arrays = made.tensors() | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    params = {"causal": True, "return_lse": True, "max_seqlen_q": longest, "max_seqlen_k": longest} | made.options
    gradients = {f"d{leaf}": found[f"d{leaf}"] for leaf in made.wanted}
    testing.check("flash_attention_varlen", gradients, arrays, params, backward=True)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_one_process(name: str, found: list[Found]) -> None:
    expected = CASES[name].alone()
    for each in found:
        for key in ("o", "lse"):
            eps = 1e-6 if each[name][key].dtype.itemsize > 2 else 2.0**-8  # or the last bit of 16
            torch.testing.assert_close(each[name][key], expected[key], rtol=eps, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_as_exact_as_the_accuracy_rule_asks(name: str, found: list[Found], short_chunks: None) -> None:
    for each in found:
        hold_gradients(CASES[name], each[name], len(found), pieces=False)


@pytest.mark.parametrize("name", CASES)
def test_every_run_has_the_same_bits_and_ranks_agree(name: str, found: list[Found]) -> None:
    first = found[0][name]
    for each in found:
        assert each[name]["same"]
        assert all(torch.equal(x, first[key]) for key, x in each[name].items() if key != "same")


@pytest.mark.parametrize("name", WAYS)
def test_other_ways(name: str, found: list[Found]) -> None:
    assert all(each[name] for each in found)


def test_what_gpus_compare_in_place_of_waiting(found: list[Found]) -> None:
    assert all(each["compared"] for each in found)


@pytest.mark.parametrize("name", SLOW)
def test_under_torch_compile_and_checkpoint(name: str, of_two: list[Found]) -> None:
    assert all(each[name] for each in of_two)


@pytest.mark.parametrize("name", DISAGREE)
def test_ranks_that_disagree_all_raise(name: str, found: list[Found]) -> None:
    for each in found:
        kind, message = each["disagreements"][name]
        assert kind == "ValueError" and message.startswith("context_parallel: ")
        assert DISAGREE[name][1] in message


@pytest.mark.parametrize("name", REFUSED)
def test_a_rank_that_refuses_its_arguments_has_all_raise(name: str, found: list[Found]) -> None:
    *others, last = found
    _, wanted, text = REFUSED[name]
    kind, message = last["refusals"][name]
    assert kind == wanted.__name__ and text in message
    for each in others:
        assert each["refusals"][name] == (
            "ValueError",
            f"context_parallel: rank {len(others)} of the group refuses its arguments; its own error says why",
        )


@pytest.mark.parametrize("name", OTHER_ERRORS)
def test_other_errors(name: str, found: list[Found]) -> None:
    wanted, text = OTHER_ERRORS[name]
    for each in found:
        kind, message = each["other errors"][name]
        assert kind == wanted and text in message


@pytest.mark.parametrize("name", ["documents", "contiguous", "three heads, two at a time", "all"])
def test_threads_on_the_cpu(name: str, short_chunks: None) -> None:
    hold_gradients(CASES[name], in_threads(CASES[name], 3, "cpu"), 3, pieces=False)


@pytest.mark.cuda
@pytest.mark.xdist_group("threads")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ON_GPUS)
def test_threads_on_one_gpu(name: str, size: int) -> None:
    """The bits of one process, and gradients by the accuracy rule."""
    made = ON_GPUS[name]
    found, expected = in_threads(made, size, "cuda:0"), made.alone("cuda:0")
    for key in ("o", "lse"):
        assert torch.equal(found[key], expected[key].cpu()), key
    hold_gradients(made, found, size, pieces=True)


@pytest.fixture(scope="module")
def of_two_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    checks: dict[str, Any] = {"disagreement": context_errors.disagreement_on_gpus}
    checks |= {name: partial(context.on_gpus, name) for name in ON_GPUS}
    return found_by((2,), checks, tmp_path_factory.mktemp("gpus"), "cuda")


@two_gpus
@pytest.mark.cuda(2)
@pytest.mark.parametrize("name", ON_GPUS)
def test_two_gpus_have_the_bits_of_one(name: str, of_two_gpus: list[Found]) -> None:
    """Forward; gradients are sums over ranks, which have the same bits in every run."""
    expected = ON_GPUS[name].alone("cuda")
    for each in of_two_gpus:
        assert each[name]["same"]
        for key in ("o", "lse"):
            assert torch.equal(each[name][key], expected[key].cpu()), key
        assert all(torch.equal(x, of_two_gpus[0][name][key]) for key, x in each[name].items() if key != "same")


@two_gpus
@pytest.mark.cuda(2)
@pytest.mark.parametrize("name", ON_GPUS)
def test_gradients_of_two_gpus(name: str, of_two_gpus: list[Found]) -> None:
    hold_gradients(ON_GPUS[name], of_two_gpus[0][name], 2, pieces=True)


@two_gpus
@pytest.mark.cuda(2)
def test_gpus_that_disagree_all_raise(of_two_gpus: list[Found]) -> None:
    for each in of_two_gpus:
        kind, message = each["disagreement"]
        assert kind == "ValueError" and "disagree on window" in message


@pytest.mark.xdist_group("example")
@pytest.mark.cuda(2)
def test_the_example_on_two_gpus(tmp_path: Path) -> None:
    """The losses of one, but for the last digit that is printed."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    script = str(ROOT / "examples" / "context_parallel.py")
    one, two = (
        [float(word) for word in printed(*torchrun, count, script, cwd=tmp_path).split()[1:]] for count in ("1", "2")
    )
    assert len(one) == 10 and two == pytest.approx(one, abs=1.5e-3)
