"""Tensor cores' instructions on the GPU: their layouts are those of `tile.fragment` and of the twins."""

import pytest
import torch

from tests.cuda.warp_product import KINDS, launch, problem


@pytest.mark.parametrize(("dtype", "transposed"), KINDS)
def test_a_warps_product(dtype, transposed):
    a, b, expected = problem(dtype, transposed)
    y = torch.empty(16, 8, device="cuda")
    arrays = [y, *(torch.from_numpy(bits.view(f"i{bits.itemsize}")).cuda() for bits in (a, b))]
    launch(dtype, transposed, [array.data_ptr() for array in arrays], torch.cuda.current_stream().cuda_stream)
    assert y.cpu().tolist() == expected.tolist()
