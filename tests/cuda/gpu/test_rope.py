"""What is special about rope on a GPU: positions that nobody looks at, parts of one projection, graphs, sizes."""

import numpy as np
import pytest
import torch

import dualops.cuda
from dualops import reference
from dualops.spec import OPERATORS, compare
from dualops.spec.rope_draws import SCALINGS
from tests.cuda.gpu.library import numpy, same_bits

SPEC = OPERATORS["rope"]
every_rung = pytest.mark.parametrize("rung", SPEC.rungs)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)


def tables(rows: int, R: int) -> tuple[torch.Tensor, torch.Tensor]:
    return dualops.cuda.rope_tables(torch.arange(rows, device="cuda"), R)


@every_rung
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("D", [64, 27])
def test_a_token_whose_position_has_no_row_becomes_nan(D, dtype, rung):
    R, rows = D // 4 * 2, 9
    q, k = normal(2, 4, 5, D), normal(2, 1, 5, D, seed=1)
    far = 2**31 - 1 if dtype is torch.int32 else 2**62
    positions = torch.tensor([[0, 1, rows, 3, far], [-1, 8, 7, -far, 0]], dtype=dtype, device="cuda")
    wrong = ((positions < 0) | (positions >= rows))[:, None, :, None]
    found = dualops.cuda.rope(q, k, *tables(rows, R), positions=positions, dim=R, kernel=rung)
    for x, y in zip((q, k), found, strict=True):
        assert torch.equal(torch.isnan(y[..., :R]), wrong.expand_as(y[..., :R]))
        assert same_bits(y[..., R:], x[..., R:])


@every_rung
def test_parts_of_one_projection_in_place(rung):
    projected = normal(2, 33, 6 * 64, dtype=torch.bfloat16)
    q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in projected.split([256, 64, 64], -1))
    cos, sin = tables(33, 64)
    expected, untouched = dualops.cuda.rope(q, k, cos, sin, kernel=rung), v.clone()
    found = dualops.cuda.rope(q, k, cos, sin, inplace=True, kernel=rung)
    assert found[0] is q and found[1] is k
    assert same_bits(q, expected[0]) and same_bits(k, expected[1]) and same_bits(v, untouched)


def test_a_graph_reads_positions_when_it_is_replayed():
    q, k = normal(2, 4, 1, 64), normal(2, 1, 1, 64, seed=1)
    cos, sin = tables(100, 64)
    positions = torch.zeros(2, 1, dtype=torch.int64, device="cuda")
    dualops.cuda.rope(q, k, cos, sin, positions=positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dualops.cuda.rope(q, k, cos, sin, positions=positions)
    for step in (5, 99):
        positions.copy_(torch.tensor([[step], [step // 2]]))
        graph.replay()
        for one, two in zip(captured, dualops.cuda.rope(q, k, cos, sin, positions=positions), strict=True):
            assert same_bits(one, two)


@pytest.mark.xdist_group("large")
@every_rung
def test_more_than_2_to_the_31_elements(rung):
    """Tokens before heads in memory: the first, those around the 2**31st element, and the last."""
    H, D = 16, 128
    S = 2**31 // (H * D) + 5
    q = normal(1, S, H, D, dtype=torch.bfloat16).transpose(1, 2)
    k = normal(1, S, 1, D, dtype=torch.bfloat16, seed=1).transpose(1, 2)
    cos, sin = tables(S, D)
    q_rotated, _ = dualops.cuda.rope(q, k, cos, sin, kernel=rung)
    near = torch.tensor([0, 1, S // 2, S - 7, S - 6, S - 5, S - 4, S - 2, S - 1], device="cuda")
    taken = [numpy(x[:, :, near]) for x in (q, k)] + [numpy(x[near]) for x in (cos, sin)]
    truth, _ = reference.rope(*(x.astype(np.float64) for x in taken))
    baseline, _ = reference.rope(*taken)
    found = compare(numpy(q_rotated[:, :, near]), truth, baseline, dtype="bfloat16", floor=SPEC.floor)
    assert found.passed, found.message
    assert not torch.isnan(q_rotated).any()  # torch's allocator filled it with NaN: every element was written


def test_tables_of_large_positions_are_exact():
    positions = torch.tensor([[100_003, 999_983, 5], [-77_777, 2_000_003, 131_071]], device="cuda")
    for scaling in SCALINGS:
        found = dualops.cuda.rope_tables(positions, 128, base=500000.0, scaling=scaling)
        exact = reference.rope_tables(numpy(positions), 128, base=500000.0, scaling=scaling, dtype="float64")
        for one, two in zip(found, exact, strict=True):
            half_a_bit = 2.0**-25 * 2.0 ** max(0.0, np.ceil(np.log2(np.abs(two).max())))
            assert np.abs(numpy(one) - two).max() <= half_a_bit * 1.001
