"""The kernels of rms_norm and layer_norm by Configs that the SIM cases are too small for, and results over inputs."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import dualops.cuda
from dualops import reference
from dualops.cuda import norm, simulator
from dualops.cuda.launch.operation import OPERATIONS
from dualops.cuda.norm import ring_backward, rows_backward
from dualops.cuda.norm.staging import RingConfig
from dualops.cuda.norm.sums import SumsConfig
from dualops.cuda.rows import cluster
from dualops.cuda.rows.cluster import ClusterRowsConfig
from dualops.cuda.rows.registers import RowsConfig
from dualops.cuda.rows.reread import LongRowsConfig
from dualops.spec import OPERATORS, Case
from dualops.spec.meta import itemsize, numpy_dtype
from tests.checks import check
from tests.cuda.operators import Direction
from tests.problems import Layout

NORMS = {"rms_norm": ("w",), "layer_norm": ("w", "b")}
every_norm = pytest.mark.parametrize("name", NORMS)
DIRECTIONS = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


@pytest.fixture(autouse=True)
def few_rows_a_piece(monkeypatch):
    """Sums over rows are combined from several pieces, and plans are made again."""
    for module in (rows_backward, ring_backward):
        monkeypatch.setattr(module, "PIECE", 2)
    for name in NORMS:
        for operation in OPERATIONS[name]:
            monkeypatch.setattr(operation, "plans", {})
            monkeypatch.setattr(operation, "families", {})


def hold(name: str, backward: bool, rung: str, M: int, N: int, dtype: str, layout: Layout | None = None) -> None:
    """Check a rung on M x N, without and with a residual; special values with it."""
    spec = OPERATORS[name]
    for residual in (False, True):
        shapes: dict[str, tuple[int, ...]] = {"x": (M, N), **dict.fromkeys(NORMS[name], (N,))}
        shapes |= {"residual": (M, N)} if residual else {}
        asked = {"return_rstd" if name == "rms_norm" else "return_stats": True}
        case = Case("config", dtype, shapes, asked, seed=N)
        direction = Direction(spec, backward)
        layouts = {entry.name: layout for entry in direction.inputs if layout and entry.axes is None}
        layouts = {each: own for each, own in layouts.items() if each not in ("mean", "rstd")}
        run = direction.function(rung)
        check(spec, case, run, backward=backward, layouts=layouts, out_layout=layout, special=residual, ways=("given",))


def padded(aligned: bool) -> Layout:
    return Layout((0, 1), (0, 16 if aligned else 3), misalignment=0 if aligned else 1)


@every_norm
@DIRECTIONS
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (RowsConfig(8, 1, 4), "bfloat16"),
        (RowsConfig(32, 1, 3), "float64"),
        (RowsConfig(64, 1, 2), "float32"),
        (RowsConfig(64, 2, 1), "float16"),
        (RowsConfig(64, 4, 1, aligned=False), "bfloat16"),
        (RowsConfig(16, 4, 4, aligned=False), "float64"),
    ],
    ids=str,
)
def test_rows(monkeypatch, name, config, dtype, backward):
    monkeypatch.setattr(norm, "rows_config", lambda *_, **__: config)
    vector = 16 // itemsize(dtype) if config.aligned else 1
    hold(name, backward, "simt", 2 * config.rows + 1, config.columns(dtype) - vector, dtype, padded(config.aligned))


@every_norm
@DIRECTIONS
@pytest.mark.parametrize(
    ("config", "dtype"),
    [(LongRowsConfig(64, 1), "bfloat16"), (LongRowsConfig(32, 4, aligned=False), "float64")],
    ids=str,
)
def test_long_rows(monkeypatch, name, config, dtype, backward):
    monkeypatch.setattr(norm, "rows_config", lambda *_, **__: None)
    monkeypatch.setattr(norm, "LongRowsConfig", lambda *_: config)
    monkeypatch.setattr(norm, "BLOCKS", 1)  # fewer slots than rows
    hold(name, backward, "simt", 5, config.columns(dtype) + 8, dtype, padded(config.aligned))


@every_norm
@pytest.mark.parametrize("more", [3, 8], ids=["ragged", "aligned"])
def test_rows_of_more_than_512_kib(name, more):
    N = (512 << 10) // 2 + more
    case = Case("config", "bfloat16", {"x": (1, N), **dict.fromkeys(NORMS[name], (N,))}, seed=N)
    check(OPERATORS[name], case, getattr(dualops.cuda, name), ways=("given",), narrow=True)


RINGS = [
    (RingConfig(8, 2, 8, stages=2), "float32"),
    (RingConfig(32, 1, 3, stages=3, w_shared=True), "bfloat16"),
    (RingConfig(64, 1, 2, stages=2), "float64"),
    (RingConfig(64, 1, 1, stages=3, cluster=2, w_shared=True), "float64"),
    (RingConfig(32, 1, 1, stages=2, cluster=4), "float16"),
    (RingConfig(96, 2, 1, stages=3), "bfloat16"),
]
OVERLAPPING = [
    (RingConfig(32, 1, 2, stages=3, overlap=True), "float32"),
    (RingConfig(64, 1, 2, stages=2, overlap=True), "bfloat16"),
    (RingConfig(64, 1, 1, stages=3, cluster=2, overlap=True), "float64"),
    (RingConfig(96, 3, 1, stages=2, cluster=2, overlap=True), "float32"),
]


@every_norm
@pytest.mark.parametrize(
    ("config", "dtype", "backward"),
    [(*each, backward) for each in RINGS + OVERLAPPING for backward in (False, True)],
    ids=str,
)
def test_ring(monkeypatch, name, config, dtype, backward):
    monkeypatch.setattr(norm, "ring_config", lambda *_, **__: config)
    longest, vector = config.cluster * config.columns(dtype), 16 // itemsize(dtype)
    with simulator.order("forward"):
        hold(name, backward, "sm90", 5, longest, dtype)
    with simulator.order("reversed"):
        hold(name, backward, "sm90", 2 * config.rows + (config.rows > 1), longest - vector, dtype, padded(True))


@every_norm
@pytest.mark.parametrize("clusters", [1, 2, 5])
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (ClusterRowsConfig(64, 2, 2, rows=2), "bfloat16"),
        (ClusterRowsConfig(32, 2, 2, rows=2), "float16"),
        (ClusterRowsConfig(32, 1, 16, rows=2), "float32"),
        (ClusterRowsConfig(32, 3, 4, rows=2), "float64"),
    ],
    ids=str,
)
def test_cluster_rows(monkeypatch, name, config, dtype, clusters):
    """A cluster takes all rows, or a row more than another, or each takes one; at last a block has one vector."""
    monkeypatch.setattr(norm, "cluster_config", lambda *_, **__: config)
    monkeypatch.setattr(cluster, "clusters_of", lambda *_: clusters)
    longest, vector = config.cluster * config.columns(dtype), 16 // itemsize(dtype)
    with simulator.order("forward"):
        hold(name, False, "sm90", 5, longest, dtype)
    with simulator.order("reversed"):
        hold(name, False, "sm90", 5, longest - vector, dtype, padded(True))
        hold(name, False, "sm90", 5, config.cluster * vector, dtype)


@every_norm
@pytest.mark.parametrize("config", [SumsConfig(16), SumsConfig(8), SumsConfig(4, batch=16)], ids=str)
def test_slots_are_summed_by_any_number_of_threads(monkeypatch, name, config):
    """70 slots, a row in each: by four threads with batches of 16 loads in two rounds. The last block has a column."""
    monkeypatch.setattr(norm, "rows_config", lambda *_, **__: None)
    monkeypatch.setattr(norm, "LongRowsConfig", lambda *_: LongRowsConfig(32, 1, aligned=False))
    monkeypatch.setattr(norm, "BLOCKS", 100)
    monkeypatch.setattr(norm, "sums_config", lambda *_: config)
    hold(name, True, "simt", 70, 33, "float64")


@every_norm
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (RingConfig(8, 1, 4, stages=2), "float32"),  # four rows a warp, whose eight lanes know as many
        (RingConfig(8, 1, 4, stages=3, overlap=True), "bfloat16"),
        (RingConfig(32, 1, 1, stages=2, cluster=2), "float64"),
        (RingConfig(32, 1, 1, stages=3, cluster=2, overlap=True), "float32"),
    ],
    ids=str,
)
def test_lanes_know_the_statistics_of_many_rows(monkeypatch, name, config, dtype):
    """One cluster takes so many that its lanes load those of other rows three times."""
    monkeypatch.setattr(norm, "ring_config", lambda *_, **__: config)
    turns = 2 * min(config.row_threads, 32) + 3
    hold(name, True, "sm90", turns * config.rows - 1, config.cluster * config.columns(dtype), dtype)


@every_norm
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("scale", "dy_scale"), [(2.0**-62, 2.0**20), (2.0**55, 2.0**50), (2.0**55, 2.0**-60)])
def test_gradients_of_rows_far_from_one(monkeypatch, name, overlap, scale, dy_scale):
    """Products of x, dy and w, and rstd^2 times dy, are beyond float32's range; dx and dw are not."""
    config = RingConfig(32, 1, 1, stages=3, cluster=2, overlap=overlap)
    monkeypatch.setattr(norm, "ring_config", lambda *_, **__: config)
    M, N = 5, config.cluster * config.columns("float32")
    x, dy = (normal(M, N, seed=seed, dtype="float64") for seed in (1, 2))
    w = normal(N, seed=3, dtype="float64") * (2.0**50 if dy_scale > 1 and scale > 1 else 1)
    x, dy, w = ((array * by).astype(np.float32) for array, by in ((x, scale), (dy, dy_scale), (w, 1)))
    mean = x.astype(np.float64).mean(axis=1) if name == "layer_norm" else np.zeros(M)
    rstd = (1 / np.sqrt(((x - mean[:, None]) ** 2).mean(axis=1))).astype(np.float32)
    statistics = (mean.astype(np.float32), rstd) if name == "layer_norm" else (rstd,)
    arrays, own = (x, *statistics, dy, w), f"{name}_backward"
    exact = getattr(reference, own)(*(array.astype(np.float64) for array in arrays))
    for found, truth in zip(getattr(dualops.cuda, own)(*arrays, kernel="sm90")[:2], exact[:2], strict=True):
        np.testing.assert_allclose(found, truth, rtol=0, atol=1e-5 * np.abs(truth).max())


