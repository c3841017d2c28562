"""A small problem for every kernel that waits, on which mistakes in its protocol show.

The public functions run them, with their usual plan and launch. The Config is so small that a few rows fill every stage
more than twice, and use two blocks if there is a cluster.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any, NoReturn
from unittest import mock

import numpy as np

from dualops.cuda import norm
from dualops.cuda.compiler.backend import Noun
from dualops.cuda.flash_attention import nan_repair, sm80 as attention_sm80, sm90 as attention_sm90
from dualops.cuda.flash_attention.sm80.config import Sm80Config as AttentionSm80Config, Sm80DkvConfig, Sm80DqConfig
from dualops.cuda.flash_attention.sm90 import (
    backward as attention_sm90_backward,
    bias_tile_scheduler as attention_bias_walk,
    dbias as attention_dbias,
    dkv_split as attention_dkv_split,
    dq as attention_dq,
    dq_split as attention_dq_split,
    float32 as attention_float32,
    fused as attention_fused,
)
from dualops.cuda.flash_attention.sm90.config import Sm90Config as AttentionSm90Config
from dualops.cuda.flash_attention.sm90.dkv_config import DkvApartConfig, DkvConfig
from dualops.cuda.flash_attention.sm90.dq_config import DbiasConfig, DqConfig, DqThirdsConfig
from dualops.cuda.matmul.sm80 import Sm80Config
from dualops.cuda.matmul.sm90 import config as sm90_config
from dualops.cuda.matmul.sm90.config import Sm90Config
from dualops.cuda.norm.staging import RingConfig as NormRing
from dualops.cuda.norm.sums import SumsConfig
from dualops.cuda.retention import (
    decays as retention_decays,
    nan_repair as retention_hidden,
    sm80 as retention_sm80,
    sm90 as retention,
)
from dualops.cuda.retention.sm80 import rows as retention_sm80_rows
from dualops.cuda.retention.sm80.config import Sm80Config as RetentionSm80Config, Sm80Rows, Sm80States
from dualops.cuda.retention.sm90 import chunks as retention_chunks, config as retention_config, wide as retention_wide
from dualops.cuda.rows import cluster as rows_cluster
from dualops.cuda.rows.chunks import ChunksConfig
from dualops.cuda.rows.cluster import ClusterRowsConfig
from dualops.cuda.rows.registers import RowsConfig
from dualops.cuda.rows.reread import LongRowsConfig
from dualops.cuda.tile.boxes import Cluster
from dualops.cuda.tile.roles import roles
from dualops.spec import OPERATORS, Case, Tag, retention_cases
from examples.ladder import matmul as matmul_ladder
from examples.ladder.matmul.tiles import TilesConfig
from tests.checks import Rejected, check
from tests.cuda.configs import Change, alone, changed
from tests.cuda.operators import Direction

softmax_choices = import_module("dualops.cuda.softmax")  # dualops.cuda has the function of this name
NO_ROWS = (softmax_choices, {"rows_config": lambda *_: None})  # registers keep no row


def _recomputed(*_: Any) -> NoReturn:
    raise Rejected("a row is recomputed, and all its inputs are finite")


# the kernels do not recompute rows that are not finite: that would repair the NaN of a step that was left out
NO_RECOMPUTED_ELEMENT: Change = (retention_hidden, {"start": _recomputed})
TWO_KERNELS: Change = (attention_sm90_backward, {"fused_choices": lambda *_: iter(())})
NO_REPAIR: tuple[Change, ...] = ((nan_repair, {"start": _recomputed}),)


@dataclass(frozen=True)
class Problem:
    """One call that launches `kernel`."""

    kernel: str  # the kernel function's name
    operator: str
    backward: bool
    rung: str
    case: Case
    special: int | None = None  # the seed of a second run, with NaN and infinities, about which blocks vote
    configs: tuple[Change, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"{self.kernel} {self.case.id} {self.case.dtype}"

    def run(self) -> None:
        """Check the call. Raises Rejected, or the simulator's error."""
        direction = Direction(OPERATORS[self.operator], self.backward)
        run = direction.function(self.rung)
        check(direction.spec, self.case, run, backward=self.backward, ways=("given",))
        if self.special is not None:
            case = replace(self.case, seed=self.special)
            check(direction.spec, case, run, backward=self.backward, special=True, ways=("given",))

    def prepared(self) -> AbstractContextManager[None]:
        """Inside the with statement, calls have the problem's Configs, and every call is planned again."""
        return changed(self.operator, *self.configs)


