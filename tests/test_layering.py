"""The import law: which package may import which, checked on the source of every module.

All imports count: relative and absolute, inside functions, under TYPE_CHECKING, and `import_module("...")` with a
literal name. A module that no row names is a violation too, so that a new package gets its row.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest

from dualops.spec import OPERATORS

ROOT = Path(__file__).parent.parent
NUMBERS = ("numpy", "ml_dtypes")
TOOLKIT = ("cuda.bindings", "cuda.core")
SIZES = "dualops.cuda.launch.sizes"
OFFLINE = "dualops.cuda.compiler.offline"
DECLARED = "dualops.cuda.public"
CACHE = "dualops.cuda.compiler.cache"
COMPILER, LAUNCH, TUNE = "dualops.cuda.compiler", "dualops.cuda.launch", "dualops.cuda.tuning"
HOST = (
    f"{COMPILER}.backend",
    *(f"{LAUNCH}.{name}" for name in ("device", "driver", "arrays")),
    *(f"{COMPILER}.{name}" for name in ("compile", "binaries")),
)
FRONTEND, HELPERS, SOURCES, BUNDLED = (f"{COMPILER}.{name}" for name in ("frontend", "helpers", "sources", "bundled"))
STEPS = ("device_memory", "step", "device_words", "tensor_map", "plans", "operation")
HOST_OF_OPERATORS = (*HOST, *(f"{LAUNCH}.{name}" for name in STEPS))
TUNED, TUNING = (f"{TUNE}.{name}" for name in ("records", "tune"))
VIEWS, ROW_WALK = "dualops.cuda.launch.views", "dualops.cuda.row_walk"


@dataclass(frozen=True)
class Row:
    """One row of the law.

    modules: whom it binds. ours: which of our modules they may import, in addition to each other in their own package.
    outside: which others, in addition to the standard library. A name ends in `.*` if what lies below it is meant too;
    outside names always mean what lies below, except that `numba.cuda` is never part of `numba`. None allows all but
    the tests.
    """

    modules: str
    ours: tuple[str, ...] | None
    outside: tuple[str, ...] | None


SPEC, TILE, PTX = "dualops.spec.*", "dualops.cuda.tile.*", "dualops.cuda.ptx.*"
SIMULATOR, BACKEND, ROOF = "dualops.cuda.simulator.*", "dualops.cuda.compiler.backend", "dualops.cuda.tuning.roof"
COST = "dualops.estimate"
ESTIMATED = ("flash_attention", "matmul", "retention")
MACHINE, PUBLIC = "dualops.machine", ("dualops", "dualops.reference", "dualops.cuda")
TESTING = "dualops.testing.*"
UNOWNED = "dualops.cuda.unowned"
OF_OPERATORS = (SPEC, PTX, TILE, VIEWS, ROW_WALK, UNOWNED, *HOST_OF_OPERATORS)
# kernels that operators share: a package of their own, which no other operator may import
ROWS = "dualops.cuda.rows.*"
SHARED: dict[str, tuple[str, ...]] = {
    "softmax": (ROWS,),
    "rms_norm": ("dualops.cuda.norm",),
    "layer_norm": ("dualops.cuda.norm",),
    "flash_attention": ("dualops.cuda.user_functions",),
}

LAW = (
    # for type checkers; when it runs, each on first use: tests/spec/test_import.py
    Row("dualops", tuple(f"dualops.{name}" for name in ("cuda", "reference", "spec", "testing", "torch_bridge")), ()),
    Row(MACHINE, (), ()),
    Row(SPEC, (), NUMBERS),
    Row("dualops.reference.*", (SPEC,), NUMBERS),
    Row(TESTING, (SPEC, "dualops.reference.*"), NUMBERS),
    # the road to the GPU, from the bottom up
    *(Row(room, (), ()) for room in (COMPILER, LAUNCH, TUNE)),
    Row(SIMULATOR, (), (*NUMBERS, "numba", "greenlet")),
    Row(SIZES, (), ()),
    Row(BACKEND, (MACHINE, SIMULATOR, SIZES), (*NUMBERS, *TOOLKIT, "numba", "numba.cuda")),
    # `intrinsic` and libdevice are how an instruction is declared; all else of numba.cuda comes from the backend
    Row(PTX, (SIMULATOR, BACKEND), (*NUMBERS, "llvmlite", "numba", "numba.cuda.extending", "numba.cuda.libdevice")),
    Row(TILE, (BACKEND, PTX), NUMBERS),
    Row(VIEWS, (SPEC, BACKEND, TILE), ()),
    Row(ROW_WALK, (SPEC, BACKEND, "dualops.cuda.launch.arrays", VIEWS), ()),
    Row("dualops.cuda.launch.device", (SPEC, SIMULATOR, BACKEND), (*NUMBERS, *TOOLKIT)),
    Row("dualops.cuda.launch.driver", (SIMULATOR, *HOST[:2]), TOOLKIT),
    Row("dualops.cuda.launch.arrays", (SPEC, SIMULATOR, *HOST[:3]), (*NUMBERS, *TOOLKIT)),
    # the one package that knows Numba's compiler from inside
    Row("dualops.cuda.compiler.frontend.*", (BACKEND,), ("llvmlite", "numba", "numba.cuda")),
    Row("dualops.cuda.compiler.helpers", (SPEC,), ()),
    Row(CACHE, (), ("platformdirs",)),
    Row(SOURCES, (), ()),
    Row(BUNDLED, ("dualops", CACHE), ()),
    Row("dualops.cuda.compiler.compile", (*HOST[:2], FRONTEND), TOOLKIT),
    Row("dualops.cuda.compiler.binaries", (*HOST[:2], HOST[4], SOURCES, BUNDLED, HELPERS, CACHE), TOOLKIT),
    Row("dualops.cuda.launch.device_memory", HOST[:4], ()),
    Row("dualops.cuda.launch.tensor_map", (SPEC, SIMULATOR, *HOST[:3]), (*NUMBERS, *TOOLKIT)),
    Row("dualops.cuda.launch.step", (SPEC, SIMULATOR, SIZES, *HOST), (*NUMBERS, *TOOLKIT)),
    Row(
        "dualops.cuda.launch.device_words",
        (BACKEND, "dualops.cuda.launch.device", TILE, "dualops.cuda.launch.step"),
        (),
    ),
    Row(
        "dualops.cuda.launch.plans",
        (SPEC, SIZES, *HOST, "dualops.cuda.launch.tensor_map", "dualops.cuda.launch.step"),
        (),
    ),
    Row(UNOWNED, (SPEC, TILE, VIEWS, *HOST, "dualops.cuda.launch.step", "dualops.cuda.launch.plans"), ()),
    Row(TUNED, (SPEC, *HOST, CACHE, "dualops.cuda.launch.plans"), ()),
    Row(
        "dualops.cuda.launch.operation",
        (SPEC, SIMULATOR, *HOST, "dualops.cuda.launch.step", "dualops.cuda.launch.plans", TUNED),
        NUMBERS,
    ),
    Row(TUNING, (SPEC, *HOST, "dualops.cuda.launch.plans", TUNED, "dualops.cuda.launch.operation"), ()),
    Row(OFFLINE, (SPEC, *HOST_OF_OPERATORS), ()),
    Row(DECLARED, (SPEC,), ()),
    *(Row(f"dualops.cuda.{op}.*", (*OF_OPERATORS, DECLARED, *SHARED.get(op, ())), NUMBERS) for op in OPERATORS),
    Row(ROWS, OF_OPERATORS, NUMBERS),
    *(Row(f"{family}.*", (*OF_OPERATORS, ROWS), NUMBERS) for family in sorted({*chain(*SHARED.values())} - {ROWS})),
    # measures with a kernel of its own, so it stands above launching, next to the operators
    Row(ROOF, (SPEC, TILE, *HOST_OF_OPERATORS), NUMBERS),
    # knows operators' Configs and what their kernels do; nothing but the command line and `dualops.cuda` knows it
    Row(
        f"{COST}.*",
        (SPEC, TILE, "dualops.cuda", *HOST_OF_OPERATORS, OFFLINE, ROWS,
         *(f"dualops.cuda.{name}.*" for name in ESTIMATED)),
        NUMBERS,
    ),
    Row("dualops.cuda", (SPEC, "dualops.cuda.*", f"{COST}.ranking"), ()),
    # other libraries' places: the bridge, and the library itself
    Row("dualops.torch_bridge.integrations.*", ("dualops.torch_bridge.*",), ("torch", "transformers")),
    # host functions only: `dualops.cuda` itself, and what operators are launched with
    Row(
        "dualops.torch_bridge.*",
        (SPEC, "dualops.reference", "dualops.cuda", *HOST_OF_OPERATORS, OFFLINE),
        (*NUMBERS, "torch"),
    ),
    Row(
        "dualops.cli.*",
        (MACHINE, SPEC, TESTING, *PUBLIC, *HOST_OF_OPERATORS, BUNDLED, CACHE, OFFLINE, ROOF, COST, TUNED, TUNING),
        (*NUMBERS, *TOOLKIT, "rich", "torch"),
    ),
    Row("dualops.__main__", ("dualops.cli",), ()),
    Row("benchmarks.*", None, None),
)  # fmt: skip

STANDARD = frozenset(sys.stdlib_module_names)


@dataclass(frozen=True)
class Module:
    name: str
    path: Path

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def modules_of(root: Path) -> dict[str, Module]:
    """Every module of dualops and benchmarks below `root`, by its dotted name."""
    found = {}
    for path in sorted([*root.glob("dualops/**/*.py"), *root.glob("benchmarks/**/*.py")]):
        parts = path.relative_to(root).with_suffix("").parts
        if "env" in parts or "html" in parts:  # asv's, not ours
            continue
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path)
    return found


def imports_of(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports."""
    for node in ast.walk(ast.parse(module.path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(node, module)
            yield from ((node.lineno, _imported(source, alias.name, modules)) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                level = len(name.value) - len(name.value.lstrip("."))
                yield node.lineno, f"{_above(module, level)}.{name.value[level:]}" if level else name.value


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _above(module: Module, level: int) -> str:
    parts = module.package.split(".")
    return ".".join(parts[: len(parts) - level + 1])


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    return ".".join(filter(None, [_above(module, node.level), node.module]))


def _imported(source: str, name: str, modules: dict[str, Module]) -> str:
    """What `from source import name` reaches for: a module of that name, or `source` for a thing inside it."""
    whole = f"{source}.{name}"
    if whole in modules:  # a package may have replaced the module by a function of the same name
        return source if _rebinds(modules[source], name) else whole
    return source if source in modules else whole


def _rebinds(package: Module, name: str) -> bool:
    """Whether the package's `from .name import name` hides its submodule `name` behind what that holds."""
    for node in ast.walk(ast.parse(package.path.read_text("utf-8"))):
        if not isinstance(node, ast.ImportFrom) or _absolute(node, package) != f"{package.name}.{name}":
            continue
        if any((alias.asname or alias.name) == name for alias in node.names):
            return True
    return False


def _covers(pattern: str, name: str) -> bool:
    if pattern.endswith(".*"):
        return name == pattern[:-2] or name.startswith(pattern[:-1])
    return name == pattern


def _outside(allowed: tuple[str, ...], name: str) -> bool:
    if name.partition(".")[0] in STANDARD:
        return True
    special = _covers("numba.cuda.*", name)
    return any(_covers(f"{entry}.*", name) for entry in allowed if special <= entry.startswith("numba.cuda"))


def violations_of(module: Module, modules: dict[str, Module]) -> list[str]:
    """Each of its imports that the law forbids, or that the law does not know it."""
    row = next((row for row in LAW if _covers(row.modules, module.name)), None)
    if row is None:
        return [f"{module.name}: no row of the law names it"]
    found = []
    for line, target in imports_of(module, modules):
        top = target.partition(".")[0]
        if top in ("dualops", "benchmarks"):
            ours = target if target in modules else target.rpartition(".")[0]
            same = row.modules.endswith(".*") and _covers(row.modules, ours)
            legal = same or row.ours is None or any(_covers(pattern, ours) for pattern in row.ours)
        else:
            legal = top != "tests" and (row.outside is None or _outside(row.outside, target))
        if not legal:
            found.append(f"{module.name}, line {line}: imports {target}")
    return found


def test_every_import_is_lawful():
    modules = modules_of(ROOT)
    found = [each for module in modules.values() for each in violations_of(module, modules)]
    assert not found, "\n".join(found)


def test_the_walk_reads_the_whole_tree():
    modules = modules_of(ROOT)
    assert {"dualops", "dualops.spec.base", "dualops.cuda", "dualops.cuda.ptx.asm", "benchmarks"} <= modules.keys()
    seen = {target for module in modules.values() for _, target in imports_of(module, modules)}
    assert {"dualops.spec", "dualops.cuda.tile.rows", "numpy", "llvmlite.ir", "torch.Tensor", "numba.cuda"} <= seen


PLANTED = [  # file, source, line, what it imports
    ("dualops/spec/base.py", "import numba", 1, "numba"),
    ("dualops/spec/base.py", "from .. import reference", 1, "dualops.reference"),
    ("dualops/spec/base.py", "def f():\n    import torch", 2, "torch"),
    ("dualops/__init__.py", "from .spec import base", 1, "dualops.spec.base"),
    ("dualops/reference/softmax.py", "from ..cuda import softmax", 1, "dualops.cuda"),
    ("dualops/reference/softmax.py", "if TYPE_CHECKING:\n    from torch import Tensor", 2, "torch.Tensor"),
    ("dualops/testing/__init__.py", "from torch import Tensor", 1, "torch.Tensor"),
    ("dualops/cuda/simulator.py", "from .compiler import backend", 1, "dualops.cuda.compiler.backend"),
    ("dualops/cuda/simulator.py", "import numba.cuda", 1, "numba.cuda"),
    ("dualops/estimate/__init__.py", "from ..cuda.rms_norm import x", 1, "dualops.cuda.rms_norm"),
    ("dualops/cuda/launch/arrays.py", "try:\n    import torch\nexcept ImportError:\n    pass", 2, "torch"),
    ("dualops/cuda/flash_attention.py", "import_module('torch')", 1, "torch"),
    ("dualops/torch_bridge/__init__.py", "from ..cuda.softmax import x", 1, "dualops.cuda.softmax"),
    ("dualops/torch_bridge/__init__.py", "import dualops.cuda.softmax.operator", 1, "dualops.cuda.softmax.operator"),
    ("dualops/cli/__init__.py", "from ..cuda.softmax import operator", 1, "dualops.cuda.softmax.operator"),
    ("dualops/cli/__init__.py", "import_module('numba.cuda')", 1, "numba.cuda"),
    ("benchmarks/softmax.py", "from tests import problems", 1, "tests.problems"),
]


def planted(folder: Path, file: str, source: str) -> Module:
    """The module of this file, with other text."""
    (folder / Path(file).name).write_text(source)
    return Module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."), folder / Path(file).name)


@pytest.mark.parametrize(("file", "source", "line", "target"), PLANTED)
def test_a_planted_violation_is_found(tmp_path, file, source, line, target):
    module = planted(tmp_path, file, f"{source}\n")
    assert violations_of(module, modules_of(ROOT)) == [f"{module.name}, line {line}: imports {target}"]


@pytest.mark.parametrize("file", ["dualops/utils.py", "dualops/cuda/extra.py"])
def test_a_module_that_the_law_does_not_know_is_found(tmp_path, file):
    module = planted(tmp_path, file, "")
    assert violations_of(module, modules_of(ROOT)) == [f"{module.name}: no row of the law names it"]
