"""Products of a warpgroup whose left factor stays the same, or becomes probabilities while the product runs.

`register_a` reads the left factor from shared memory each time, or holds it in registers:

    product = register_a("bfloat16", a, b, held=True)      acc [64, b's lines] = A @ B.T
    words = product.words()
    product.take(words, smem, a_at, part)                  once, when A has arrived: my 64 rows, from 64 * `part` on
    product.start(acc, words, smem, a_at, b_at, part)      for each B, asynchronously
    product.wait_but_one(acc)

A product of 64 x 64 reads as many bytes of A as of B, and takes no longer than these reads. So if A has few columns,
holding it halves what products read.

`probs_at_once`, `probs_by_steps`: dv [64, Dv] += P.T @ dO, where scores become P.T in registers. All of P.T is
multiplied when it is there, or 16 queries at a time, overlapped with the exponentials of the next ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...compiler.backend import Members, cuda, i32, kept_noun, members, noun, u32, verb
from ...tile.a_fragment import WORDS as WORDS_OF_STEP, words_of_rows
from ...tile.swizzle import Operand
from ...tile.unrolled import local_array, one_after_another
from ...tile.warpgroup import ROWS, RegisterMma, register_mma, warpgroup_mma
from ..score_gradients import GradientOfKeys


@kept_noun
def register_a(
    dtype: str, a: Operand, b: Operand, *, held: bool, parts: bool = False, from_base: bool = False
) -> Members:
    """The verbs of "bfloat16" or "float16"; a and b in the layout "k". held: a thread has 2 registers for each 8
    columns of A. parts (unless held), from_base: as in `warpgroup_mma`; with from_base, `start` takes the base instead
    of smem.
    """
    shared, own = warpgroup_mma(dtype, a, b, parts, from_base=from_base), words_of_rows(a)
    registers = register_mma(dtype, b, from_base=from_base)
    SPAN, STEPS = a.span, own.steps
    WORDS = registers.words if held else 1

    @verb
    def take(words, smem, a_at, part):
        """Read the part of A that is held, if it is."""
        if held:
            first = own.first(i32(a_at + part * ROWS * SPAN), cuda.threadIdx.x)
            for step in range(STEPS):
                own.load(words, WORDS_OF_STEP * step, smem, first, step)

    @verb
    def start(acc, words, smem, a_at, b_at, part):
        """Start acc = A @ B.T."""
        if held:
            registers.add(acc, words, smem, b_at, i32(0))
        else:
            shared.start(acc, smem, a_at, b_at, part)

    return members(
        locals(),
        words=local_array(WORDS, u32),  # () -> for the part of A that is held
        size=shared.size,  # accumulators of a thread
        fragment=shared.fragment,  # () -> a local array for them
        wait_but_one=shared.wait_but_one,  # (acc)
        wait_but=shared.wait_but,  # (acc, count): all but the last `count` products, a constant
        wait=shared.wait,  # (acc)
    )


class Registers(NamedTuple):
    """What a thread has of dv, of packed P.T, and of scores, which become P * slope."""

    acc: Any
    packed: Any
    scores: Any


class Factor(NamedTuple):
    """The right factor, dO."""

    smem: Any
    at: Any  # where it begins
    adds: Any  # 0: dv is overwritten


@noun
def probs_at_once(gradient: GradientOfKeys, product: RegisterMma) -> Members:
    """The verbs of dv += P.T @ dO that compute all of P.T before one product starts."""

    @verb
    def add(registers, factor, given, kept, place):
        """registers: `Registers`. factor: `Factor`. The rest: of `gradient_of_keys`."""
        gradient.probabilities(registers.packed, registers.scores, given, kept, place)
        product.add(registers.acc, registers.packed, factor.smem, factor.at, factor.adds)

    # groups: of products that `add` starts; left: () -> what P.T is packed in
    return members(locals(), groups=1, left=product.left)


@noun
def probs_by_steps(gradient: GradientOfKeys, dtype: str, do: Operand) -> Members:
    """The same verbs. They start a product for each step of P.T, while the next steps are computed. Without dropout."""
    steps = [register_mma(dtype, do, some=(step,)) for step in range(do.steps)]
    left_a, left_b, left_c, left_d = (step.left for step in steps)

    @verb
    def left():
        return left_a(), left_b(), left_c(), left_d()

    def of_step(n: int) -> Callable[..., None]:
        make, product, LATER = gradient.steps[n], steps[n], int(n > 0)

        @verb
        def one(registers, factor, given_and_kept, place):
            given, kept = given_and_kept
            make((registers.packed[n], registers.scores), given, place, kept)
            product.add(registers.acc, registers.packed[n], factor.smem, factor.at, i32(factor.adds | LATER))

        return one

    all_steps = one_after_another([of_step(n) for n in range(len(steps))])

    @verb
    def add(registers, factor, given, kept, place):
        all_steps(registers, factor, (given, kept), place)

    return members(locals(), groups=len(steps))
