"""Products of small matrices by the tensor cores, in the registers of a warp (sm_80 and later).

d [16, 8] += a [16, K] @ b [K, 8]. `tile.fragment` says which lane and register holds which element.
"""

from __future__ import annotations

from itertools import chain

import ml_dtypes
import numpy as np

from ..simulator import added_at_once, exchange, rounded_sums
from .asm import family, instruction


@family(dtype=("bf16", "f16"))
def mma_m16n8k16(dtype):
    """d += a @ b for 16-bit factors, two per word; sums in float32."""
    number = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[dtype]

    @instruction(
        "(+f32[4][i32], u32[4][i32], u32[2][i32]) -> void",
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{d}}, {{a}}, {{b}}, {{d}};",
        section="9.7.14.5.14",
        convergent=True,
        name=f"mma_m16n8k16_f32_{dtype}",
    )
    def product(d, d_index, a, a_index, b, b_index):
        """Multiply 16 columns of a."""

        def factors(a_words, b_words):
            # words [line, quad, half of K, half of M] and [line, quad, half of K], with two neighbours along K each
            a_parts = a_words.view(number).reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4)
            b_parts = b_words.view(number).reshape(8, 4, 2, 2).transpose(2, 1, 3, 0)
            return a_parts.reshape(16, 16), b_parts.reshape(16, 8)

        _multiply(f"mma.m16n8k16.{dtype}", factors, d, d_index, a, a_index, b, b_index)

    return product


@instruction(
    "(+f32[4][i32], u32[4][i32], u32[2][i32]) -> void",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {d}, {a}, {b}, {d};",
    section="9.7.14.5.14",
    convergent=True,
)
def mma_m16n8k8_tf32(d, d_index, a, a_index, b, b_index):
    """d += a @ b for float32 factors whose lowest 13 bits are ignored; sums in float32."""

    def factors(a_words, b_words):
        a_parts, b_parts = ((words & 0xFFFFE000).view(np.float32) for words in (a_words, b_words))
        a_parts = a_parts.reshape(8, 4, 2, 2).transpose(3, 0, 2, 1)
        return a_parts.reshape(16, 8), b_parts.reshape(8, 4, 2).transpose(2, 1, 0).reshape(8, 8)

    _multiply("mma.m16n8k8.tf32", factors, d, d_index, a, a_index, b, b_index)


def _multiply(name, factors, d, d_index, a, a_index, b, b_index):
    """Collect the registers of all lanes; the lane that continues first computes for all."""
    mine = _Lane(d.some(d_index, 4), a.some(a_index, 4), b.some(b_index, 2))
    lanes = exchange(name, mine, 0xFFFFFFFF)
    if not mine.results:
        a_words = _gathered([lane.a for lane in lanes], np.uint32)
        b_words = _gathered([lane.b for lane in lanes], np.uint32)
        rows, columns = (part.astype(np.float64) for part in factors(a_words, b_words))
        before = _gathered([lane.d for lane in lanes], np.float32)
        sums = before.reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
        for some in added_at_once(len(columns)):
            sums = rounded_sums(rows[:, some] @ columns[some] + sums)
        results = list(sums.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(128))
        for number, lane in enumerate(lanes):
            lane.results = results[4 * number : 4 * number + 4]
    d.put(d_index, mine.results)


def _gathered(registers, dtype):
    """Return the registers of all lanes, one lane after the other; reading NumPy's numbers one by one is faster."""
    return np.fromiter(chain.from_iterable(registers), dtype)


class _Lane:
    """A lane's registers before the product, and its results."""

    __slots__ = ("a", "b", "d", "results")

    def __init__(self, d, a, b):
        self.d, self.a, self.b, self.results = d, a, b, []
