"""A kernel's key changes with each module that the kernel is made of, and with no other."""

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from dualops.cuda.compiler import offline, sources
from dualops.cuda.compiler.backend import Kernel
from tests.cuda.compile.installed import as_bytecode, as_sources, zipped
from tests.processes import printed, python_path

PACKAGE = Path(sources.__file__).parent.parent


def kernels() -> list[Kernel]:
    return [step.kernel for step in offline.steps_to_check("sm_90a")]


TRACED = """
import json, sys
from types import FunctionType, MethodType, ModuleType
import dualops.cuda
from dualops.cuda.compiler import offline

called = set()
def record(frame, event, _):
    if event == "call":
        called.add(frame.f_globals.get("__name__", ""))

def reached(value, seen, modules):
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, FunctionType):
        modules.add(value.__module__)
        names = [n for c in codes(value.__code__) for n in c.co_names]
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        held += [value.__globals__[name] for name in names if name in value.__globals__]
    elif isinstance(value, (tuple, list)):
        held = value
    elif type(value).__module__.startswith("dualops.") and hasattr(value, "__dict__"):
        modules.add(type(value).__module__)
        held = vars(value).values()
    else:
        held = ()
    for each in held:
        reached(each, seen, modules)

def codes(code):
    yield code
    for each in code.co_consts:
        if hasattr(each, "co_names"):
            yield from codes(each)

for step in offline.steps_to_check("sm_90a"):
    kernel, called = step.kernel, set()
    sys.setprofile(record)
    step.kernel.made_by.func.__wrapped__(*step.kernel.made_by.args, **step.kernel.made_by.keywords)
    sys.setprofile(None)
    reached(kernel.function, {}, called)
    print(json.dumps([kernel.identity, sorted(name for name in called if name.startswith("dualops."))]))
"""


def test_no_module_is_left_out():
    """Of each kernel: the modules whose functions its build calls, and those of the verbs and nouns that it reaches."""
    traced = dict(map(json.loads, printed("-c", TRACED).splitlines()))
    found = {kernel.identity: sources.closure(kernel.modules) for kernel in kernels()}
    assert traced.keys() == found.keys() and len(traced) > 400
    for identity, modules in traced.items():
        left_out = {name for name in modules if not name.startswith(sources.SIMULATOR)} - found[identity]
        assert not left_out, identity


COMPILED = """
import json, sys
from dualops.cuda.compiler import frontend, sources
from dualops.cuda.compiler.compile import compile_kernel
from dualops.cuda.compiler.offline import steps_to_check
step = next(step for step in steps_to_check("sm_90a", ["rms_norm"]) if "sm80" not in step.kernel.identity)
called = set()
sys.setprofile(lambda frame, event, _: called.add(frame.f_globals.get("__name__", "")))
compile_kernel(step.kernel, "sm_90a", step.shared_bytes)
sys.setprofile(None)
print(json.dumps([sorted(called), sorted(sources.made_of(step.kernel.modules))]))
"""
# they know the architecture's name, which is in the key, and that nothing is simulated
OF_ANY_KERNEL = {"dualops.cuda.launch.device"}


def test_no_module_of_the_compiler_is_left_out():
    called, made_of = map(set, json.loads(printed("-c", COMPILED)))
    assert {name for name in called if name.startswith("dualops.")} <= made_of | OF_ANY_KERNEL
    assert "dualops.cuda.compiler.frontend.passes" in called


@pytest.fixture
def edit(monkeypatch):
    """Let a module have another text. Undone at the end."""
    real = sources.source

    def edit(edited: str) -> None:
        def source(name: str) -> sources.Source:
            return real(name)._replace(digest="edited") if name == edited else real(name)

        monkeypatch.setattr(sources, "source", source)
        sources.digest.cache_clear()

    yield edit
    monkeypatch.undo()
    sources.digest.cache_clear()


def test_an_edit_of_any_module_reaches_the_kernels_that_use_it(edit):
    builds = {kernel.modules for kernel in kernels()}
    made_of = {modules: sources.made_of(modules) for modules in builds}
    before = {modules: sources.digest(modules) for modules in builds}
    for edited in sorted(set().union(*made_of.values())):
        edit(edited)
        changed = {modules for modules in builds if sources.digest(modules) != before[modules]}
        assert changed == {modules for modules in builds if edited in made_of[modules]}, edited


