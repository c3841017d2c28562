"""Type hints in `dualops.cuda`, where ruff can't tell a function of the host's from one that Numba types."""

import ast
from collections.abc import Iterator

import pytest

from tests.processes import ROOT

NUMBA_TYPES = {"verb", "instruction", "family"}


def without_hints(source: str) -> Iterator[str]:
    """Public functions and methods that lack a hint; what stands inside a function is a kernel's or a closure."""
    module = ast.parse(source)
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    for home in (module, *classes):
        for node in home.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                decorators = {ast.unparse(each).partition("(")[0] for each in node.decorator_list}
                own = home is not module and "staticmethod" not in decorators  # self
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs][own:]
                hinted = node.returns is not None and all(each.annotation is not None for each in arguments)
                if not hinted and not decorators & NUMBA_TYPES:
                    yield node.name


def test_public_functions_have_hints():
    lacking = {
        str(path.relative_to(ROOT)): found
        for path in (ROOT / "dualops" / "cuda").rglob("*.py")
        if (found := [*without_hints(path.read_text("utf-8"))])
    }
    assert lacking == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(x: int) -> int: ...", []),
        ("def f(x) -> int: ...", ["f"]),
        ("def f(x: int): ...", ["f"]),
        ("def f(*, x) -> int: ...", ["f"]),
        ("class A:\n    def f(self, x): ...\n    def g(self) -> int: ...\n    def _h(self): ...", ["f"]),
        ("@verb\ndef f(x): ...", []),
        ("def build() -> int:\n    def kernel(x): ...", []),
    ],
)
def test_what_lacks_one_is_found(source, found):
    assert [*without_hints(source)] == found