DIRECTIONS = (False, True)


def _softmax_rings() -> Iterator[Problem]:
    """Seven rows for a block, or for a cluster of two; there are enough stages for a warp to be a row ahead of another.

    Rows fit into the stages, or are longer, so that a chunk is loaded twice.
    """
    config = ChunksConfig(warps=2, vectors=1, stages=4, cluster=1, chunks=2)
    for cluster, backward, longer in product((1, 2), DIRECTIONS, (0, 1)):
        chosen = replace(config, cluster=cluster)
        columns = chosen.kept("float64") + longer * cluster * chosen.chunk("float64")
        case = Case(f"cluster of {cluster}{longer * ', longer'}", "float64", {"x": (7, columns)})
        no_cluster = (softmax_choices, {"cluster_config": lambda *_: None})
        instead = (softmax_choices, {"ring_configs": lambda *_, chosen=chosen: iter([chosen])})
        kernel = "softmax_ring_backward" if backward else "softmax_ring"
        yield Problem(kernel, "softmax", backward, "sm90", case, configs=(NO_ROWS, no_cluster, instead))


def _softmax_clusters() -> Iterator[Problem]:
    """Rows of four vectors per thread for each of two blocks."""
    config = ClusterRowsConfig(64, 4, cluster=2)
    case = Case("cluster of 2", "float32", {"x": (3, 2 * config.columns("float32"))})
    instead = (softmax_choices, {"cluster_config": lambda *_: config})
    for backward in DIRECTIONS:
        kernel = f"softmax_cluster_rows{'_backward' if backward else ''}"
        yield Problem(kernel, "softmax", backward, "sm90", case, configs=(NO_ROWS, instead))


def _softmax_rows() -> Iterator[Problem]:
    dtype = "float32"
    rows, long_rows = RowsConfig(64, 1, 2), LongRowsConfig(64, 1)
    kept = ((softmax_choices, {"rows_config": lambda *_: rows}),)
    too_long = (
        NO_ROWS,
        (softmax_choices, {"ring_configs": lambda *_: iter(())}),
        (softmax_choices, {"LongRowsConfig": lambda *_: long_rows}),
    )
    for backward in DIRECTIONS:
        behind = "_backward" if backward else ""
        case = Case("two rows a block", dtype, {"x": (3, rows.columns(dtype))})
        yield Problem(f"softmax_rows{behind}", "softmax", backward, "simt", case, configs=kept)
        case = Case("two chunks", dtype, {"x": (2, 500)})
        yield Problem(f"softmax_long_rows{behind}", "softmax", backward, "simt", case, configs=too_long)
        case = Case("columns", dtype, {"x": (40, 3)}, {"axis": 0})
        yield Problem(f"softmax_strided{behind}", "softmax", backward, "simt", case)


def _norm_case(name: str, operator: str, M: int, N: int, dtype: str, residual: bool) -> Case:
    vectors = {"rms_norm": ("w",), "layer_norm": ("w", "b")}[operator]
    shapes = {"x": (M, N), **dict.fromkeys(vectors, (N,)), **({"residual": (M, N)} if residual else {})}
    return Case(name, dtype, shapes, {"return_rstd" if operator == "rms_norm" else "return_stats": True})


