"""dualops: GPU operators, each written twice: as NumPy to read and as a Numba CUDA kernel to run.

dualops.spec          what each operator is
dualops.reference     NumPy, forward and gradient
dualops.cuda          kernels for arrays on a GPU (or in the simulator)
dualops.torch_bridge  autograd and torch.compile
dualops.testing       compares your own kernels with the references
dualops.block_mask    lists the tiles that attention's mask_mod leaves visible, for arrays of any library

Subpackages are imported on first use: `import dualops` loads neither numba nor torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import cuda as cuda, reference as reference, spec as spec, testing as testing, torch_bridge as torch_bridge

__version__ = "0.1.0"
_SUBPACKAGES = ("cuda", "reference", "spec", "testing", "torch_bridge")


def block_mask(mask_mod: Any, B: int | None, H: int | None, Sq: int, Sk: int, *, like: Any) -> Any:
    """Build a block mask for arrays of the library of `like`: by `torch_bridge`, by `reference` for NumPy, else
    `cuda`."""
    library = type(like).__module__.partition(".")[0]
    package = {"torch": "torch_bridge", "numpy": "reference"}.get(library, "cuda")
    return import_module(f"{__name__}.{package}").block_mask(mask_mod, B, H, Sq, Sk, like=like)


if not TYPE_CHECKING:  # type checkers would accept any name as a subpackage

    def __getattr__(name: str) -> ModuleType:
        if name in _SUBPACKAGES:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names. Omits torch_bridge if torch is missing, since a shell imports each name that it
    completes."""
    subpackages = [name for name in _SUBPACKAGES if name != "torch_bridge" or find_spec("torch")]
    return ["__version__", "block_mask", *subpackages]
