"""What a kernel is made of: the sources of its builder and of all that these import.

A cubin is kept under a key that holds their digest. An edit of a module changes the keys of the kernels that are made
with it, and of no others. The imports are read in the sources, where a statement may stand anywhere: nothing is left
out because it is imported late, or by a type checker alone. `from package import name` leads to the module that the
package has the name from. A package that does more than import is followed as a whole.

Where a module has no source, as in an installation of bytecode alone, its imports are unknown: then the digest is of
the bytecode of all modules of dualops.
"""

from __future__ import annotations

import hashlib
import marshal
import pkgutil
import re
import sys
from collections.abc import Container, Iterable, Iterator
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any, NamedTuple

ROOT, ROOM = __name__.partition(".")[0], __name__.rpartition(".")[0]
CUDA = ROOM.rpartition(".")[0]
COMPILER, FRONTEND = f"{ROOM}.compile", f"{ROOM}.frontend"  # what makes cubins of kernels
SIMULATOR = f"{CUDA}.simulator"  # which makes none

STATEMENT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([\w., \t]*))", re.MULTILINE
)
COMMENT = re.compile(r"#.*")
ALIAS = re.compile(r"(\w+)(?:[ \t]+as[ \t]+(\w+))?")
NAME = re.compile(r"[\w.]+")


class Import(NamedTuple):
    """`from module import name as own`, or `import module`, which has no name."""

    module: str
    name: str = ""
    own: str = ""


class Source(NamedTuple):
    """A module."""

    digest: str
    is_package: bool
    imports: tuple[Import, ...] | None  # None: unknown


@cache
def digest(modules: frozenset[str]) -> str:
    """The digest of what a kernel of a build in these modules is made of."""
    return _of(sorted(made_of(modules)))


def made_of(modules: frozenset[str]) -> frozenset[str]:
    """The names of these modules, of all that they import, and of the compiler's own."""
    return closure(modules) | {COMPILER} | closure(frozenset(_below(FRONTEND)))


@cache
def everything() -> str:
    """The digest of all modules that kernels may be made of, whether or not one is."""
    return _of([*_below(CUDA), *_below(f"{ROOT}.spec.attention")])


def _of(modules: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{name} {source(name).digest}\n" for name in modules).encode()).hexdigest()


@cache
def closure(modules: frozenset[str]) -> frozenset[str]:
    """Return the names of these modules and of all that they import, directly or not, of dualops and their packages."""
    found, todo = set[str](), list(modules)
    roots = {ROOT, *(name.partition(".")[0] for name in modules)}
    while todo:
        name = todo.pop()
        if name not in found and name.partition(SIMULATOR)[0]:
            found.add(name)
            imports = source(name).imports
            todo += _below(ROOT) if imports is None else _modules(imports, roots)
    return frozenset(found)


def _modules(imports: Iterable[Import], roots: Container[str]) -> Iterator[str]:
    for each in imports:
        if each.module.partition(".")[0] in roots and _spec(each.module):
            yield _origin(each)


def _origin(wanted: Import) -> str:
    """The module that an import gets its name from."""
    found = source(wanted.module)
    if wanted.name and found.is_package:
        for each in found.imports or ():
            if each.own == wanted.name and each[:2] != wanted[:2]:
                return _origin(each)
        if _spec(f"{wanted.module}.{wanted.name}"):
            return f"{wanted.module}.{wanted.name}"
    return wanted.module


@cache
def source(name: str) -> Source:
    """What the loader of a module has of it: it may lie in a zip file, or be a session that has no loader."""
    spec: Any = _spec(name)
    if not hasattr(spec and spec.loader, "get_source"):
        return Source("", False, None)
    text, is_package = spec.loader.get_source(name), spec.submodule_search_locations is not None
    if text is None:
        code = marshal.dumps(spec.loader.get_code(name), 2)
        return Source(hashlib.sha256(code).hexdigest(), is_package, None)
    imports = tuple(_imports(text, name if is_package else name.rpartition(".")[0]))
    return Source(hashlib.sha256(text.encode()).hexdigest(), is_package, imports)


@cache
def _spec(name: str) -> Any:
    """The ModuleSpec, None where there is none. It imports nothing."""
    if name in sys.modules:
        return sys.modules[name].__spec__
    package = name.rpartition(".")[0]
    if not package:
        return find_spec(name)
    above = _spec(package)
    return PathFinder.find_spec(name, above.submodule_search_locations) if above else None


def _imports(text: str, package: str) -> Iterator[Import]:
    """The imports of a source of this package. What looks like one in a string is taken for one too."""
    for level, module, names, modules in STATEMENT.findall(COMMENT.sub("", text)):
        if modules:
            yield from (Import(each) for each in NAME.findall(modules))
            continue
        parents = package.split(".")[: package.count(".") + 2 - len(level)] if level else []
        origin = ".".join([*parents, *filter(None, [module])])
        if "*" in names:
            yield Import(origin)
        for name, own in ALIAS.findall(names):
            yield Import(origin, name, own or name)


@cache
def _below(name: str) -> tuple[str, ...]:
    """A package and all modules in it, in order."""
    found = [name]
    for _, each, is_package in pkgutil.iter_modules(_spec(name).submodule_search_locations or (), f"{name}."):
        found += _below(each) if is_package else [each]
    return tuple(found)