def _norm_rings() -> Iterator[Problem]:
    """A warp per row; two or three warps per row, with a barrier per row; a cluster of two blocks per row."""
    configs = {
        "a warp a row": ("rms_norm", "float32", NormRing(32, 1, 3, stages=3), 8),
        "two warps a row": ("layer_norm", "float32", NormRing(64, 1, 2, stages=2), 0),
        "a cluster a row": ("layer_norm", "float64", NormRing(64, 1, 1, stages=3, cluster=2, w_shared=True), 0),
        # the second row's warps are in two warpgroups, one of which may lag, so that two rows must not share a barrier
        "three warps a row, overlapping": (
            "layer_norm",
            "float64",
            NormRing(96, 1, 2, 3, w_shared=True, overlap=True),
            0,
        ),
        "a cluster a row, overlapping": ("rms_norm", "float64", NormRing(64, 1, 1, 3, cluster=2, overlap=True), 0),
    }
    for (name, (operator, dtype, config, shorter)), backward in product(configs.items(), DIRECTIONS):
        N = config.cluster * config.columns(dtype) - shorter
        M = (3 * config.stages + 1) * config.rows - (config.rows > 1)
        case = _norm_case(name, operator, M, N, dtype, residual=operator == "layer_norm")
        kernel = "norm_ring_backward" if backward else "norm_ring_ahead" if config.overlap else "norm_ring"
        instead = {"ring_config": lambda *_, config=config: config}
        yield Problem(kernel, operator, backward, "sm90", case, configs=((norm, instead),))


def _norm_clusters() -> Iterator[Problem]:
    """Five rows of two vectors per thread for a cluster of two blocks; each norm, with and without a residual."""
    config = ClusterRowsConfig(64, 2, cluster=2, rows=2)
    columns = config.cluster * config.columns("float32") - 8  # so that w does not fill its shared memory
    chosen, clusters = {"cluster_config": lambda *_: config}, {"clusters_of": lambda *_: 1}
    for operator, residual in product(("rms_norm", "layer_norm"), (False, True)):
        case = _norm_case(f"cluster of 2{residual * ', with a residual'}", operator, 5, columns, "float32", residual)
        yield Problem(
            "norm_cluster_rows", operator, False, "sm90", case, configs=((norm, chosen), (rows_cluster, clusters))
        )


def _norm_rows() -> Iterator[Problem]:
    dtype, rows, long_rows = "float32", RowsConfig(64, 1, 2), LongRowsConfig(64, 1)
    kept = {"rows_config": lambda *_: rows, "ring_config": lambda *_: None}
    too_long = {"rows_config": lambda *_: None, "ring_config": lambda *_: None, "LongRowsConfig": lambda *_: long_rows}
    for backward in DIRECTIONS:
        case = _norm_case("two rows a block", "layer_norm", 5, rows.columns(dtype), dtype, True)
        kernel = "norm_rows_backward" if backward else "norm_rows"
        yield Problem(kernel, "layer_norm", backward, "simt", case, configs=((norm, kept),))
        case = _norm_case("two chunks", "layer_norm", 3, 500, dtype, True)
        kernels = ("norm_long_rows_means", "norm_long_rows_backward") if backward else ("norm_long_rows",)
        for kernel in kernels:
            yield Problem(kernel, "layer_norm", backward, "simt", case, configs=((norm, too_long),))
    case = _norm_case("a slot a row", "layer_norm", 4, 300, dtype, False)
    sums = {**too_long, "sums_config": lambda *_: SumsConfig(slices=2)}
    yield Problem("norm_sums", "layer_norm", True, "simt", case, configs=((norm, sums),))


# queries and keys of attention on sm90: a plain call, and one whose rows see little
FEWER = {"q": (1, 1, 140, 64), "k": (1, 1, 40, 64), "v": (1, 1, 40, 64)}
BIAS_OF_FEWER = {"bias": (140, 40)}
TOKENS = {"q": (332, 1, 64), "k": (72, 1, 64), "v": (72, 1, 64), "cu_seqlens_q": (2,), "cu_seqlens_k": (2,)}
MASKED = {"max_seqlen_q": 332, "max_seqlen_k": 72, "causal": True}


