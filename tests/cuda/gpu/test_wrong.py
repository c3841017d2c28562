"""The broken kernels whose mistake shows on a GPU every time, and does no harm there, are rejected there too."""

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from cuda.core import LaunchConfig, ObjectCode, Stream, launch as core_launch

from dualops.cuda.compiler.backend import Kernel
from dualops.cuda.compiler.compile import compile_kernel
from dualops.cuda.launch import device
from tests.cuda.gpu.library import TORCH
from tests.wrong.broken import BROKEN, RIGHT
from tests.wrong.rejection import rejections


@cache
def loaded(kernel: Kernel) -> Any:
    """Compiled now: the cubins that are kept know nothing of changes to these kernels."""
    made = compile_kernel(kernel, device.current().arch)
    return ObjectCode.from_cubin(made.cubin).get_kernel(made.entry)


def launch(kernel: Kernel, blocks: int, arrays: dict[str, Any], columns: int, strides: list[int]) -> None:
    if blocks:
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        pointers = [array.data_ptr() for array in arrays.values()]
        config = LaunchConfig(grid=blocks, block=kernel.threads)
        core_launch(stream, config, loaded(kernel), *pointers, np.int32(columns), *strides)


@pytest.mark.parametrize("name", [name for name, kernel in BROKEN.items() if kernel.on_gpu])
def test_rejected(name):
    kernel, reasons = BROKEN[name], []
    for reason in rejections(kernel.build, launch, backward=kernel.backward, blocks=kernel.blocks, library=TORCH):
        if re.search(kernel.reason, reason):
            return
        reasons.append(reason)
    pytest.fail(f"{name} was not rejected for {kernel.reason!r}, but {len(reasons)} times otherwise: {reasons[:3]}")


@pytest.mark.parametrize(("build", "backward"), RIGHT.values(), ids=RIGHT)
def test_what_is_right_passes(build, backward):
    assert list(rejections(build, launch, backward=backward, library=TORCH)) == []
