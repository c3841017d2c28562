"""attention of float32 on the sm90 rung, whose numbers are three of bfloat16 each: what their tables do not have.

Those are in `test_attention_forward` and `test_attention_gradients`.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.spec.attention.cases import in_patches
from tests.cuda.simulator.attention import checked
from tests.cuda.simulator.gradients import checked_arrays as checked_gradient, held

attend: Any = partial(dualops.cuda.flash_attention, kernel="sm90")
FLOAT32 = np.float32


def arrays(q: tuple[int, ...], k: tuple[int, ...], Dv: int) -> list[np.ndarray]:
    """q, k, v and do for arrays of these shapes, of numbers that bfloat16 does not have."""
    shapes = (q, k, (*k[:-1], Dv), (*q[:-1], Dv))
    return [np.random.default_rng(seed).standard_normal(shape).astype(FLOAT32) for seed, shape in enumerate(shapes)]


def test_the_gradient_of_wide_heads_by_a_block_mask():
    """Tiles that are hidden, seen and cut, of two heads, each by a list of its own, that share keys."""
    q, k, v, do = arrays((1, 2, 140, 72), (1, 1, 150, 72), 24)
    mask: dict[str, Any] = {"mask_mod": in_patches}
    o, lse = reference.flash_attention(q, k, v, return_lse=True, **mask)
    given = (q, k, v, o, lse, do)
    listed: Any = dualops.cuda.block_mask(in_patches, 1, 2, 140, 150, like=q)
    found = dualops.cuda.flash_attention_backward(*given, kernel="sm90", block_mask=listed, **mask)
    held(found, *given, **mask)


def test_parts_are_all_there():
    """The scores of keys differ in their middle and lower parts. Larger q and nearer keys would leave dq no digits."""
    q, k, v, do = arrays((1, 1, 66, 16), (1, 1, 70, 16), 16)
    checked_gradient(q + 2, 1 + k / 64, v, do, scale=1.0)
    q, k = np.round(16 * q) / 16 + 256, 1 + k / 1024
    checked(attend(q, k, v, scale=1.0), reference.flash_attention, q, k, v, scale=1.0)


def test_tokens_before_heads_and_among_other_memory():
    q, k, v, do = (x.transpose(0, 2, 1, 3)[..., 1:] for x in arrays((1, 66, 2, 24), (1, 70, 1, 24), 24))
    out = np.full((1, 2, 66, 30), 7, FLOAT32)
    checked(attend(q, k, v, out=out[..., 3:26]), reference.flash_attention, q, k, v)
    assert (out[..., :3] == 7).all() and (out[..., 26:] == 7).all()
    dq, _, _ = checked_gradient(q, k, v, do)
    assert dq.strides == q.strides or dq.shape == q.shape


@pytest.mark.parametrize("width", [16, 72])
def test_what_a_mask_hides_stays_where_it_is(width):
    """A window, so that a query that sees it sees few keys: what it reaches is recomputed key by key."""
    q, k, v, do = arrays((1, 1, 66, width), (1, 1, 70, width), 24)
    v[0, 0, 66, 5], k[0, 0, 67] = np.nan, -np.inf
    params: dict[str, Any] = {"causal": True, "window": (8, None)}
    found = attend(q, k, v, **params)
    checked(found, reference.flash_attention, q, k, v, **params)
    dq, _, _ = checked_gradient(q, k, v, do, **params)
    assert np.isfinite(found[:, :, :62]).all() and np.isfinite(dq[:, :, :62]).all()


def test_an_infinity_meets_every_part():
    """Times factors of either sign, of whole numbers, whose lower parts are 0, and of an infinity."""
    q, k, v, _ = arrays((1, 1, 66, 8), (1, 1, 20, 8), 8)
    k[0, 0, 3, 2], k[0, 0, 7, 1], q[0, 0, 5, 2] = np.inf, -np.inf, np.inf
    q[0, 0, 9:20] = np.round(4 * q[0, 0, 9:20])
    v[0, 0, 4, 4] = np.inf
    checked(attend(q, k, v), reference.flash_attention, q, k, v)


def test_rows_do_not_depend_on_other_rows():
    q, k, v, do = arrays((2, 1, 66, 16), (2, 1, 70, 16), 16)
    together = attend(q, k, v, causal=True, return_lse=True)
    alone = attend(q[1:2], k[1:2], v[1:2], causal=True, return_lse=True)
    assert all(np.array_equal(many[1:2], few) for many, few in zip(together, alone, strict=True))
    gradient: Any = partial(dualops.cuda.flash_attention_backward, kernel="sm90", causal=True)
    every, one = gradient(q, k, v, *together, do), gradient(q[1:2], k[1:2], v[1:2], *alone, do[1:2])
    assert all(np.array_equal(many[1:2], few) for many, few in zip(every, one, strict=True))