@every_norm
@DIRECTIONS
def test_every_block_has_columns(name, backward):
    """Of a row of 65 vectors, dealt to four blocks; by lines of 128 bytes the last would begin behind its end."""
    hold(name, backward, "sm90", 3, 130, "float64")


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("name", "dtypes", "params"),
    [
        ("rms_norm", {"w": "bfloat16"}, {"offset": 1.0}),
        ("rms_norm", {"w": "float32"}, {"offset": 1.0}),
        ("rms_norm", {}, {}),
        ("layer_norm", {"w": "float32", "b": "float32"}, {}),
        ("layer_norm", {"w": "float32", "b": "bfloat16"}, {}),
        ("layer_norm", {"w": "bfloat16"}, {}),
        ("layer_norm", {"b": "float32"}, {}),
    ],
    ids=str,
)
def test_weights_that_wait_in_shared_memory(monkeypatch, name, dtypes, params, rows, order):
    """A part of a block has no columns, and weights behind the row are not read."""
    config = RingConfig(32, 2, rows, stages=2, cluster=2 if rows == 1 else 1, w_shared=True)
    monkeypatch.setattr(norm, "ring_config", lambda *_, **__: config)
    N = config.cluster * config.columns("bfloat16") - 40
    shapes: dict[str, tuple[int, ...]] = {"x": (5, N), **dict.fromkeys(dtypes, (N,))}
    case = Case("config", "bfloat16", shapes, params, dtypes=dtypes, seed=N)
    check(OPERATORS[name], case, partial(getattr(dualops.cuda, name), kernel="sm90"), ways=("given",))


