"""Which Config a gradient of a norm takes: no GPU is needed."""

from dataclasses import replace

import pytest

import dualops.cuda  # noqa: F401  registers the operations
from dualops.cuda.compiler.offline import absent_problem
from dualops.cuda.launch.device import Device, known
from dualops.cuda.launch.operation import OPERATIONS, Choice
from dualops.cuda.norm.gradient_configs import ADDED, FAST, FAST_WITH_BOTH, RINGS, ROWS
from dualops.cuda.norm.staging import RingConfig
from dualops.cuda.rows.registers import RowsConfig
from dualops.estimate import architecture
from dualops.spec import OPERATORS, Case

H100, H200 = architecture("h100").device, known("sm_90a")
VECTORS = {"rms_norm": ("w",), "layer_norm": ("w", "b")}


def choices(
    operator: str, N: int, device: Device = H100, dtype: str = "bfloat16", *, added: bool = False, wide: bool = False
) -> list[Choice]:
    """Best first; added: dsummed; wide: weights of float32."""
    vectors = VECTORS[operator]
    shapes = {"x": (300, N), **dict.fromkeys(vectors, (N,)), **({"residual": (300, N)} if added else {})}
    dtypes = {} if wide else dict.fromkeys(vectors, dtype)
    problem = absent_problem(OPERATORS[operator], Case("rows", dtype, shapes, dtypes=dtypes), True)
    operation = OPERATIONS[operator][True]
    return [*operation.choices(problem, problem.outputs(operation.outputs), device)]


@pytest.mark.parametrize(
    ("operator", "N", "config"),
    [
        ("rms_norm", 128, RowsConfig(16, 1, 16, min_blocks=3)),
        ("rms_norm", 512, RowsConfig(16, 4, 8, min_blocks=2)),
        ("rms_norm", 768, RingConfig(64, 2, 2, 6, min_blocks=3)),
        ("rms_norm", 776, RowsConfig(32, 4, 4, min_blocks=2)),
        ("rms_norm", 1024, RowsConfig(32, 4, 4, min_blocks=2)),
        ("rms_norm", 3072, RingConfig(128, 4, 2, 6)),
        ("rms_norm", 4096, RingConfig(128, 2, 1, 6, 2, min_blocks=2, overlap=True)),
        ("rms_norm", 8192, RingConfig(256, 2, 1, 6, 2, overlap=True)),
        ("rms_norm", 20480, RingConfig(320, 2, 1, 6, 4, overlap=True)),
        ("rms_norm", 32768, RingConfig(128, 2, 1, 7, 16, min_blocks=3)),
        ("layer_norm", 256, RowsConfig(16, 2, 16, min_blocks=2)),
        ("layer_norm", 1024, RingConfig(64, 2, 2, 6, min_blocks=3, w_shared=True)),
        ("layer_norm", 3072, RingConfig(128, 3, 1, 6, min_blocks=2, w_shared=True)),
        ("layer_norm", 4096, RowsConfig(128, 4, 1, min_blocks=3)),
        ("layer_norm", 5120, RingConfig(320, 2, 1, 6, w_shared=True)),
        ("layer_norm", 16384, RingConfig(128, 2, 1, 7, 8, min_blocks=3, w_shared=True)),
        ("layer_norm", 24576, RingConfig(256, 3, 1, 6, 4, w_shared=True, overlap=True)),
    ],
)
def test_each_length_has_threads_that_it_fills(operator: str, N: int, config: RowsConfig | RingConfig):
    assert choices(operator, N)[0].config == config


def test_a_rung_is_offered_once_wherever_it_stands():
    for N in (64, 1024, 4096, 20000):
        for operator in VECTORS:
            found = [(choice.rung, type(choice.config).__name__) for choice in choices(operator, N)]
            assert len(found) == len({*found}) and {"simt", "sm90", "naive"} == {rung for rung, _ in found}
    assert [choice.rung for choice in choices("rms_norm", 1024, known("sm_80"))] == ["simt", "simt", "naive"]


@pytest.mark.parametrize(
    ("operator", "N"),
    [*(("rms_norm", N) for N in (1024, 8192, 16384, 32768, 65536)), *(("layer_norm", N) for N in (1024, 8192, 32768))],
)
def test_gpus_without_clusters_of_16_have_rings_too(operator: str, N: int):
    found = [choice.config for choice in choices(operator, N, known("sm_120")) if choice.rung == "sm90"]
    assert found and all(config.cluster <= 8 for config in found)


@pytest.mark.parametrize("N", [1024, 8192, 16384, 32768, 65536])
def test_a_slice_of_a_gpu_has_rings_too(N: int):
    device = replace(H100, sms=78, max_cluster=8, memory_bandwidth=H100.memory_bandwidth * 78 / 132)
    for operator in VECTORS:
        for added in (False, True):
            found = [choice.config for choice in choices(operator, N, device, added=added) if choice.rung == "sm90"]
            assert found and all(config.cluster <= 8 for config in found)


@pytest.mark.parametrize("centred", [False, True])
def test_configs_hold_what_they_are_listed_for(centred: bool):
    lengths = [most for most, _ in RINGS[centred]]
    assert lengths == sorted(lengths)
    first = [ADDED[centred], *(FAST[centred, narrow] for narrow in (False, True))]
    if centred:
        first += FAST_WITH_BOTH.values()
    assert all({*each} <= {*lengths} for each in first)
    for most, config in (*RINGS[centred], *(pair for each in first for pair in each.items())):
        assert config.cluster * config.row_threads * config.vectors >= most
    held = [config.row_threads * config.vectors for config in ROWS[centred]]
    assert held == sorted(held)