def _attention() -> Iterator[Problem]:
    """sm90: a block has three pieces of work with three tiles of keys each; or six, with five, four and no tiles."""
    over_q = AttentionSm90Config(1, 16, q_stages=1, o_over_q=True)
    boxed = AttentionSm90Config(1, 16, q_stages=1, bias_stages=1)
    for name, operator, shapes, params, config in (
        ("boxes", "flash_attention", FEWER, {}, AttentionSm90Config(1, 16, q_stages=1)),
        ("some rows see nothing", "flash_attention_varlen", TOKENS, MASKED, AttentionSm90Config(1, 16, held=True)),
        ("boxes over Q", "flash_attention", FEWER, {}, over_q),
        ("rows over Q", "flash_attention_varlen", TOKENS, MASKED, over_q),
        ("a bias in boxes", "flash_attention", FEWER | BIAS_OF_FEWER, {}, boxed),
    ):
        case = Case(name, "bfloat16", shapes, {"return_lse": True, **params})
        configs = (alone(attention_sm90, config), *NO_REPAIR)
        yield Problem("flash_attention_sm90", operator, False, "sm90", case, configs=configs)
    # tiles of keys that fill each stage twice; results of two boxes
    shapes = {"q": (1, 1, 70, 32), "k": (1, 1, 100, 32), "v": (1, 1, 100, 72)}
    case = Case("four tiles", "bfloat16", shapes, {"return_lse": True})
    configs = (alone(attention_sm80, AttentionSm80Config(1, 32)), *NO_REPAIR)
    yield Problem("flash_attention_sm80", "flash_attention", False, "sm80", case, configs=configs)


# dk and dv: two blocks, the first with enough tiles to fill each of two stages four times
DKV_FEWER = {"q": (1, 1, 124, 64), "k": (1, 1, 72, 64), "v": (1, 1, 72, 64)}
DKV_THREE = dict.fromkeys("qkv", (1, 1, 130, 64))  # three blocks, causal, the last of one tile
DKV_TOKENS = {"q": (140, 1, 64), "k": (120, 1, 64), "v": (120, 1, 64), "cu_seqlens_q": (2,), "cu_seqlens_k": (2,)}
DKV_MASKED = {"max_seqlen_q": 140, "max_seqlen_k": 120, "causal": True}


def _roles_of_any_registers(consumers: int, *, most: bool = False) -> Noun:
    """Return roles without limits on registers, which the simulator does not have."""
    return roles(1).but(threads=128 * (consumers + 1))


def _attention_gradient() -> Iterator[Problem]:
    """sm90's gradient; for dq the pieces of `_attention`.

    The fused kernel has blocks with six tiles and with three: if the numbers were all even, or all odd, a mistake of
    one of two places for the other would cancel.
    """
    over_q = DqConfig(1, 16, dq_over_q=True)
    for name, operator, shapes, params, config in (
        ("boxes", "flash_attention", FEWER, {}, DqConfig(1, 16)),
        ("some rows see nothing", "flash_attention_varlen", TOKENS, MASKED, DqConfig(1, 16, q_stages=2)),
        ("boxes over Q", "flash_attention", FEWER, {}, over_q),
        ("rows over Q", "flash_attention_varlen", TOKENS, MASKED, over_q),
        ("a bias in boxes", "flash_attention", FEWER | BIAS_OF_FEWER, {}, DqConfig(1, 16, bias_stages=1)),
    ):
        chosen = (attention_sm90_backward, {"dq_configs": lambda *_, config=config: iter([(config, "alone")])})
        case = Case(name, "bfloat16", shapes, {"return_lse": True, **params})
        configs = (chosen, TWO_KERNELS, *NO_REPAIR, (attention_dq, {"roles": _roles_of_any_registers}))
        yield Problem("flash_attention_dq_sm90", operator, True, "sm90", case, configs=configs)
    seen_less = "some rows see nothing", "flash_attention_varlen", DKV_TOKENS, DKV_MASKED
    for kernel, name, operator, shapes, params, config in (
        ("dkv", "boxes", "flash_attention", DKV_FEWER, {}, DkvConfig(1, 16)),
        ("dkv", *seen_less, DkvConfig(1, 16, overlap=False)),
        ("dkv_split", "boxes", "flash_attention", DKV_THREE, {"causal": True}, DkvApartConfig(16, 2)),
        ("dkv_split", *seen_less, DkvApartConfig(16, 2, overlap=False, exact=True)),
    ):
        chosen = (attention_sm90_backward, {"dkv_configs": lambda *_, config=config: iter([(config, "alone")])})
        case = Case(name, "bfloat16", shapes, {"return_lse": True, **params})
        configs = (chosen, TWO_KERNELS, *NO_REPAIR, (attention_dkv_split, {"roles": _roles_of_any_registers}))
        yield Problem(f"flash_attention_{kernel}_sm90", operator, True, "sm90", case, configs=configs)
    yield from _attention_dbias()
    yield from _attention_in_thirds()
    small: Change = (attention_sm90_backward, {"LEAST_TILES": 1})
    plain: Change = (attention_fused, {"roles": _roles_of_any_registers})
    shapes = {"q": (1, 3, 120, 128), "k": (1, 1, 130, 128), "v": (1, 1, 130, 64)}
    case = Case("two blocks", "bfloat16", shapes, {"return_lse": True, "causal": True})
    for kernel in ("flash_attention_fused_sm90", "flash_attention_dq_finish"):
        yield Problem(kernel, "flash_attention", True, "sm90", case, configs=(small, plain, *NO_REPAIR))


