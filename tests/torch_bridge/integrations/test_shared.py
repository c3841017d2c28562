"""`patch` with context_parallel: a model on several processes computes what it does on one."""

from functools import partial
from typing import Any

import pytest
import torch

from dualops.torch_bridge.integrations.transformers import patch

from ..context import with_short_chunks
from ..sharded import Found, found_by
from . import shared
from .models import model
from .shared import FAMILIES

pytestmark = pytest.mark.xdist_group("shared_models")  # the processes start once
CHECKS: dict[str, Any] = {
    "short chunks": with_short_chunks,
    **{name: partial(shared.together, name) for name in FAMILIES},
    "errors": shared.errors,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return found_by((2,), CHECKS, tmp_path_factory.mktemp("shared"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_what_it_is_in_one_process(family: str, found: list[Found]) -> None:
    """In float64 the order of sums is all that is left between them."""
    expected = shared.alone(family)
    for each in found:
        assert each[family].keys() == expected.keys()
        for name, x in expected.items():
            atol = 1e-12 * float(x.abs().max())
            torch.testing.assert_close(each[family][name], x, rtol=1e-10, atol=atol, msg=partial("{}: {}".format, name))


OF_LAST: dict[str, tuple[str, str]] = {
    "no cu_seq_lens": ("ValueError", "LlamaAttention of layer 0: cu_seq_lens_q is None, expected where documents"),
    "two cu_seq_lens": ("ValueError", "LlamaAttention of layer 0: cu_seq_lens_q and cu_seq_lens_k differ"),
    "padding": ("NotImplementedError", "LlamaAttention of layer 0: attention_mask is given"),
    "other cu_seq_lens": ("ValueError", "LlamaAttention of layer 0: position_ids are not those of this rank's tokens"),
}


@pytest.mark.parametrize("name", OF_LAST)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(name: str, found: list[Found]) -> None:
    first, last = (each["errors"][name] for each in found)
    kind, text = OF_LAST[name]
    assert last[0] == kind and last[1].startswith(text)
    assert first[0] == "ValueError" and "rank 1 of the group refuses its arguments" in first[1]


def test_other_errors(found: list[Found]) -> None:
    for each in found:
        errors = each["errors"]
        assert errors["right"] == ("nothing", "")
        kind, message = errors["positions of nobody"]
        assert kind == "ValueError" and "position_ids are not those of this rank's tokens" in message
        kind, message = errors["two rows"]
        assert kind == "ValueError" and "input has a batch of 2, expected 1 with context_parallel" in message
        assert errors["pickled"][0] == "TypeError" and "context_parallel=group" in errors["pickled"][1]


def test_a_group_is_wanted() -> None:
    with pytest.raises(TypeError, match="patch: group is a str, expected a torch"):
        patch(model("llama"), context_parallel="all")


@pytest.fixture
def group() -> Any:
    from torch.distributed import HashStore, destroy_process_group, group, init_process_group  # pyright: ignore

    init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield group.WORLD
    destroy_process_group()


def test_attention_alone_is_shared_out(group: Any) -> None:
    with pytest.raises(ValueError, match="context_parallel is given and attention is False"):
        patch(model("llama"), attention=False, context_parallel=group)
    parameters = {"rope_theta": 1000.0, "rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(NotImplementedError, match="kind 'dynamic', which depend on the longest position"):
        patch(model("llama", rope_parameters=parameters), context_parallel=group)
