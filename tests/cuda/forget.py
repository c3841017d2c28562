"""What dualops keeps from call to call can be given up between any two of them."""

from __future__ import annotations

import gc

from dualops.cuda import maps
from dualops.cuda.launch import OPERATIONS
from dualops.cuda.lion import of_lists


def forget() -> None:
    """Give up all plans, tables and tensor maps, and whatever hung on them. Loaded kernels stay."""
    for directions in OPERATIONS.values():
        for operation in directions:
            operation.forget()
    maps.forget()
    of_lists.ready.clear()
    of_lists.bounds.clear()
    gc.collect()