def share(module: str) -> tuple[int, int]:
    """How many kernels of the list an edit of a module of `dualops.cuda` compiles again, and of how many."""
    found = [f"dualops.cuda.{module}" in sources.made_of(kernel.modules) for kernel in kernels()]
    return sum(found), len(found)


def test_an_edit_compiles_no_other_kernel():
    for module in (
        "launch.operation",
        "tuning.tune",
        "compiler.offline",
        "tuning.records",
        "flash_attention",
        "matmul.sm90",
    ):
        assert find_spec(f"dualops.cuda.{module}")
        assert share(module)[0] == 0, module
    for module, most in (("norm.ring", 0.05), ("tile.softmax_rows", 0.25), ("flash_attention.sm90.forward", 0.05)):
        changed, count = share(module)
        assert 0 < changed <= most * count, module
    for module in ("compiler.compile", "compiler.frontend", "compiler.backend", "ptx.emitter"):
        changed, count = share(module)
        assert changed == count, module


def test_a_build_of_another_package_is_made_of_modules_of_both():
    found = sources.closure(frozenset(["examples.ladder.matmul.warps"]))
    assert {"examples.ladder.matmul.tiles", "dualops.cuda.tile.warp_mma"} < found
    assert {name.partition(".")[0] for name in found} == {"examples", "dualops"}


TREE = {
    "__init__.py": "from .tile import rows\n",
    "build.py": """
from .tile import (  # (some)
    rows_of,  # a verb
    TILE as WHOLE,
)
def late():
    import tree.late
""",
    "late.py": "from . import other as mine\n",
    "other.py": "from .starred import *\n",
    "starred.py": "",
    "unused.py": "",
    "tile/__init__.py": "from .rows import rows_of\nfrom .shared import Tile\nTILE = 3\n",
    "tile/rows.py": "if True:\n    from ..deep.er import er\nrows_of = er\n",
    "tile/shared.py": "Tile = 1\n",
    "tile/unused.py": "from .. import build\n",
    "deep/__init__.py": "from .. import unused\n",
    "deep/er.py": "import os, tree.also\ner = 2\n",
    "also.py": "# from . import unused\n",
}
MADE_OF = {"build", "late", "other", "starred", "tile", "tile.rows", "tile.shared", "deep.er", "also"}


READ = """
import json, sys
from dualops.cuda.compiler import sources
sources.ROOT = "tree"
found = sorted(sources.closure(frozenset(["tree.build"])))
print(json.dumps([found, sources._of(found)]))
"""


def read(path: Path) -> tuple[set[str], str]:
    names, digest = json.loads(printed("-c", READ, PYTHONPATH=python_path(str(path))))
    return {name.removeprefix("tree.") for name in names}, digest


SOURCES = [as_sources, zipped(as_sources)]


@pytest.mark.parametrize("make", [*SOURCES, as_bytecode, zipped(as_bytecode)])
def test_imports_are_followed_wherever_they_stand(tmp_path, make):
    digests = []
    for number, changed in enumerate(["", "unused.py", "starred.py"]):
        tree, made = tmp_path / f"{number}" / "tree", tmp_path / f"{number}" / "made"
        for name, text in TREE.items():
            (tree / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / "tree" / name).write_text(text + ("\nedited = 1\n" if name == changed else ""))
        make(tree, made)
        found, digest = read(made)
        assert found == MADE_OF if make in SOURCES else found > MADE_OF
        digests.append(digest)
    assert len({*digests}) == (2 if make in SOURCES else 3)


def test_no_import_is_overlooked():
    """In all of dualops, compared with what Python's own parser finds."""
    for path in PACKAGE.rglob("*.py"):
        text, package = path.read_text(), ".".join(path.relative_to(PACKAGE.parent).parent.parts)
        found = set(sources._imports(text, package))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert {sources.Import(alias.name) for alias in node.names} <= found, path
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
                origin = ".".join([*parents, *filter(None, [node.module])])
                names = {sources.Import(origin, alias.name, alias.asname or alias.name) for alias in node.names}
                assert names <= found, path
