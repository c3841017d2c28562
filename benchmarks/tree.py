"""`spec`, `reference` and `testing` of the tree that this suite lies in, whichever commit of dualops is being timed.

asv runs one suite against many commits, and names a benchmark's case to the child process by its position. So the
cases must be the same list at every commit, and so must their data and what counts as right: `dualops` itself, as a
benchmark imports it, is the commit's; these are not.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
_NAME = "dualops_of_the_suite"


def _load() -> ModuleType:
    folder = ROOT / "dualops"
    found = spec_from_file_location(_NAME, folder / "__init__.py", submodule_search_locations=[str(folder)])
    if found is None or found.loader is None:
        raise ImportError(f"no package dualops in {ROOT}")
    module = module_from_spec(found)
    sys.modules[_NAME] = module
    found.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from dualops import reference, spec, testing
    from dualops.testing import terms, truth
else:
    _load()
    spec = import_module(f"{_NAME}.spec")
    reference = import_module(f"{_NAME}.reference")
    testing = import_module(f"{_NAME}.testing")
    terms = import_module(f"{_NAME}.testing.terms")
    truth = import_module(f"{_NAME}.testing.truth")

__all__ = ["ROOT", "reference", "spec", "terms", "testing", "truth"]
