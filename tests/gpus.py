"""Several GPUs: processes share them."""

import os
from glob import glob

FILES = "/dev/nvidia[0-9]*"  # one for each GPU


def first_gpu(number: int) -> dict[str, str]:
    """Return the environment of process `number`: it sees all GPUs, the next process begins with the next one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(len(glob(FILES))))) if visible is None else visible.split(",")
    if len(names) < 2:
        return {}
    at = number % len(names)
    return {"CUDA_VISIBLE_DEVICES": ",".join([*names[at:], *names[:at]])}
