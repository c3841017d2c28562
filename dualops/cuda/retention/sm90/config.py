"""The tiles of retention's sm90 rung, the argument records of its kernels, and which chunks a block walks."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from ....spec import ArrayMeta, Problem
from ...compiler.backend import i32, i64, tensor_map, types, u32, verb
from ...launch.views import number_type
from ...tile.swizzle import Operand
from ...tile.warpgroup import ROWS
from ...tile.warpgroup_exchange import THREADS, exchange_bytes

DTYPE = "bfloat16"
SLACK = 1024  # bytes of shared memory for the mbarriers and the gap between them and the tiles
BOX = 64  # elements of 16 bits in a line of a box
CONSUMERS = 2  # warpgroups that multiply
WARPS = 4 * CONSUMERS
CHUNK = ROWS * CONSUMERS  # tokens
KEY_WIDTH = ROWS * CONSUMERS  # rows of the state, 64 a warpgroup; rows beyond D are loaded as zeros
DECAY_TABLES = 16 * CHUNK  # bytes of the tables of log_decay in shared memory
MOST_KEYS = 256  # of a warpgroup's 64 columns of a state: half of its registers


class Tiles(NamedTuple):
    """What is in shared memory."""

    q: Operand  # [CHUNK, 128]
    k: Operand  # [CHUNK, 128], a stage
    v: Operand  # [CHUNK, Dv], a stage; Y's is the same
    state: Operand  # [128, Dv]
    k_at: int
    v_at: int
    y_at: int
    state_at: int
    o_at: int  # [CHUNK, Dv], or one box of it
    decay_at: int  # the tables of log_decay
    nbytes: int


@dataclass(frozen=True)
class Sm90Config:
    """stages: of K and V. parts: 16-bit numbers for each decayed key that is added to the state. One part is enough if
    o alone reads the state, because o rounds it too. Three parts keep all digits of float32, for a state that is a
    result. segments: parts of a sequence that blocks walk at the same time, if sequences are few. stepwise: with
    log_decay.
    """

    stages: int = 2
    parts: int = 1
    segments: int = 1
    chunk: int = CHUNK
    stepwise: bool = False

    def slices(self, D: int, Dv: int) -> int:
        """Return the number of blocks that split the columns of a sequence."""
        return 1

    def tiles(self, Dv: int, decay_grad: bool = False) -> Tiles:
        """Return the tiles for values of this width, in whole boxes. decay_grad: Y takes the place of V's other stages,
        and of all boxes of o but one.
        """
        q, k = (Operand(CHUNK, KEY_WIDTH, 2, 128, "k") for _ in range(2))
        v, state = (Operand(lines, Dv, 2, 128, "mn") for lines in (CHUNK, KEY_WIDTH))
        v_stages, y, o_width = (1, v.nbytes, BOX) if decay_grad else (self.stages, 0, Dv)
        sizes = q.nbytes, self.stages * k.nbytes, v_stages * v.nbytes, y, state.nbytes, 2 * CHUNK * o_width
        return Tiles(q, k, v, state, *accumulate((*sizes, self.stepwise * DECAY_TABLES)))

    def shared_bytes(self, D: int, Dv: int, decay_grad: bool = False) -> int:
        return self.tiles(padded(Dv), decay_grad).nbytes


@dataclass(frozen=True)
class Walk:
    """What a kernel is built for. begins: it begins with a state. finishes: it stores the last state. back: from the
    last chunk to the first. overlaps: other launches of the gradient overlap with it. looks: without it there is no q,
    and only states are computed. decay_grad: it also leaves the sums for log_decay's gradient.
    """

    begins: bool = False
    finishes: bool = False
    back: bool = False
    overlaps: bool = False
    looks: bool = True
    decay_grad: bool = False


def padded(width: int) -> int:
    """Return a width in whole boxes."""
    return -(-width // BOX) * BOX


class WideTiles(NamedTuple):
    """What is in shared memory for wide heads. A warpgroup multiplies operands; the producer loads tiles."""

    halves: bool  # whether the warpgroups split the keys, because the state of one would not fit in its registers
    keys: int  # that a warpgroup multiplies
    values: int  # a block's columns of o and V
    stages: int  # of K and V
    q_tile: Operand  # [64, keys of all warpgroups]; K's is the same
    v_tile: Operand  # [64, values of all warpgroups], a stage
    q: Operand  # [64, keys]; K's for scores is the same
    k: Operand  # [64, keys], summed over lines
    v: Operand  # [64, 64]
    state: Operand  # [64, keys], of each warpgroup
    k_at: int
    v_at: int
    state_at: int
    o_at: int  # [64, 64], of each warpgroup that stores
    sum_at: int
    nbytes: int


@dataclass(frozen=True)
class WideConfig:
    """parts, segments: as those of `Sm90Config`. stages: of K and V, if there is room."""

    stages: int = 2
    parts: int = 1
    segments: int = 1
    chunk: int = ROWS

    def slices(self, D: int, Dv: int) -> int:
        """Return the number of blocks that split the columns of a sequence."""
        return -(-Dv // self.tiles(D).values)

    def tiles(self, D: int) -> WideTiles:
        halves = D > MOST_KEYS
        keys, values, stages = padded(D), CONSUMERS * BOX, self.stages
        if halves:
            keys, values, stages = padded(-(-D // CONSUMERS)), BOX, 1
        q_tile = Operand(self.chunk, CONSUMERS * keys if halves else keys, 2, 128, "k")
        v_tile = Operand(self.chunk, values, 2, 128, "mn")
        q, k = (Operand(self.chunk, keys, 2, 128, major) for major in ("k", "mn"))
        v, state = Operand(self.chunk, BOX, 2, 128, "mn"), Operand(BOX, keys, 2, 128, "k")
        sums = exchange_bytes(self.chunk * BOX // THREADS, 1, True) if halves else 0
        keys_and_values = q_tile.nbytes, stages * q_tile.nbytes, stages * v_tile.nbytes
        o = v_tile.nbytes  # o has as many columns as V
        ends = accumulate((*keys_and_values, CONSUMERS * state.nbytes, o, sums))
        return WideTiles(halves, keys, values, stages, q_tile, v_tile, q, k, v, state, *ends)

    def shared_bytes(self, D: int, Dv: int, decay_grad: bool = False) -> int:
        """Return the shared memory. The kernel for wide heads has no log_decay."""
        return self.tiles(D).nbytes


Config = Sm90Config | WideConfig


# --- arguments of the kernels -----------------------------------------------------------------------


class Loaded(NamedTuple):
    """Tensor maps of the arrays that a walk loads. As `apart`: 0 if all heads share the array, whose map then has one
    head; otherwise 1.
    """

    q: Any
    k: Any
    v: Any


LoadedWithY = namedtuple("LoadedWithY", (*Loaded._fields, "y"))  # of the walks of log_decay's gradient


class SegmentStates(NamedTuple):
    """The states with which the walks of all segments begin, and those that they leave."""

    initial: Any  # [B, H, D, Dv] of segment 0
    final: Any
    step: Any  # numbers from one segment's state to the next
    count: Any  # segments of a sequence that are walked, from the first one on


SEGMENT_STATES = types.NamedTuple((*[number_type(DTYPE, 4)] * 2, i64, i32), SegmentStates)


def loaded_types(kind: Any) -> tuple[Any, Any]:
    """Return the types of the maps and of `apart`."""
    maps, apart = (types.NamedUniTuple(each, len(kind._fields), kind) for each in (tensor_map, i32))
    return maps, apart


def loaded(problem: Problem, kind: Any, names: Sequence[str]) -> tuple[Any, Any]:
    """Return the maps of these arrays, and `apart`."""
    apart = (int(not is_shared(problem.arrays[name])) for name in names)
    return kind(*(f"{name}_map" for name in names)), kind(*apart)


def is_shared(meta: ArrayMeta) -> bool:
    """Whether all heads of [B, H, S, width] are one in memory."""
    return meta.shape[1] > 1 and meta.strides[1] == 0


def chunks_of(chunk: int, back: bool) -> Callable[..., Any]:
    """Return the verb (part, call) -> the number of chunks of segment number `part`, and the first token of the one
    that comes first. chunk: tokens of a chunk.
    """
    CHUNK = u32(chunk)  # unsigned divisions are faster

    @verb
    def chunks(part, call):
        before = i32(part * call.state_chunk)  # tokens of the segments before
        length = max(min(i32(call.rows - before), i32(call.state_chunk)), i32(0))
        last = i32((u32(call.rows) - u32(1)) // CHUNK * CHUNK)
        m0 = i32(last - before) if back else before
        return u32((length + (chunk - 1)) // chunk), m0

    return chunks


class DecayGrad(NamedTuple):
    """What log_decay's gradient needs of a pass."""

    rows: Any  # [B, H, S]
    states: Any  # [B, H, chunks * WARPS]
    rounded: Any  # the same sums, as they are part of `rows`


DECAY_GRAD = types.NamedUniTuple(number_type(DTYPE, 3), 3, DecayGrad)
