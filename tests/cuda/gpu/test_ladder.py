"""softmax's ladder on a GPU: every step, up to the longest rows that it does. The simulator has every dtype."""

from functools import partial

import pytest

from dualops.cuda.tile.storage import storage
from dualops.spec import OPERATORS, Case
from examples.ladder.softmax import STEPS, run_step
from tests.checks import check
from tests.cuda.gpu.library import NUMBA, TORCH, same_bits, tensor
from tests.problems import values

SPEC = OPERATORS["softmax"]
COLUMNS = (1, 31, 256, 1000, 4097, 8192, 16384, 50000, 65536, 300000)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", STEPS)
def test_step(name, dtype):
    configure, vector = STEPS[name].configure, storage(dtype).vector
    served = [columns for columns in COLUMNS if configure(columns, dtype, columns % vector == 0) is not None]
    assert len(served) >= 3
    for columns in served:
        case = Case("ladder", dtype, {"x": (70 if columns < 5000 else 3, columns)})
        check(SPEC, case, partial(run_step, name), library=TORCH, ways=("given", "allocated", "in place"))
        check(SPEC, case, partial(run_step, name), library=TORCH, ways=("given",), special=True)


@pytest.mark.parametrize("name", STEPS)
def test_numba_device_arrays(name):
    check(SPEC, Case("ladder", "float32", {"x": (9, 1024)}), partial(run_step, name), library=NUMBA)


@pytest.mark.parametrize("name", STEPS)
def test_a_hundred_runs_give_the_same_bits(name):
    x = tensor(values(SPEC, Case("ladder", "bfloat16", {"x": (1000, 4096)}))["x"])
    first = run_step(name, x)
    assert all(same_bits(run_step(name, x), first) for _ in range(100))
