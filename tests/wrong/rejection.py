"""Check a kernel of this folder with many shapes, dtypes, layouts and special values, and collect the rejections."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from dualops.cuda.compiler.backend import Kernel
from dualops.cuda.simulator import Deadlock
from dualops.spec import OPERATORS, Case
from dualops.spec.meta import FLOATS
from tests.checks import NUMPY, Library, Rejected, check
from tests.problems import Layout

# one warp's worth, less, a tail, no tail, one column, one row
SHAPES = ((3, 67), (2, 20), (3, 200), (2, 128), (4, 1), (9, 1), (1, 500))
LAYOUTS = {
    "dense": Layout.dense(2),
    "padded": Layout((0, 1), (0, 5)),
    "off by one": Layout((0, 1), (0, 0), misalignment=1),
}
PADDED_BACKWARD = Layout((0, 1), (0, 3))

# (kernel, blocks, arrays by name, N, strides between rows): runs it
Launch = Callable[[Kernel, int, dict[str, Any], int, list[int]], None]


def rejections(
    build: Callable[[str], Kernel],
    launch: Launch,
    *,
    backward: bool = False,
    blocks: Callable[[int], int] = lambda rows: rows,
    library: Library = NUMPY,
    dtypes: Sequence[str] = FLOATS,
) -> Iterator[str]:
    """Yield the checker's message for each call that it rejects."""
    for number, (shape, dtype) in enumerate(product(SHAPES, dtypes)):
        for layout in [PADDED_BACKWARD] if backward else LAYOUTS.values():
            for seed, special in enumerate((False, True, True)):
                case = Case("wrong", dtype, {"x": shape}, seed=3 * number + seed)
                run = _function(build(dtype), launch, blocks, library)
                names: list[str] = ["y", "dy"] if backward else ["x"]
                try:
                    check(
                        OPERATORS["softmax"],
                        case,
                        run,
                        backward=backward,
                        library=library,
                        layouts=dict.fromkeys(names, layout),
                        out_layout=layout,
                        special=special,
                        ways=("given",),
                    )
                except (Rejected, IndexError, Deadlock, RuntimeError) as error:
                    yield f"{type(error).__name__}: {error}"


def _function(kernel: Kernel, launch: Launch, blocks: Callable[[int], int], library: Library) -> Callable[..., Any]:
    def softmax(x: Any, *, out: Any) -> None:
        rows, columns = out.shape
        strides = [library.strides(out)[0], library.strides(x)[0]]
        launch(kernel, blocks(rows), {"y": out, "x": x}, columns, strides)

    def softmax_backward(y: Any, dy: Any, *, out: Any) -> None:
        rows, columns = out.shape
        launch(kernel, blocks(rows), {"dx": out, "y": y, "dy": dy}, columns, [library.strides(out)[0]])

    return softmax_backward if len(kernel.argtypes) == 5 and kernel.threads == 32 else softmax
