"""What dualops keeps from call to call can be given up between any two of them."""

import gc

from dualops.cuda.launch.operation import OPERATIONS
from dualops.cuda.lion import of_lists


def forget() -> None:
    """Give up all plans and tables, and whatever hung on them. Loaded kernels stay."""
    for directions in OPERATIONS.values():
        for operation in directions:
            operation.forget()
    of_lists.ready.clear()
    of_lists.bounds.clear()
    gc.collect()
