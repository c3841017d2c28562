"""dualops: GPU operators that exist twice, as NumPy to read and as Numba CUDA kernels to run.

dualops.spec          what each operator is
dualops.reference     NumPy, forward and gradient
dualops.cuda          kernels for arrays on a GPU (or in the simulator)
dualops.torch_bridge  autograd and torch.compile

Subpackages are imported on first use: `import dualops` loads neither numba nor torch.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"
_SUBPACKAGES = ("cuda", "reference", "spec", "torch_bridge")


def __getattr__(name: str) -> ModuleType:
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBPACKAGES])
