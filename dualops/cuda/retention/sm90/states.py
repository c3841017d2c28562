"""Positions of a warpgroup's accumulators; a state that it carries from chunk to chunk; the rounding errors of scores.

A thread has rows r and r + 8 of accumulators [64, 8 * n], in quads of two neighbours of the one and two of the other
(`tile.fragment.accumulator`).

`fragments_of` moves states from and to memory. `state_smem` writes a state, rounded, to shared memory as a right
factor:

    carry = state_smem(tile, at)                  acc of all warpgroups
    carry.put(smem, acc)

P is rounded to 16 bits for P @ V. With many tokens the errors of the scores average out below the rounding of o. A head
that forgets at once sees the last few tokens. Then each error counts: in one draw of five, o is off by more than twice
its own rounding. So `diagonal_residual` multiplies the errors of the 16 x 16 pairs of a warp's own tokens too. The warp
does so alone, because the products of a warpgroup have no registers left:

    o [16, Dv] += (P - rounded P) [16, 16] @ V [16, Dv]          mma.sync, V by ldmatrix from its boxes
"""

from __future__ import annotations

from ...compiler.backend import Members, cuda, f32, i32, i64, kept_noun, members, noun, u32, verb
from ...ptx.convert import pack_bf16x2, unpack_bf16x2
from ...ptx.matrices import ldmatrix
from ...ptx.memory import ld_shared_b32
from ...ptx.mma import mma_m16n8k16
from ...tile.epilogue import opaque_f32, put_matrices
from ...tile.products import opaque_i32, recomputed_i32
from ...tile.rows import FULL_WARP, shfl_idx_i32
from ...tile.swizzle import Operand
from ...tile.unrolled import local_array, unrolled
from ...tile.warpgroup import ROWS, my_warpgroup
from .config import BOX, DTYPE


@verb
def my_thread_again():
    """Return the thread's number. Registers keep nothing computed from it between chunks."""
    return recomputed_i32(i32(cuda.threadIdx.x))