@every_norm
@pytest.mark.parametrize("rung", ["naive", "simt", "sm90"])
def test_rows_along_many_axes(name, rung):
    """[B, S, H, D] seen as [B, H, S, D], padded, the batch broadcast: no two axes merge."""
    N = 16
    memory = np.random.default_rng(0).standard_normal((2, 5, 3, 2 * N)).astype(np.float32)
    x = np.broadcast_to(memory[:1], memory.shape).transpose(0, 2, 1, 3)[..., :N]
    w = np.linspace(0, 2, N, dtype=np.float32)
    y = getattr(dualops.cuda, name)(x, w, kernel=rung)
    np.testing.assert_allclose(y, getattr(reference, name)(x, w), rtol=1e-5, atol=1e-6)
    assert y.strides[1] < y.strides[2]  # x's memory order


def normal(*shape: int, seed: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(dtype))


@every_norm
@pytest.mark.parametrize(("rung", "dtype"), [("naive", "float64"), ("simt", "bfloat16"), ("sm90", "float32")])
def test_results_may_be_written_over_inputs(name, rung, dtype, order):
    x, residual, dy = (normal(5, 64, seed=seed, dtype=dtype) for seed in range(3))
    w = normal(64, seed=3, dtype=dtype)
    forward, backward = (getattr(dualops.cuda, each) for each in (name, f"{name}_backward"))
    asked = {"return_rstd" if name == "rms_norm" else "return_stats": True}
    y, summed, *statistics = forward(x, w, residual=residual, **asked, kernel=rung)
    expected = backward(summed, *statistics, dy, w, dsummed=dy, kernel=rung)

    over: list[Any] = [x.copy(), residual.copy()]
    forward(over[0], w, residual=over[1], out=tuple(over), kernel=rung)
    np.testing.assert_array_equal(over, [y, summed])
    over = [x.copy(), residual.copy()]
    forward(over[0], w, residual=over[1], out=(over[1], over[0]), kernel=rung)
    np.testing.assert_array_equal(over, [summed, y])
    for place in (0, 1):
        inputs = [summed.copy(), dy.copy()]
        dw = np.empty_like(w)
        backward(inputs[0], *statistics, inputs[1], w, dsummed=dy, out=(inputs[place], dw), kernel=rung)
        np.testing.assert_array_equal(inputs[place], expected[0])
        np.testing.assert_array_equal(dw, expected[1])


def test_results_may_not_be_written_over_weights():
    x, w = normal(4, 16, seed=0, dtype="float32"), normal(16, seed=1, dtype="float32")
    _, rstd = dualops.cuda.rms_norm(x, w, return_rstd=True)
    with pytest.raises(ValueError, match="rms_norm_backward: out dw overlaps w in memory"):
        dualops.cuda.rms_norm_backward(x, rstd, x, w, out=(np.empty_like(x), w))
    with pytest.raises(ValueError, match="rms_norm: out summed overlaps out y in memory"):
        dualops.cuda.rms_norm(x, w, residual=x.copy(), out=(x, x))