def _attention_dbias() -> Iterator[Problem]:
    """Pieces whose keys stay in shared memory for two of three heads, or whose queries stay for three tiles (for
    one if a mask hides the others). So each operand stays in one problem, and is loaded per step in another.
    """
    for name, (H, Hkv), (Sq, Sk), bias, least, overlap, params in (
        ("keys stay", (6, 3), (20, 40), (20, 40), 3, True, {}),
        ("queries stay", (4, 4), (100, 40), (100, 1), 6, False, {"causal": True}),
    ):
        config = DbiasConfig(1, 16, 3, overlap)
        chosen = (attention_dbias, {"dbias_configs": lambda *_, config=config: iter([(config, "alone")])})
        shapes = {"q": (1, H, Sq, 64), "k": (1, Hkv, Sk, 64), "v": (1, Hkv, Sk, 64), "bias": bias}
        case = Case(name, "bfloat16", shapes, {"return_lse": True, **params})
        configs = (chosen, (attention_bias_walk, {"LEAST_VISITS": least}), TWO_KERNELS, *NO_REPAIR)
        yield Problem("flash_attention_dbias_sm90", "flash_attention", True, "sm90", case, configs=configs)


def _attention_in_thirds() -> Iterator[Problem]:
    """sm90's kernels for float32, forward and gradient, with the pieces and tiles of the 16-bit problems."""
    config = AttentionSm90Config(1, 16, q_stages=1, thirds=True)
    case = Case("thirds", "float32", FEWER, {"return_lse": True})
    changes = ((attention_float32, {"thirds_configs": lambda *_: iter([(config, "alone")])}), *NO_REPAIR)
    yield Problem("flash_attention_sm90", "flash_attention", False, "sm90", case, configs=changes)
    narrow = DqConfig(1, 16, thirds=True), DkvConfig(1, 16, overlap=False, thirds=True)
    wide = DqThirdsConfig(16), DkvApartConfig(16, 2, 1, overlap=False, exact=True, thirds=True)
    split = attention_dq, attention_dq_split, attention_dkv_split
    plain = [(module, {"roles": _roles_of_any_registers}) for module in split]
    for kernel, operator, pair, shapes, params in (
        ("dq", "flash_attention", narrow, {**DKV_FEWER, "q": FEWER["q"]}, {}),
        ("dkv", "flash_attention", narrow, DKV_FEWER, {}),
        ("dq_split_f32", "flash_attention_varlen", wide, TOKENS, MASKED),
        ("dkv_split_f32", "flash_attention", wide, {**DKV_FEWER, "q": (1, 1, 60, 64)}, {}),
    ):
        few = {"LEAST_QUERIES": 1, "LEAST_KEYS": 1, "gradient_configs": lambda *_, pair=pair: (pair, "alone")}
        case = Case("thirds", "float32", shapes, {"return_lse": True, **params})
        changes = ((attention_float32, few), *NO_REPAIR, *plain)
        yield Problem(f"flash_attention_{kernel}_sm90", operator, True, "sm90", case, configs=changes)


