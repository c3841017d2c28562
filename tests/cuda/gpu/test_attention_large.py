"""Large finite scores on a GPU, on the rungs of tensor cores and on the one that a call takes by itself."""

import pytest

from tests.cuda.gpu.library import tensor
from tests.cuda.large_scores import CALLS, Shape, check, drawn

PLACES = [("sm90", "bfloat16"), ("sm90", "float16"), ("sm90", "float32"), ("sm80", "bfloat16"), (None, "float32")]
WIDE, NARROW = Shape(128, 190, 260), Shape(64, 300, 700)
LEFT_OUT = {
    ("sm90", "float32"): ("ones", "few_queries"),  # for which it has no kernel
    ("sm80", "bfloat16"): ("by_1e15_window", "score_mod", "softcap_1e10"),  # whose kernels differ before the softmax
}
HALF = ("by_1e3", "padded_rows", "sink_max", "sink_tiny_scale")  # of calls whose numbers float16 holds
TWO_WIDTHS = ("by_1e3", "by_30_causal", "padded_rows")
TRIALS = [
    (call, rung, dtype, shape)
    for call in CALLS
    for rung, dtype in PLACES
    if (call.name in HALF if dtype == "float16" else call.name not in LEFT_OUT.get((rung, dtype), ()))
    for shape in ((WIDE, NARROW) if (rung, dtype) == ("sm90", "bfloat16") and call.name in TWO_WIDTHS else (WIDE,))
]


@pytest.mark.parametrize(
    ("call", "rung", "dtype", "shape"), TRIALS, ids=[f"{t[0].name}-{t[1]}-{t[2]}-{t[3].D}" for t in TRIALS]
)
def test_large_scores(call, rung, dtype, shape):
    check(*drawn(call, dtype, shape), rung, finite=call.finite, put=tensor)
