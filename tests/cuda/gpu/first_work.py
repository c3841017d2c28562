"""The first GPU work of a process is done in another thread than the one that made the arrays.

    python -m tests.cuda.gpu.first_work softmax gradient    # the bridge, backward in torch's own thread
    python -m tests.cuda.gpu.first_work softmax thread      # dualops.cuda with torch tensors, in a thread
    python -m tests.cuda.gpu.first_work softmax numba       # the same with Numba device arrays

The same call in the main thread, after it, must give the same bits. Exit code 1 and a traceback for what goes wrong.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from dualops.spec import OPERATORS


def elsewhere(call: Callable[[], Any]) -> Any:
    """What a call gives in a thread of its own."""
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def gradient(name: str, device: str = "cuda") -> bool:
    """By `torch.autograd.grad`, whose backward is not in this thread on a GPU."""
    from tests.torch_bridge.operators import bridge_call, same_bits

    call = bridge_call(name, device)
    first = call.gradient()
    return same_bits(first, call.gradient())


def thread(name: str, device: str = "cuda") -> bool:
    """A plain call, with torch tensors that exist already."""
    import torch

    import dualops.cuda
    from tests.checks import call as called
    from tests.torch_bridge.operators import bridge_call, same_bits

    made = bridge_call(name, device)
    tensors = {key: x.detach() for key, x in made.tensors.items()}
    function = getattr(dualops.cuda, name)

    def run() -> tuple[torch.Tensor, ...]:
        own = {key: x.clone() for key, x in tensors.items()}  # some are overwritten
        results = called(function, made.spec.inputs, own, **made.case.params)
        return results if isinstance(results, tuple) else (results,)

    own = {key: x.clone() for key, x in tensors.items()}  # nothing of torch's comes first in the thread
    results = elsewhere(lambda: called(function, made.spec.inputs, own, **made.case.params))
    return same_bits(results if isinstance(results, tuple) else (results,), run())


def numba(name: str) -> bool:
    """A plain call, with arrays that Numba has put there."""
    from numba import cuda

    import dualops.cuda
    from tests.checks import call as called
    from tests.problems import values
    from tests.torch_bridge.operators import bridge_call

    spec, case = OPERATORS[name], bridge_call(name, "cpu").case
    function = getattr(dualops.cuda, name)

    def uploaded() -> dict[str, Any]:
        return {key: cuda.to_device(np.array(array, order="C")) for key, array in values(spec, case).items()}

    def run(arrays: dict[str, Any]) -> tuple[Any, ...]:
        results = called(function, spec.inputs, arrays, **case.params)
        return results if isinstance(results, tuple) else (results,)

    arrays = uploaded()
    first = [x.copy_to_host() for x in elsewhere(lambda: run(arrays))]
    second = [x.copy_to_host() for x in run(uploaded())]
    return all(one.tobytes() == two.tobytes() for one, two in zip(first, second, strict=True))


if __name__ == "__main__":
    operator, way = sys.argv[1:]
    if not {"gradient": gradient, "thread": thread, "numba": numba}[way](operator):
        sys.exit(f"{operator}: other bits in another thread")
