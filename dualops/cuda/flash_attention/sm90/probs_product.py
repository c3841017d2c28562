"""dv [64, Dv] += P.T @ dO, of scores that become P.T, in the registers of a warpgroup.

product = probs_at_once(gradient, pdo)              all of P.T is multiplied when it is there
product = probs_by_steps(gradient, dtype, do)       those of 16 queries, beside the exponentials of the next ones
packed = product.left()
product.add((dv_acc, packed, scores), (smem, do_at, adds), given, kept, (slots, lse_at))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...compiler.backend import Namespace, i32, verb
from ...tile.swizzle import Operand
from ...tile.unrolled import one_after_another
from ...tile.warpgroup import RegisterMma, register_mma
from ..gradient_of_keys import GradientOfKeys


class ProbsProduct(Namespace):
    """The verbs; `kept` and what is in `given` are as `gradient_of_keys` has them."""

    groups: int  # of products that `add` starts
    left: Callable[..., Any]  # () -> what P.T is packed in, which products have until they are waited for
    # (registers, factor, given, kept, place): registers dv_acc, packed and scores, which become P * slope; factor smem,
    # where dO begins, and 0 to have dv without what it was; place the shared array of lse and where mine begins
    add: Callable[..., None]


def probs_at_once(gradient: GradientOfKeys, product: RegisterMma) -> ProbsProduct:
    @verb
    def add(registers, factor, given, kept, place):
        acc, packed, scores = registers
        smem, do_at, adds = factor
        slots, at = place
        gradient.probabilities(packed, scores, given, kept, slots, at)
        product.add(acc, packed, smem, do_at, adds)

    return ProbsProduct(groups=1, left=product.left, add=add)


def probs_by_steps(gradient: GradientOfKeys, dtype: str, do: Operand) -> ProbsProduct:
    """Where no option weighs a probability."""
    steps = [register_mma(dtype, do, some=(step,)) for step in range(do.steps)]
    left_a, left_b, left_c, left_d = (step.left for step in steps)

    @verb
    def left():
        return left_a(), left_b(), left_c(), left_d()

    def of_step(n: int) -> Callable[..., None]:
        make, product, LATER = gradient.steps[n], steps[n], int(n > 0)

        @verb
        def one(registers, factor, given_and_kept, place):
            acc, packed, scores = registers
            smem, do_at, adds = factor
            given, kept = given_and_kept
            make((packed[n], scores), given, place, kept)
            product.add(acc, packed[n], smem, do_at, i32(adds | LATER))

        return one

    all_steps = one_after_another([of_step(n) for n in range(len(steps))])

    @verb
    def add(registers, factor, given, kept, place):
        all_steps(registers, factor, (given, kept), place)

    return ProbsProduct(groups=len(steps), left=left, add=add)