def _slow_at_first(logs: Callable[..., np.ndarray], shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw `logs`, but slow ones for the first chunk. Else the initial state's gradient has no trace of half of it."""
    found = logs(shape, rng)
    first = found[..., : retention_config.CHUNK]
    first[first < -(2.0**-7)] = 0
    return found


def _retention() -> Iterator[Problem]:
    """Five chunks, which fill each stage twice; o in two boxes; keys in three parts, which the final state or log_decay
    needs. With log_decay, there are more tokens to sum than a block has threads.
    """
    plain, shape = (retention_chunks, {"roles": _roles_of_any_registers}), (1, 1, 570, 72)
    case = Case("the final state", "bfloat16", dict.fromkeys("qkv", shape), {"return_state": True})
    yield Problem("retention_sm90", "retention", False, "sm90", case, configs=(NO_RECOMPUTED_ELEMENT, plain))
    shapes = {**dict.fromkeys("qkv", shape), "log_decay": shape[:3]}
    case = Case("log_decay", "bfloat16", shapes)
    yield Problem("retention_sm90", "retention", False, "sm90", case, configs=(NO_RECOMPUTED_ELEMENT, plain))
    states = {"initial_state": (1, 1, 72, 72)}
    case = Case("dlog_decay", "bfloat16", shapes | states, {"return_state": True})
    slow = (retention_cases, {"_logs": partial(_slow_at_first, retention_cases._logs)})
    yield Problem("retention_sm90", "retention", True, "sm90", case, configs=(NO_RECOMPUTED_ELEMENT, plain, slow))
    short = {**dict.fromkeys("qkv", (1, 1, 200, 8)), "log_decay": (1, 1, 200), "initial_state": (1, 1, 8, 8)}
    case = Case("two blocks", "bfloat16", short)
    one = (retention, {"RUN": 1})
    yield Problem("retention_decay_grad_sums", "retention", True, "sm90", case, configs=(one,))
    one = (retention_decays, {"CONFIG": retention_decays.PrefixSumsConfig(threads=32, each=1)})
    (case,) = (case for case in OPERATORS["retention"].tagged(Tag.SIM) if case.id == "sim_steps-float32")
    yield Problem("retention_prefix_sums", "retention", False, "simt", case, configs=(one,))
    wide: tuple[Change, ...] = (NO_RECOMPUTED_ELEMENT, (retention_wide, {"roles": _roles_of_any_registers}))
    shapes = {"q": (1, 1, 300, 72), "k": (1, 1, 300, 72), "v": (1, 1, 300, 136)}
    case = Case("two slices", "bfloat16", shapes, {"return_state": True})  # and two boxes of keys
    yield Problem("retention_wide_sm90", "retention", False, "sm90", case, configs=wide)
    few: tuple[Change, ...] = ((retention, {"WIDEST": 64}), (retention_config, {"MOST_KEYS": 64}))
    shapes = {"q": (1, 1, 430, 72), "k": (1, 1, 430, 72), "v": (1, 1, 430, 8)}
    yield Problem(
        "retention_wide_sm90", "retention", False, "sm90", Case("halves", "bfloat16", shapes), configs=(*wide, *few)
    )


def _retention_sm80() -> Iterator[Problem]:
    """Rows with four slices of a state, then two tiles; a chunk's state with four tiles of tokens."""
    for kernel, chunk, Sq, D in (("retention_rows_sm80", 64, 100, 128), ("retention_states_sm80", 128, 129, 16)):
        config = RetentionSm80Config(chunk, Sm80Rows(block_kv=32), Sm80States(tokens=32))
        plain = (retention_sm80_rows, {"FEW_SEEN": 0})  # without residuals, which are no step of the protocol
        changes = alone(retention_sm80, config), NO_RECOMPUTED_ELEMENT, plain
        case = Case("two chunks", "bfloat16", dict.fromkeys("qkv", (1, 1, Sq, D)), {"return_state": True})
        yield Problem(kernel, "retention", False, "sm80", case, configs=changes)


def _attention_gradient_sm80(kernel: str, Sq: int, Sk: int, Dv: int) -> Iterator[Problem]:
    """Four tiles of keys, or of the queries of two heads, which fill each stage twice; results in two boxes."""
    shapes = {"q": (1, 2, Sq, 128), "k": (1, 1, Sk, 128), "v": (1, 1, Sk, Dv)}
    case = Case("four tiles", "bfloat16", shapes, {"return_lse": True})
    one = {"dq_configs": lambda *_: iter([(Sm80DqConfig(1, 32), "alone")])}
    one |= {"dkv_configs": lambda *_: iter([(Sm80DkvConfig(1, 32), "alone")])}
    yield Problem(kernel, "flash_attention", True, "sm80", case, configs=((attention_sm80, one), *NO_REPAIR))


def _products_in_boxes() -> Iterator[Problem]:
    """Two tiles for each block of a cluster, stored as boxes, with a bias; for a block, stored row by row; a sum that
    two blocks compute; and parts of float32 in pieces of three slices, the last of two. Each fills a stage again.
    """
    in_boxes = {"a": (136, 136), "b": (136, 128), "bias": (128,)}, {"return_preactivation": True, "activation": "relu"}
    in_rows = {"a": (136, 136), "b": (124, 136)}, {"activation": "relu", "transpose_b": True}
    long = {"a": (64, 392), "b": (392, 64)}, {}
    for name, config, (shapes, params) in (
        ("boxes", Sm90Config(1, 64, 2, 64, Cluster(2, 1), group=2), in_boxes),
        ("rows", Sm90Config(1, 64, 2, 64), in_rows),
        ("a sum of two blocks", Sm90Config(1, 64, 2, 64, splits=2), long),
    ):
        instead = (sm90_config, {"TILES": ((config, 1),), "LEAST_SPLIT": 1})
        kernel = "matmul_sm90_split" if config.splits > 1 else "matmul_sm90"
        yield Problem(kernel, "matmul", False, "sm90", Case(name, "bfloat16", shapes, params), configs=(instead,))
    in_pieces = Sm90Config(1, 32, 2, 32, block_k=32, itemsize=4, piece=3)
    case = Case("pieces", "float32", {"a": (136, 72), "b": (72, 40)}, {"precision": "3xtf32"})
    for kernel in ("matmul_sm90", "matmul_k_major"):
        instead = (sm90_config, {"PARTS_TILES": ((in_pieces, 1),)})
        yield Problem(kernel, "matmul", False, "sm90", case, configs=(instead,))


# for kernels with block barriers, a SIM case each, with these shapes in place of its own: they have more than one tile
LARGER = {
    "queries": {"q": (1, 2, 5, 8), "k": (1, 1, 9, 8), "v": (1, 1, 9, 8)},
    "keys": {"q": (1, 1, 5, 8), "k": (1, 1, 40, 8), "v": (1, 1, 40, 8)},
    "retention": {"q": (1, 1, 17, 40), "k": (1, 1, 17, 40), "initial_state": (1, 1, 40, 8)},
    "steps": {"q": (1, 1, 20, 40), "k": (1, 1, 20, 40), "v": (1, 1, 20, 8), "log_decay": (1, 1, 20)}
    | {"initial_state": (1, 1, 40, 8), "initial_norm": (1, 1, 40)},
    "matmul": {"a": (1, 60, 300), "b": (40, 300), "bias": (40,)},
}
# the seed: for one in eight, q has a non-finite number that only some threads see, and that changes the result
SPECIAL = {"flash_attention_dkv": 8}
SIMULATED = (
    ("flash_attention_simt", "flash_attention", False, "sim_plain-float16", {}),
    ("flash_attention_dkv", "flash_attention", True, "sim_gqa_causal-float32", LARGER["queries"]),
    ("flash_attention_dq", "flash_attention", True, "sim_gqa_causal-float32", LARGER["keys"]),
    ("flash_attention_dbias", "flash_attention", True, "sim_options_5-float32", {}),
    ("flash_attention_dsinks", "flash_attention", True, "sim_options_5-float32", {}),
    ("matmul_simt", "matmul", False, "sim_nt-float32", {}),
    ("matmul_column_sums", "matmul", True, "sim_nn-float64", {}),
    ("matmul_column_sums", "matmul", True, "sim_nt-bfloat16", {}),
    ("matmul_sm80", "matmul", False, "sim_nt-bfloat16", LARGER["matmul"]),
    ("retention_rows", "retention", False, "sim_parallel_states-float32", LARGER["retention"]),
    ("retention_contributions", "retention", False, "sim_parallel_states-float32", {}),
    ("retention_recurrent", "retention", False, "sim_token-float32", {}),
    ("retention_state_terms", "retention", True, "sim_steps_states-float32", LARGER["steps"]),
    ("retention_step_gradient", "retention", True, "sim_steps_states-float32", LARGER["steps"]),
)


def _of_cases() -> Iterator[Problem]:
    for kernel, operator, backward, name, shapes in SIMULATED:
        (case,) = (case for case in OPERATORS[operator].tagged(Tag.SIM) if case.id == name)
        rung = "sm80" if kernel.endswith("_sm80") else "simt"
        larger = replace(case, shapes={**case.shapes, **shapes})
        yield Problem(kernel, operator, backward, rung, larger, SPECIAL.get(kernel, 0) if shapes else None)


PROBLEMS = [
    *_softmax_rings(),
    *_softmax_clusters(),
    *_softmax_rows(),
    *_norm_rings(),
    *_norm_clusters(),
    *_norm_rows(),
    *_attention(),
    *_attention_gradient(),
    *_attention_gradient_sm80("flash_attention_dq_sm80", 40, 100, 64),
    *_attention_gradient_sm80("flash_attention_dkv_sm80", 50, 40, 128),
    *_retention(),
    *_retention_sm80(),
    *_products_in_boxes(),
    *_of_cases(),
]


# --- the ladders -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepProblem(Problem):
    """One call of a kernel of matmul's ladder, which no rung of the operator launches."""

    def run(self) -> None:
        check(OPERATORS[self.operator], self.case, partial(matmul_ladder.run_step, self.rung), ways=("given",))

    @contextmanager
    def prepared(self) -> Iterator[None]:
        with small_steps():
            yield


# the smallest possible tiles
SMALL_STEPS: dict[str, Any] = {
    "thread_an_element": None,
    "shared_tiles": TilesConfig(lanes=8, rows=1, columns=1, block_k=8),
    "register_tiles": TilesConfig(lanes=8, rows=2, columns=8, block_k=8),
    "tensor_cores": Sm80Config(1, 2, 32, 32, block_k=32, num_stages=1),
    "copies_ahead": Sm80Config(1, 2, 32, 32, block_k=32, num_stages=2),
    "boxes": Sm90Config(2, 128, 2, 64),
    "roles": Sm90Config(1, 128, 2, 64),
    "persistent": Sm90Config(1, 64, 2, 64),
    "clusters": Sm90Config(1, 64, 2, 64, Cluster(2, 1), group=2),
}


@contextmanager
def small_steps() -> Iterator[None]:
    """Inside the with statement, the kernels of matmul's ladder have small tiles."""
    small = {name: step._replace(config=SMALL_STEPS[name]) for name, step in matmul_ladder.STEPS.items()}
    kept = mock.patch.multiple(matmul_ladder.forward, plans={}, families={})
    with mock.patch.dict(matmul_ladder.STEPS, small), kept:
        yield


def _steps() -> Iterator[Problem]:
    """Each kernel, on a product that fills every stage more than twice and stores its tile in two parts."""
    sizes = {"shared_tiles": (8, 16, 24), "copies_ahead": (24, 40, 136), "boxes": (72, 72, 264), "roles": (40, 72, 264)}
    kernels = {"shared_tiles": "tiles", "copies_ahead": "warps", "boxes": "boxes", "roles": "roles"}
    for name, (M, N, K) in sizes.items():
        case = Case(name, "bfloat16", {"a": (M, K), "b": (K, N)})
        yield StepProblem(f"matmul_{kernels[name]}", "matmul", False, name, case)


LADDER = [*_steps()]
