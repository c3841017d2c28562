"""ArrayMeta, strides, and the visible pairs of attention, against torch and brute force."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from dualops.spec import ArrayMeta, flash_attention, softmax
from dualops.spec.flash_attention import visible_pairs
from dualops.spec.meta import (
    FLOATS,
    compute_dtype,
    contiguous_strides,
    dense_strides_like,
    itemsize,
    numpy_dtype,
    take_turns,
)

SHAPES = [(), (3,), (2, 3), (1, 3), (3, 1), (2, 1, 3), (2, 3, 4), (1, 1, 3), (2, 3, 1, 4), (2, 2, 2, 2)]
SHAPES += [(0, 3, 2), (3, 0, 2)]


def test_dense_strides_are_those_of_torchs_empty_like():
    torch = pytest.importorskip("torch", reason="torch is what the strides are compared with")
    compared = 0
    for shape in SHAPES:
        for order in itertools.permutations(range(len(shape))):
            wide = torch.empty([2 * size for size in shape]).permute(order)
            permuted = torch.empty(shape).permute(order)
            cut = tuple(slice(0, size) for size in permuted.shape)
            stepped = tuple(slice(None, None, 2) for _ in shape)
            for tensor in (permuted, wide[cut], wide[stepped], permuted[None].expand(3, *permuted.shape)):
                like = ArrayMeta(tuple(tensor.shape), "float32", tensor.stride(), "cpu", 0)
                assert dense_strides_like(like.shape, like) == torch.empty_like(tensor).stride(), like
                compared += 1
    assert compared > 250


def test_dense_strides_of_another_shape_keep_the_order_of_axes():
    # [B, S, H, D] memory seen as [B, H, S, D], and a result with another D
    like = ArrayMeta((2, 6, 5, 16), "float32", (480, 16, 96, 1), "cpu", 0)
    assert dense_strides_like((2, 6, 5, 24), like) == (720, 24, 144, 1)


def test_of_numpy():
    array = np.zeros((4, 6), np.float32)[::2, 1::3]
    meta = ArrayMeta.of_numpy(array)
    assert meta == ArrayMeta((2, 2), "float32", (12, 3), "cpu", array.ctypes.data)
    assert ArrayMeta.of_numpy(np.zeros(3, ml_dtypes.bfloat16)).dtype == "bfloat16"
    assert ArrayMeta.of_numpy(np.zeros((2, 3))[::-1]).strides == (-3, 1)


def test_of_numpy_does_not_mistake_what_it_cannot_say():
    field = np.zeros(4, [("value", "f4"), ("tag", "i2")])["value"]
    with pytest.raises(ValueError, match=r"strides are \(6,\) bytes, expected multiples of the 4 of an element"):
        ArrayMeta.of_numpy(field)
    swapped = ArrayMeta.of_numpy(np.zeros(3, ">f4"))
    with pytest.raises(TypeError, match="softmax: x has dtype >f4, expected one of"):
        softmax.bind({"x": swapped})


def places(meta: ArrayMeta) -> list[int]:
    """Where each element lies, in elements from the first."""
    return [sum(i * s for i, s in zip(index, meta.strides, strict=True)) for index in np.ndindex(*meta.shape)]


strided = st.integers(1, 4).flatmap(
    lambda rank: st.tuples(
        st.lists(st.integers(0, 4), min_size=rank, max_size=rank).map(tuple),
        st.lists(st.integers(0, 12), min_size=rank, max_size=rank).map(tuple),
    )
)


@given(strided)
def test_extent_overlap_and_density_by_brute_force(drawn):
    shape, strides = drawn
    meta = ArrayMeta(shape, "float32", strides, "cpu", 4096)
    taken = places(meta)
    assert meta.size == len(taken)
    assert meta.extent == (max(taken) + 1 if taken else 0)
    assert meta.nbytes == 4 * meta.extent
    if len(set(taken)) < len(taken):
        assert meta.overlaps_itself
    assert meta.is_dense == (sorted(taken) == list(range(len(taken))))
    if meta.is_dense:
        assert not meta.overlaps_itself


@given(strided, strided, st.integers(-40, 40), st.sampled_from(["float32", "float16"]))
def test_arrays_that_take_turns_share_no_byte(one, other, apart, dtype):
    metas = [
        ArrayMeta(*one_of, "cpu", pointer)
        for one_of, pointer in (((one[0], "float32", one[1]), 4096), ((other[0], dtype, other[1]), 4096 + apart))
    ]
    bytes_of = [
        {
            meta.pointer + itemsize(meta.dtype) * place + byte
            for place in places(meta)
            for byte in range(itemsize(meta.dtype))
        }
        for meta in metas
    ]
    assert take_turns(*metas) == take_turns(*reversed(metas))
    if take_turns(*metas):
        assert not bytes_of[0] & bytes_of[1]


def test_parts_of_one_projection_take_turns():
    """q, k and v of 4, 2 and 2 heads of 16, as they lie after one product, and seen as [B, H, S, D]."""
    for B, S in ((3, 5), (3, 1), (1, 5)):
        q, k, v = (
            ArrayMeta((B, heads, S, 16), "bfloat16", (S * 128, 16, 128, 1), "cpu", 4096 + 2 * first)
            for heads, first in ((4, 0), (2, 64), (2, 96))
        )
        assert take_turns(q, k) and take_turns(k, v) and take_turns(q, v) and not take_turns(q, q)
        assert not take_turns(q, v._replace(pointer=v.pointer - 66))


@given(st.permutations(range(3)), st.lists(st.integers(1, 4), min_size=3, max_size=3), st.integers(0, 3))
def test_a_padded_permuted_array_does_not_overlap_itself(order, sizes, gap):
    strides, step = [0] * 3, 1
    for axis in order:
        strides[axis] = step
        step *= sizes[axis] + gap
    assert not ArrayMeta(tuple(sizes), "float32", tuple(strides), "cpu", 0).overlaps_itself


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if 0 not in shape])
def test_contiguous_strides_are_numpys(shape):
    assert contiguous_strides(shape) == ArrayMeta.of_numpy(np.zeros(shape, np.float32)).strides


def test_contiguous_strides_of_an_empty_shape_are_torchs():
    assert contiguous_strides((3, 0, 2)) == (2, 2, 1)


def test_dtypes():
    assert [itemsize(name) for name in FLOATS] == [8, 4, 2, 2]
    assert [compute_dtype(name) for name in FLOATS] == ["float64", "float32", "float32", "float32"]
    for name in FLOATS:
        assert numpy_dtype(name).name == name


@pytest.mark.parametrize("window", [None, (0, 0), (3, None), (None, 2), (2, 4), (100, 100)])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_visible_pairs_by_brute_force(causal, window):
    left, right = (10**6 if side is None else side for side in window or (None, None))
    for Sq, Sk in itertools.product((0, 1, 2, 3, 7, 8, 20), repeat=2):
        q, k = (ArrayMeta((1, 1, S, 4), "float32", (4 * S, 4 * S, 4, 1), "cpu", 0) for S in (Sq, Sk))
        problem = flash_attention.bind({"q": q, "k": k, "v": k}, {"causal": causal, "window": window})
        first = 0 if causal == "top_left" else Sk - Sq  # where query 0 stands
        pairs = ((i + first, j) for i in range(Sq) for j in range(Sk))
        expected = sum(at - left <= j <= at + (0 if causal else right) for at, j in pairs)
        assert visible_pairs(problem) == expected, (Sq, Sk)