@verb
def row_of(tid):
    """Return the upper one of a thread's two rows."""
    tid = u32(tid)  # unsigned divisions are faster
    return i32(tid % u32(128) // u32(32) * u32(16) + tid % u32(32) // u32(4))


@verb
def column_of(tid):
    """Return the first of a thread's columns."""
    return i32(u32(2) * (u32(tid) % u32(4)))


@verb
def my_row():
    return row_of(cuda.threadIdx.x)


@verb
def my_column():
    return column_of(cuda.threadIdx.x)


@verb
def place_of(row, element):
    """Return row and column of an element of my accumulators. row: the warpgroup's first one."""
    return i32(row + my_row() + element // 2 % 2 * 8), i32(element // 4 * 8 + my_column() + element % 2)


@kept_noun
def fragments_of(columns: int, transposed: bool = False) -> Members:
    """The verbs for a state of `columns` columns; transposed: acc has the state's columns as rows."""
    (DOWN, ALONG), SIZE, BOXES = (3, 2) if transposed else (2, 3), BOX // 2, columns // BOX

    @verb
    def _take(values, acc, box):
        """Registers have fixed numbers: one box at a time. Opaque values keep the compiler from indexing them."""
        for n in range(BOXES):
            if n == box:
                for e in range(SIZE):
                    values[e] = opaque_f32(acc[n * SIZE + e])

    @verb
    def _put(acc, values, box):
        for n in range(BOXES):
            if n == box:
                for e in range(SIZE):
                    acc[n * SIZE + e] = opaque_f32(values[e])

    @verb
    def _move(acc, state, segment, step, first, limits, loads):
        b, h, part = segment
        place = i64(b) * state.strides[0] + i64(h) * state.strides[1] + part * step
        mine, box = i32(cuda.threadIdx.x), i32(0)
        # mine, but registers keep nothing computed from it until then
        tid = shfl_idx_i32(mine, i32(u32(mine) % u32(32)), FULL_WARP)
        d, column = i32(first[0] + row_of(tid)), i32(first[1] + column_of(tid))
        values = cuda.local.array(SIZE, f32)
        while box < BOXES:
            _take(values, acc, box)
            for j in range(BOX // 8):
                for half in range(2):
                    for e in range(2):
                        along = i32(column + BOX * box + 8 * j + e)
                        if d + 8 * half < limits[0] and along < limits[1]:
                            at = place + i64(d + 8 * half) * state.strides[DOWN] + i64(along) * state.strides[ALONG]
                            if loads:
                                values[4 * j + 2 * half + e] = state.data[at]
                            else:
                                state.data[at] = values[4 * j + 2 * half + e]
            if loads:
                _put(acc, values, box)
            box = opaque_i32(box + 1)

    @verb
    def load(acc, states, segment, first, limits):
        """Load the initial state of a segment, zeros beyond its rows and columns.

        states: `SegmentStates`. segment: batch, head and number. first: row and column of acc[0].
        """
        _move(acc, states.initial, segment, states.step, first, limits, True)

    @verb
    def store(states, acc, segment, first, limits):
        """Store the final state of a segment, nothing beyond its rows and columns."""
        _move(acc, states.final, segment, states.step, first, limits, False)

    return locals()


SPAN = 2 * BOX  # bytes of a line of a box


@verb
def rest(less):
    """Return a rounding error; 0 if it is not finite."""
    return less if less == less else f32(0)


@noun
def state_smem(tile: Operand, at: int, *, recompute: bool = False) -> Members:
    """The verbs for a tile of bfloat16 at this byte, 64 lines of each warpgroup. `recompute`: see `put_matrices`."""
    put, boxes, box_bytes, size = put_matrices(DTYPE, BOX, recompute=recompute), tile.width // BOX, tile.box, BOX // 2

    @unrolled(range(boxes))
    def _put_boxes(smem, first, acc, values, box):
        for e in range(size):
            values[e] = acc[box * size + e]
        put(smem, i32(first + box * box_bytes), values)

    @verb
    def put_to(smem, first, acc):
        """Write acc to 64 lines from this byte on. Same conditions as for `put`."""
        _put_boxes(smem, first, acc, cuda.local.array(size, f32))

    @verb
    def put_(smem, acc):
        """Write acc to the tile. Called by a warpgroup when no product reads the old numbers; then a barrier comes
        before products that read the new ones.
        """
        put_to(smem, i32(at + my_warpgroup() * ROWS * SPAN), acc)

    @verb
    def number(room, line, column):
        """Return a number of the tile, as float32. room: shared memory, and where the tile begins."""
        smem, first = room
        byte = i32(column % BOX * 2)
        place = i32(first + column // BOX * box_bytes + line * SPAN + ((byte & ~3) ^ (line & 7) << 4))
        low, high = unpack_bf16x2(ld_shared_b32(smem, place))
        return high if column % 2 == 1 else low

    return locals()


# --- rounding errors --------------------------------------------------------------------------------

OWN = 16  # tokens of a warp
WORDS = 4  # of a thread, for 16 x 16 pairs


@kept_noun
def diagonal_residual(v: Operand) -> Members:
    """The verbs for V in boxes of bfloat16, 16 tokens for each warp. Called by a warpgroup."""
    load, multiply, STEPS = ldmatrix(4, True), mma_m16n8k16("bf16"), v.lines // OWN

    @verb
    def _my_warp():
        """Return my warp's number among those that share V's tokens."""
        return i32(u32(my_thread_again()) // u32(32) % u32(STEPS))

    @verb
    def keep(words, scores):
        """Compute the errors of packing the scores of my warp's own tokens."""
        warp = _my_warp()
        for own in range(STEPS):
            if own == warp:
                for word in range(WORDS):
                    at = WORDS * own + word
                    low, high = unpack_bf16x2(pack_bf16x2(scores[2 * at], scores[2 * at + 1]))
                    words[word] = pack_bf16x2(rest(scores[2 * at] - low), rest(scores[2 * at + 1] - high))

    @verb
    def add(o, words, smem, v_at):
        """Add the product of the errors and V to o, after o's own products."""
        lane = i32(u32(my_thread_again()) % u32(32))
        line = v_at + (OWN * _my_warp() + lane % OWN) * SPAN
        right = cuda.local.array(WORDS, u32)
        for column in range(0, v.width, OWN):
            byte = 2 * (column % BOX) + lane // OWN * 16
            load(right, 0, smem, i32(line + column // BOX * v.box + (byte ^ (lane % 8) << 4)))
            multiply(o, column // 2, words, 0, right, 0)
            multiply(o, column // 2 + 4, words, 0, right, 2)

    return members(locals(), words=local_array(WORDS, u32))
