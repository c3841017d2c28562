"""What an import costs: the spec and the references run where neither numba nor torch is installed."""

import pytest

from tests.processes import printed, python

# everything outside the standard library but what is named; `dualops` itself is found by its path
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {allowed}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize("package", ["dualops.spec", "dualops.reference", "dualops.testing"])
def test_needs_numpy_and_ml_dtypes_alone(package):
    program = BLOCKED.format(allowed={"dualops", "numpy", "ml_dtypes"}) + f"import {package}"
    printed("-c", program)


def test_the_blocker_blocks():
    done = python("-c", BLOCKED.format(allowed={"dualops", "numpy"}) + "import dualops.spec")
    assert done.returncode != 0
    assert "ml_dtypes is blocked" in done.stderr


def test_import_dualops_loads_neither_numba_nor_torch():
    program = """
import sys
import dualops
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"numba", "torch", "numpy", "ml_dtypes", "cuda"}))
"""
    assert printed("-c", program).split() == []


def test_subpackages_load_on_first_use_and_stay_modules():
    program = """
import sys, types
import dualops
assert dualops.spec.softmax.name == "softmax"
assert isinstance(dualops.spec, types.ModuleType) and dualops.spec is sys.modules["dualops.spec"]
assert callable(dualops.reference.softmax) and callable(dualops.reference.softmax)
assert not {"numba", "torch"} & set(sys.modules)
assert dir(dualops) == ["__version__", "block_mask", "cuda", "reference", "spec", "testing", "torch_bridge"]
try:
    dualops.softmax
except AttributeError as error:
    print(error)
"""
    assert printed("-c", program).strip() == "module 'dualops' has no attribute 'softmax'"
