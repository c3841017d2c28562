"""A block mask's lists by tiles of keys, and the gradient of keys and values, which walks them."""

from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops.cuda import simulator
from dualops.cuda.flash_attention.block_masks import NAME, steps_by_keys, workspace_by_keys
from dualops.cuda.flash_attention.sm90.dkv_config import DkvApartConfig, DkvConfig
from dualops.cuda.launch import device as devices
from dualops.cuda.launch.step import prepare
from dualops.spec.attention.blocks import FULL, TILE, listed
from dualops.spec.attention.cases import woven
from tests.cuda.simulator.attention import numbers
from tests.cuda.simulator.gradients import checked, gradient as backward, served

SMALL = DkvConfig(1, 32, 2)


def patches(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Tiles that are seen, cut or hidden, others in each batch and head; of the first (0, 0), (1, 0) and (0, 1)."""
    kind = (i // TILE + 2 * (j // TILE) + h + 2 * b) % 3
    return (kind == 0) | ((kind == 1) & ((i + 2 * j) % 3 != 0))


def same_patches(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Those of the first batch and head."""
    return patches(0, 0, i, j)


def arrays(B: int, H: int, Hkv: int, Sq: int, Sk: int) -> list[np.ndarray]:
    """What backward takes, of numbers that belong to no forward; no probability is above 1."""
    q, o, do = (numbers(B, H, Sq, 16, seed=seed) for seed in range(3))
    k, v = (numbers(B, Hkv, Sk, 16, seed=seed) for seed in (3, 4))
    return [q, k, v, o, np.full((B, H, Sq), 9, np.float32), do]


def is_seen(m: int, n: int, Sq: int, Sk: int, right: int) -> bool:
    """Whether a query of a tile stands so that it sees a key of the other one, of those up to `right` after its own."""
    last_query, first_key = min((m + 1) * TILE, Sq) - 1, n * TILE
    return first_key <= last_query + Sk - Sq + right


@pytest.mark.parametrize("own", [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize(("Hkv", "params"), [(4, {}), (2, {}), (1, {"window": (None, 150)})])
def test_lists(own, Hkv, params):
    """Of tiles that are drawn: some are full, many empty, and of some tiles of keys all."""
    (B, H, Sq, Sk), (q_tiles, kv_tiles) = (2, 4, 600, 1100), (5, 9)
    states = np.random.default_rng(sum(own) + Hkv).choice(3, (*own, q_tiles, kv_tiles), p=(0.6, 0.2, 0.2))
    states[..., 4] = 0
    lists = listed(states)
    given = arrays(B, H, Hkv, Sq, Sk)
    problem = dualops.cuda.plan(
        "flash_attention", *given, backward=True, mask_mod=woven, block_mask=lists, **params
    ).problem
    found = np.full(workspace_by_keys(problem)[NAME].shape, -1, np.int32)
    for step in steps_by_keys(problem):
        prepare(step, [NAME, "block_mask"], devices.current())([found, lists])
    group, right = H // Hkv, params.get("window", (None, Sk))[1]
    assert found.shape == (own[0], 1 if own[1] == 1 else Hkv, kv_tiles, 1 + group * q_tiles)
    for b, h_kv, n in np.ndindex(found.shape[:3]):
        row = [
            2 * (g * q_tiles + m) + (state == FULL)
            for g, m in np.ndindex(group, q_tiles)
            if (state := states[b, 0 if own[1] == 1 else h_kv * group + g, m, n]) and is_seen(m, n, Sq, Sk, right)
        ]
        assert found[b, h_kv, n].tolist() == [len(row), *row, *[0] * (group * q_tiles - len(row))]


@pytest.mark.parametrize(
    ("q", "k", "own", "mask_mod"),
    [
        ((1, 2, 140, 16), (1, 135), (1, 2), patches),
        ((2, 2, 40, 16), (2, 20), (2, 2), patches),
        ((1, 2, 40, 16), (2, 20), (1, 1), same_patches),
    ],
    ids=["a group", "lists of their own", "one list"],
)
def test_tiles_of_all_kinds(q, k, own, mask_mod):
    """And ragged ends, heads of a group and not, lists of their own or not, stages that are filled several times."""
    checked(q, k, 16, SMALL, blocks=own, mask_mod=mask_mod)


def test_whatever_the_order_of_threads():
    with simulator.order("reversed"):
        checked((1, 1, 140, 16), (1, 60), 16, SMALL, blocks=(1, 1), mask_mod=patches)


@pytest.mark.parametrize("params", [{"causal": True}, {"window": (40, None)}], ids=str)
def test_what_a_window_hides_is_left_out(params):
    checked((1, 1, 135, 16), (1, 130), 16, blocks=(1, 1), mask_mod=patches, **params)


@pytest.mark.parametrize(("Dv", "config"), [(16, DkvApartConfig(32, 2)), (136, None)])
def test_wide_heads(Dv, config):
    checked((1, 1, 140, 16), (1, 100), Dv, config, blocks=(1, 1), mask_mod=patches)


@pytest.mark.parametrize(
    "params",
    [{"key_padding_mask": True, "softcap": 2.0}, {"bias": "full", "dropout_p": 0.3}],
    ids=lambda params: "-".join(params),
)
def test_with_other_options(params):
    checked((1, 1, 70, 16), (1, 140), 16, blocks=(1, 1), mask_mod=patches, **params)


def test_float32():
    checked((1, 1, 130, 16), (1, 65), 16, dtype="float32", blocks=(1, 1), mask_mod=patches)


@pytest.mark.parametrize("config", [SMALL, DkvApartConfig(32, 2)], ids=lambda config: type(config).__name__)
def test_keys_that_nobody_sees(config):
    q, k, v, o, lse, do = arrays(1, 1, 1, 2 * TILE, 2 * TILE)
    lists = np.array([[[[1, 1, 0], [0, 0, 0]]]], np.int32)  # the first tile of either, whole
    seen = [x[:, :, :TILE] for x in (q, k, v, o, lse, do)]
    with served(config):
        expected = backward(*seen, mask_mod=lambda b, h, i, j: j >= 0)
        for x in (q, k, v, do):
            x[:, :, TILE:] = np.nan
        found = backward(q, k, v, o, lse, do, mask_mod=woven, block_mask=lists)
    for name, all_of_it, part in zip(("dq", "dk", "dv"), found, expected):
        assert np.array_equal(all_of_it[:, :, :TILE], part), name
        assert not all_of_it[:, :, TILE:].any(), name


def test_bits_are_those_without_a_list():
    given = arrays(1, 2, 1, 140, 60)
    lists = dualops.cuda.block_mask(patches, 1, 2, 140, 60, like=given[0])
    with served(SMALL):
        for found, expected in zip(
            backward(*given, mask_mod=patches, block_mask=lists), backward(*given, mask_mod=patches)
        ):
            assert np.array_equal(found, expected)


def test_tiles_that_do_not_divide_a_listed_one_are_refused():
    given = arrays(1, 1, 1, 20, 20)
    lists = np.zeros((1, 1, 1, 2), np.int32)
    with served(DkvConfig(1, 48, 2)), pytest.raises(ValueError, match="tiles of 48 queries do not divide a block mask"):
        backward(*given, mask_mod=woven, block_mask=lists)
